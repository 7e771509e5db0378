"""One request of the agent to an OpenAI-compatible server, through the library that agents use."""

import logging
import secrets
from typing import Any

import openai

from weightkeeper.errors import AnswerCutError, ConfigError, NoAnswerError
from weightkeeper.recovery.answers import Answer, checked

PASSING = (408, 409, 425, 429)
"""Statuses besides 5xx that may be gone at the next try; any other 4xx will come again."""


for _name in ("httpx", "httpx2", "openai"):  # a line for each request, on the level of decisions
    logging.getLogger(_name).setLevel(logging.WARNING)


class Client:
    """Asks greedy completions, one at a time, each once.

    Args:
        url: of the API, up to and with `/v1`.
        model: as the server names it.
        timeout_s: for each read and write of a request; nothing waits longer.
    """

    def __init__(self, url: str, model: str, timeout_s: float):
        self._model = model
        self._url = url
        self._openai = openai.OpenAI(base_url=url, api_key="none", timeout=timeout_s, max_retries=0)

    def ask(self, prompt: str, tokens: int, stream: bool = False) -> Answer:
        """The answer to one request.

        Raises:
            AnswerCutError: it ended before it was whole.
            NoAnswerError: nobody there, out of time, or the server says that it failed.
            ConfigError: the server will never answer this request, or does not know the model.
        """
        try:
            return self._streamed(prompt, tokens) if stream else self._whole(prompt, tokens)
        except openai.APIStatusError as error:
            words = f"{self._url} answered {error.status_code}: {str(error.message)[:500]}"
            if error.status_code < 500 and error.status_code not in PASSING:
                raise ConfigError(f"{words}; is {self._model!r} a model of this server?") from error
            raise NoAnswerError(words) from error
        except openai.APIConnectionError as error:  # a time-out is one
            cause = error.__cause__ or error
            raise NoAnswerError(f"{self._url}: {type(cause).__name__}: {cause}") from error
        except openai.OpenAIError as error:
            raise NoAnswerError(f"{self._url}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._openai.close()

    def _whole(self, prompt: str, tokens: int) -> Answer:
        answer = self._openai.completions.create(**self._request(prompt, tokens))
        if not answer.choices or answer.usage is None:
            raise AnswerCutError("an answer without a choice, or without its count of tokens")
        choice = answer.choices[0]
        return checked(choice.text, _ids(choice), choice.finish_reason, answer.usage.completion_tokens, tokens)

    def _streamed(self, prompt: str, tokens: int) -> Answer:
        stream = self._openai.completions.create(
            **self._request(prompt, tokens), stream=True, stream_options={"include_usage": True}
        )
        text, ids, reason, count = "", [], None, None
        try:
            for part in stream:
                if part.usage is not None:
                    count = part.usage.completion_tokens
                for choice in part.choices:
                    text += choice.text
                    ids += _ids(choice)
                    reason = choice.finish_reason or reason
        except openai.OpenAIError:
            raise
        except Exception as error:  # what the HTTP library below raises while reading is not the same in all versions
            raise AnswerCutError(f"a stream broke off: {type(error).__name__}: {error}") from error
        finally:
            stream.close()
        if reason is None or count is None:
            raise AnswerCutError(f"a stream ended without its end, after {len(text)} characters")
        return checked(text, ids, reason, count, tokens)

    def _request(self, prompt: str, tokens: int) -> dict[str, Any]:
        # A prefix that is in the cache is computed in other shapes, which can turn a near tie between two tokens.
        extra = {"return_token_ids": True, "cache_salt": secrets.token_hex(8)}
        return {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "extra_body": extra}


def _ids(choice: Any) -> list[int]:
    """vLLM's own field, which the library keeps as it comes."""
    return list(getattr(choice, "token_ids", None) or ())
