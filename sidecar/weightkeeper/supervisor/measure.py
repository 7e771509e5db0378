"""The supervisor's own metrics: what is put on record, counted."""

from typing import Any

from weightkeeper import metrics
from weightkeeper.metrics import PREFIX
from weightkeeper.supervisor.history import Record

SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 1800.0)
"""Bounds of the buckets: a reload takes one or two, a recreation of a large model minutes."""


class Measure:
    """Counts records, and answers on a port.

    Raises:
        ConfigError: the package prometheus-client is not here, or the address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        self._registry = metrics.registry()
        from prometheus_client import Counter, Gauge, Histogram

        self._actions = self._made(
            Counter, "supervisor_actions", "Things done to engines, and that happened to them.", "action", "result"
        )
        self._seconds = self._made(
            Histogram, "supervisor_action_duration_seconds", "From an action to its result.", "action", buckets=SECONDS
        )
        self._phases = self._made(
            Gauge, "engine_start_phase_seconds", "Where the seconds of the last start went.", "phase"
        )
        self.port = metrics.serve(self._registry, host, port)

    def count(self, record: Record) -> None:
        """Take a record in."""
        self._actions.labels(record.service, record.action, record.result).inc()
        self._seconds.labels(record.service, record.action).observe(record.seconds)
        for phase, seconds in record.phases.items():
            self._phases.labels(record.service, phase).set(seconds)

    def _made(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        return kind(f"{PREFIX}_{name}", text, ["service", *labels], registry=self._registry, **more)
