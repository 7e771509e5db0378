"""The agent under test: a job of steps, each a question whose text depends on all answers before, and a side effect.

Its state lies outside the model server and outside itself. It may be killed between any two instructions: what was
answered is not asked again, what was not is, and the ledger has each effect once, because the step's key was kept
before the first call.
"""

import os

import tenacity

from weightkeeper.errors import AnswerCutError, NoAnswerError
from weightkeeper.recovery.agent_settings import LEDGER_FILE, STATE_FILE, Settings
from weightkeeper.recovery.answers import Answer
from weightkeeper.recovery.asking import Client
from weightkeeper.recovery.ledger import Ledger
from weightkeeper.recovery.questions import effect, question
from weightkeeper.recovery.state import State, Step, alone

FIRST_WAIT_SECONDS = 0.02
"""After the first failed try, at most; doubles. Short, because what is measured is the server and not the client."""


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
