"""Who sees that a new engine answers, and whether it answers rightly."""

import functools
import time

from weightkeeper.errors import ConfigError
from weightkeeper.recovery.answers import Answer
from weightkeeper.recovery.completion import complete
from weightkeeper.recovery.result import Sample

Judgement = tuple[bool, str]
"""Whether everything is right, and what is not, in words."""


class Witness:
    """One for a whole run; `begin` to `end` is one sample."""

    def begin(self, name: str, times_steps: int) -> None:
        """Have going on whatever goes on while an engine is lost.

        Args:
            name: of the sample, for files.
            times_steps: of the scenario.

        Raises:
            ServerStartError: it does not.
        """

    def back(self, gone: float) -> tuple[float, float | None]:
        """When there was a first answer after `gone`, and when a first right one. The engine is healthy.

        Raises:
            ServerStartError: none came.
        """
        raise NotImplementedError

    def judge(self) -> Judgement:
        """Of everything that was seen since `begin`."""
        raise NotImplementedError

    def told(self, found: Sample, since: float) -> Sample:
        """A sample with what was seen so far, counted from the interruption."""
        return found

    def end(self) -> None:
        """Whatever went on, goes on no more."""


class CompletionWitness(Witness):
    """Asks one completion as soon as the engine is healthy; nobody works meanwhile.

    The first engine that it asks gives the reference.

    Attributes:
        expected: the reference; None before there is one.

    Args:
        port: where engines answer.
        model: as they name it.
        tokens: of the completion.
        seconds: for an answer.
    """

    def __init__(self, port: int, model: str, tokens: int, seconds: float):
        self.expected: Answer | None = None
        self._ask = functools.partial(complete, port, model, tokens, seconds)
        self._given: Answer | None = None

    def back(self, gone: float) -> tuple[float, float | None]:
        self._given = self._ask()
        at = time.monotonic()
        if self.expected is None:
            self._refer(self._given)
        return at, at if self._given == self.expected else None

    def judge(self) -> Judgement:
        if self._given == self.expected:
            return True, ""
        return False, f"{_words(self._given)}, and not {_words(self.expected)}"

    def _refer(self, given: Answer) -> None:
        """Take a completion as the reference, if the same engine gives it twice.

        Raises:
            ConfigError: it does not.
        """
        again = self._ask()
        if again != given:
            raise ConfigError(
                f"the same completion asked twice of the same engine differs: {_words(given)} and {_words(again)}; "
                "answers cannot be compared here (see vLLM's VLLM_BATCH_INVARIANT)"
            )
        self.expected = given


def _words(answer: Answer) -> str:
    return f"tokens {list(answer.token_ids)}" if answer.token_ids else repr(answer.text)
