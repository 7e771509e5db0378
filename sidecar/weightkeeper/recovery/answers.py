"""What an answer of an OpenAI-compatible server is, and what only looks like one.

A server that is being stopped may answer with status 200 and half a text: `finish_reason` is then `abort`, or a stream
ends without its last message, or there are fewer tokens than were asked for and no stop. None of that is a result.
"""

from collections.abc import Iterable

import msgspec

from weightkeeper.errors import AnswerCutError

WHOLE = ("stop", "length")
"""How an answer ends that was not cut short."""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer.

    Attributes:
        token_ids: of the text, where the server tells them (`return_token_ids`, vLLM does).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def checked(text: str, ids: Iterable[int], reason: str | None, count: int, asked: int) -> Answer:
    """The answer, if it is one.

    Args:
        count: tokens as the server counts them.
        asked: tokens that were asked for at most.

    Raises:
        AnswerCutError: it is cut short.
    """
    ids = tuple(ids)
    if reason not in WHOLE:
        raise AnswerCutError(f"finish_reason is {reason}, after {count} of {asked} tokens")
    if reason == "length" and count < asked:
        raise AnswerCutError(f"{count} of {asked} tokens, and no stop")
    if ids and len(ids) < count:
        raise AnswerCutError(f"{len(ids)} token ids of {count} tokens")
    return Answer(text, ids, reason)
