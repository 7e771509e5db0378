"""Tokens a second from a new engine on: many clients ask for streamed answers, one after the other."""

import http.client
import json
import threading
import time
from collections import Counter

from weightkeeper.errors import NoAnswerError
from weightkeeper.recovery.result import Throughput

READ_SECONDS = 60.0


def measure(
    port: int, model: str, clients: int, minute_s: float, steady_s: float, since: float, tokens: int = 128
) -> Throughput:
    """Load an engine until `minute_s` and `steady_s` are over.

    Args:
        since: when it became healthy, in seconds of `time.monotonic`.
        tokens: of each answer.

    Raises:
        NoAnswerError: not one token came.
    """
    counts: Counter[int] = Counter()
    errors: list[str] = []
    over = threading.Event()
    lock = threading.Lock()

    def load(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                for count in stream(port, model, f"Client {client}, question {number}: count up.", tokens):
                    with lock:
                        counts[int(time.monotonic() - since)] += count
                    if over.is_set():
                        return
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                over.wait(0.2)

    threads = [threading.Thread(target=load, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    over.wait(max(0.0, since + minute_s + steady_s - time.monotonic()))
    over.set()
    for thread in threads:
        thread.join(READ_SECONDS)
    curve = tuple(counts[second] for second in range(int(minute_s + steady_s)))
    if not any(curve):
        raise NoAnswerError(f"no token within {minute_s + steady_s:.0f} s: {errors[-1] if errors else 'silence'}")
    first, steady = curve[: int(minute_s)], curve[int(minute_s) :]
    return Throughput(
        clients=clients,
        first_minute=round(sum(first) / len(first), 2),
        steady=round(sum(steady) / len(steady), 2),
        minute_s=minute_s,
        steady_s=steady_s,
        curve=curve,
    )


def stream(port: int, model: str, prompt: str, tokens: int):
    """Ask once; yield how many tokens each part of the answer has."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                yield sum(len(choice.get("token_ids") or "?") for choice in choices)
    finally:
        connection.close()
