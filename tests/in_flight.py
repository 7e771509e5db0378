"""Completions that run for a while, one plain and one streamed, as their client sees them."""

import http.client
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

SECONDS = 240


@dataclass(frozen=True, slots=True)
class Answer:
    """To a plain completion."""

    status: int
    content: dict[str, Any]


@dataclass(slots=True)
class Stream:
    """What has come of a stream.

    Attributes:
        chunks: the last one has the usage and no choice, as asked for.
        is_done: whether [DONE] came.
        error: that it broke off with.
    """

    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    error: httpx.TransportError | None = None


class InFlight:
    """A plain and a streamed completion of so many tokens.

    Attributes:
        plain: the answer, whatever its status.
        stream: what came of it, where its status is 200.
    """

    def __init__(self, port: int, model: str, tokens: int):
        self._port, self._model, self._tokens = port, model, tokens
        self._is_taken = threading.Event()
        self._threads = ThreadPoolExecutor()
        self.plain: Future[Answer] = self.ask(tokens)
        self.stream: Future[Stream] = self._threads.submit(self._stream)

    def ask(self, tokens: int) -> Future[Answer]:
        """A plain completion on a new connection. It is under way when this returns."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        body = json.dumps(self._request(tokens))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return self._threads.submit(self._answer, connection)

    def until_taken(self) -> None:
        """Wait until the server has both: the stream's head is there, and the plain one was asked for before it."""
        assert self._is_taken.wait(SECONDS), self.ended()

    def ended(self) -> list[Answer | Stream]:
        """Of the two."""
        return [each.result() for each in (self.plain, self.stream) if each.done()]

    def _request(self, tokens: int, **more: Any) -> dict[str, Any]:
        asked = {"model": self._model, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
        return asked | {"ignore_eos": True} | more

    def _answer(self, connection: http.client.HTTPConnection) -> Answer:
        try:
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.getheader("content-type") == "application/json"
            return Answer(answer.status, json.loads(content) if is_json else {"text": content.decode()})
        finally:
            connection.close()

    def _stream(self) -> Stream:
        came = Stream()
        request = self._request(self._tokens, stream=True, stream_options={"include_usage": True})
        url = f"http://127.0.0.1:{self._port}/v1/completions"
        try:
            with httpx.stream("POST", url, json=request, timeout=SECONDS, trust_env=False) as answer:
                answer.raise_for_status()
                self._is_taken.set()
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        came.is_done = True
                    elif data:
                        came.chunks.append(json.loads(data))
        except httpx.TransportError as error:
            came.error = error
        return came
