"""An agent as it must not be, to see that the check finds it: state in memory, no idempotency keys, any answer taken.

When a request fails or the agent is killed, it begins the job again. It is never offered to anybody.
"""

import time

import openai

from weightkeeper.recovery.agent_settings import LEDGER_FILE, STATE_FILE, Settings
from weightkeeper.recovery.answers import Answer
from weightkeeper.recovery.ledger import Ledger
from weightkeeper.recovery.questions import effect, question
from weightkeeper.recovery.state import State


def run(settings: Settings) -> None:
    """Do the job; state is written for the eyes of the check alone, and never read."""
    settings.directory.mkdir(parents=True, exist_ok=True)
    state = State(settings.directory / STATE_FILE)
    ledger = Ledger(settings.directory / LEDGER_FILE)
    client = openai.OpenAI(base_url=settings.url, api_key="none", timeout=settings.timeout_s, max_retries=0)
    state.begin(settings.job, settings.steps, settings.tokens)
    while True:
        try:
            answers = _once(settings, state, ledger, client)
            break
        except openai.OpenAIError as error:
            state.event(settings.job, -1, "failed", f"{type(error).__name__}: {error}")
            time.sleep(settings.longest_wait_s)
    for number, answer in enumerate(answers):
        state.answered(settings.job, number, answer)
    state.finish(settings.job)


def _once(settings: Settings, state: State, ledger: Ledger, client: openai.OpenAI) -> list[Answer]:
    answers: list[Answer] = []
    for number in range(settings.steps):
        state.step(settings.job, number)
        state.asked(settings.job, number)
        text = question(settings.job, number, answers)
        given = client.completions.create(
            model=settings.model, prompt=text, max_tokens=settings.tokens, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        choice = given.choices[0]
        answers.append(Answer(choice.text, tuple(getattr(choice, "token_ids", None) or ()), choice.finish_reason))
        ledger.record(settings.job, number, effect(number, answers[-1]), None)
        state.event(settings.job, number, "effect")
    return answers
