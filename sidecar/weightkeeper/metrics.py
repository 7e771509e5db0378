"""Prometheus metrics over HTTP, on a port that somebody asked for; and what a keeper knows, in their form.

The names follow the conventions: a unit at the end, `_total` for what only grows.
"""

from collections.abc import Callable, Iterator
from typing import Any, get_args

from weightkeeper.errors import ConfigError
from weightkeeper.protocol import State, Status

PREFIX = "weightkeeper"


class KeeperCollector:
    """A keeper's status as metrics, taken when they are asked for."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """One family after the other."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        state = GaugeMetricFamily(f"{PREFIX}_keeper_state", "1 for the state that the keeper is in.", labels=["state"])
        for name in get_args(State):
            state.add_metric([name], float(name == status.state))
        yield state
        held = GaugeMetricFamily(f"{PREFIX}_weights_bytes", "Weights that are offered.", labels=["device", "model"])
        releasing = GaugeMetricFamily(
            f"{PREFIX}_weights_releasing_bytes", "Weights that engines map and nobody is offered.", labels=["device"]
        )
        for device, nbytes in status.held.devices.items() if status.held else ():
            held.add_metric([device, status.held.model], nbytes)
        for device in sorted({device for each in status.releasing for device in each.devices}):
            releasing.add_metric([device], sum(each.devices.get(device, 0) for each in status.releasing))
        yield held
        yield releasing
        leases = GaugeMetricFamily(f"{PREFIX}_leases", "Engines that map weights.", labels=["device", "mode"])
        kinds = {(each.device, each.mode) for each in status.leases}
        for device, mode in sorted(kinds):
            leases.add_metric([device, mode], sum((each.device, each.mode) == (device, mode) for each in status.leases))
        yield leases
        yield CounterMetricFamily(f"{PREFIX}_loads", "Loads that ended with weights.", value=status.loads)
        yield GaugeMetricFamily(
            f"{PREFIX}_load_failed", "1 where the last load failed.", value=float(bool(status.failure))
        )
        if status.held and not status.held.adopted_from:
            yield GaugeMetricFamily(
                f"{PREFIX}_load_duration_seconds", "Of the load that is held.", value=status.held.load_seconds
            )
        fallbacks = CounterMetricFamily(
            f"{PREFIX}_fallbacks", "Engines that took no weights, by cause.", labels=["code"]
        )
        for code, count in sorted(status.fallbacks.items()):
            fallbacks.add_metric([code], count)
        yield fallbacks
        yield GaugeMetricFamily(
            f"{PREFIX}_keeper_memory_bytes", "Resident memory of the keeper.", value=status.own_bytes
        )


def registry(*collectors: Any) -> Any:
    """A registry of ours, with what `collectors` tell and nothing else.

    Raises:
        ConfigError: the package prometheus-client is not here.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError as error:
        raise ConfigError("--metrics-port needs the Python package prometheus-client, which is not here") from error
    made = CollectorRegistry()
    for collector in collectors:
        made.register(collector)
    return made


def serve(made: Any, host: str, port: int) -> int:
    """Answer GET /metrics in threads, for as long as the process lives; the port, which the system chooses for 0.

    Raises:
        ConfigError: the address cannot be used.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, host, made)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port} on {host}: {error.strerror or error}") from error
    return server.server_port
