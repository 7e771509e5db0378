"""When a server that died is started again. Pure: deaths in, delays out."""

from dataclasses import dataclass

BROKEN_AFTER = 5
"""Deaths in a row without becoming healthy."""


@dataclass(slots=True)
class Backoff:
    """Delays in seconds: 0 after a server that was good for long, then `first`, doubling up to `most`.

    Attributes:
        good: seconds of health after which a death counts as the first one.
    """

    first: float = 1.0
    most: float = 60.0
    good: float = 60.0
    _deaths: int = 0
    _stillborn: int = 0

    def died(self, healthy_seconds: float | None) -> float | None:
        """The delay before the next start; None where there is to be none.

        Args:
            healthy_seconds: that the server was healthy for; None where it never became so.
        """
        self._stillborn = self._stillborn + 1 if healthy_seconds is None else 0
        if self._stillborn >= BROKEN_AFTER:
            return None
        if healthy_seconds is not None and healthy_seconds >= self.good:
            self._deaths = 0
        self._deaths += 1
        if self._deaths == 1:
            return 0.0
        return min(self.most, self.first * 2.0 ** min(self._deaths - 2, 32))

    def forgive(self) -> None:
        """Somebody asked for a start: count anew."""
        self._deaths = self._stillborn = 0
