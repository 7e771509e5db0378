"""The job of the agent under test: what it asks in each step, and the side effect that follows an answer."""

import hashlib

from weightkeeper.recovery.answers import Answer

QUOTED_CHARACTERS = 160
"""Of the answer before, in the next question."""


def question(job: str, number: int, answers: list[Answer]) -> str:
    """The text of a step. A repeated, lost or other answer before it makes it another one.

    It does not depend on the job's length, so that a long job begins as a short one of the same name.
    """
    receipt = hashlib.blake2b(digest_size=8)
    for answer in answers:
        receipt.update(f"{answer.text}\0{answer.token_ids}\0".encode(errors="replace"))
    quoted = answers[-1].text[-QUOTED_CHARACTERS:] if answers else "nothing yet"
    return f"Step {number + 1} of the {job}, receipt {receipt.hexdigest()}. Found so far: {quoted}\nNext:"


def effect(number: int, answer: Answer) -> str:
    """What the tool is told to do with an answer."""
    digest = hashlib.blake2b(f"{answer.text}\0{answer.token_ids}".encode(errors="replace"), digest_size=8)
    return f"file note {number} ({digest.hexdigest()})"
