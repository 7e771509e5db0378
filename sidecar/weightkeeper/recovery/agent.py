"""The agent under test: a job of steps, each a question whose text depends on all answers before, and a side effect.

Its state lies outside the model server and outside itself. It may be killed between any two instructions: what was
answered is not asked again, what was not is, and the ledger has each effect once, because the step's key was kept
before the first call.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import tenacity

from weightkeeper.errors import AnswerCutError, NoAnswerError
from weightkeeper.recovery.asking import Answer, Client
from weightkeeper.recovery.ledger import Ledger
from weightkeeper.recovery.state import State, Step, alone

STATE_FILE = "agent.sqlite"
LEDGER_FILE = "ledger.sqlite"

FIRST_WAIT_SECONDS = 0.02
"""After the first failed try, at most; doubles. Short, because what is measured is the server and not the client."""

QUOTED_CHARACTERS = 160
"""Of the answer before, in the next question."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one agent works on.

    Attributes:
        directory: of its state file and the ledger.
        url: of the API, with `/v1`.
        model: as the server names it.
        job: name of the job; the same name gives the same questions.
        steps: of the job.
        tokens: asked for in each step.
        timeout_s: for each read and write of a request.
        patience_s: after which a step without an answer ends the agent; it can be started again.
        longest_wait_s: between two tries.
    """

    directory: Path
    url: str
    model: str
    job: str = "inventory"
    steps: int = 12
    tokens: int = 32
    timeout_s: float = 60.0
    patience_s: float = 600.0
    longest_wait_s: float = 0.25


def run(settings: Settings) -> None:
    """Begin the job or go on with it, to its end.

    Raises:
        NoAnswerError: a step got no answer within `patience_s`; what is done stays done.
        ConfigError: the server does not know the model, or another agent works in this directory.
    """
    os.makedirs(settings.directory, exist_ok=True)
    with alone(settings.directory / STATE_FILE):
        state = State(settings.directory / STATE_FILE)
        ledger = Ledger(settings.directory / LEDGER_FILE)
        client = Client(settings.url, settings.model, settings.timeout_s)
        try:
            _Work(settings, state, ledger, client).do()
        finally:
            client.close()
            ledger.close()
            state.close()


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


class _Work:
    """One job, from where it is to its end."""

    def __init__(self, settings: Settings, state: State, ledger: Ledger, client: Client):
        self._settings = settings
        self._state = state
        self._ledger = ledger
        self._client = client

    def do(self) -> None:
        job, steps = self._settings.job, self._settings.steps
        self._state.begin(job, steps, self._settings.tokens)
        answers: list[Answer] = []
        for number in range(steps):
            step = self._state.step(job, number)
            answer = step.answer or self._answer(step, question(job, number, answers))
            if not step.effected:
                is_new = self._ledger.record(job, number, effect(number, answer), step.key)
                self._state.effected(job, number, is_new)
            answers.append(answer)
        self._state.finish(job)

    def _answer(self, step: Step, text: str) -> Answer:
        """Ask until there is a whole answer, every other step as a stream."""
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((AnswerCutError, NoAnswerError)),
            wait=tenacity.wait_random_exponential(FIRST_WAIT_SECONDS, self._settings.longest_wait_s),
            stop=tenacity.stop_after_delay(self._settings.patience_s),
            reraise=True,
        )
        answer = tries(self._try, step.number, text)
        self._state.answered(self._settings.job, step.number, answer)
        return answer

    def _try(self, number: int, text: str) -> Answer:
        self._state.asked(self._settings.job, number)
        try:
            return self._client.ask(text, self._settings.tokens, stream=number % 2 == 1)
        except AnswerCutError as error:
            self._state.event(self._settings.job, number, "cut", str(error))
            raise
        except NoAnswerError as error:
            self._state.event(self._settings.job, number, "failed", str(error))
            raise
