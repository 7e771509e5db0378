"""One greedy completion of a fixed question, with nothing but the standard library."""

import http.client
import json
import secrets
import time

from weightkeeper.errors import AnswerCutError, ServerStartError
from weightkeeper.recovery.answers import Answer, checked

PROMPT = "The capital of France is"


def complete(port: int, model: str, tokens: int, seconds: float) -> Answer:
    """Ask once.

    Args:
        model: as the server names it.
        tokens: of the answer; it has as many.
        seconds: for each read and write.

    Raises:
        ServerStartError: there was no whole answer.
    """
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "cache_salt": secrets.token_hex(8),
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    begun = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status != 200:
            words = raw[:500].decode(errors="replace")
            raise ServerStartError(f"the completion was answered with status {answer.status}: {words}")
        given = json.loads(raw)
        choice = given["choices"][0]
        count = given["usage"]["completion_tokens"]
        return checked(choice["text"], choice.get("token_ids") or (), choice["finish_reason"], count, tokens)
    except AnswerCutError as error:
        raise ServerStartError(f"the completion was cut short: {error}") from error
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        after = f"after {time.monotonic() - begun:.1f} s"
        raise ServerStartError(f"no completion {after}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
