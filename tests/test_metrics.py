"""Metrics: names and numbers as Prometheus reads them, from a real answer over HTTP."""

import socket
import subprocess
import sys
import urllib.request

import msgspec
import pytest

pytest.importorskip("prometheus_client")
from keepers import KeeperProcess
from prometheus_client.parser import text_string_to_metric_families

from weightkeeper import metrics
from weightkeeper.errors import ConfigError
from weightkeeper.protocol import Held, Lease, Status
from weightkeeper.supervisor.history import History, Record
from weightkeeper.supervisor.measure import Measure

HELD = Held(2, "/model", "ff", 30, {"GPU-a": 10, "GPU-b": 20}, 5, "host", 1.5, 0.0)


def asked(port: int) -> dict[tuple[str, ...], float]:
    """Name and label values → number, of everything that is told."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value for sample in samples}


def test_what_a_keeper_holds_and_who_maps_it():
    """Bytes by device, leases, loads, causes of fallbacks; taken when they are asked for."""
    status = Status(
        state="ready", version="1", pid=1, started_at=0.0, config="", own_bytes=7, held=HELD,
        releasing=(Held(1, "/old", "ee", 4, {"GPU-a": 4}, 1, "host", 1.0, 0.0),),
        leases=(Lease("e", "GPU-a", "zero_copy", 0, 1, 0.0, 2), Lease("f", "GPU-a", "zero_copy", 0, 2, 0.0, 2)),
        loads=3, fallbacks={"mismatch": 2},
    )  # fmt: skip
    port = metrics.serve(metrics.registry(metrics.KeeperCollector(lambda: status)), "127.0.0.1", 0)
    found = asked(port)
    assert found["weightkeeper_weights_bytes", "GPU-b", "/model"] == 20
    assert found["weightkeeper_weights_releasing_bytes", "GPU-a"] == 4
    assert found["weightkeeper_leases", "GPU-a", "zero_copy"] == 2
    assert found["weightkeeper_loads_total",] == 3
    assert found["weightkeeper_load_failed",] == 0
    assert found["weightkeeper_load_duration_seconds",] == 1.5
    assert found["weightkeeper_fallbacks_total", "mismatch"] == 2
    assert found["weightkeeper_keeper_memory_bytes",] == 7
    assert {name[1]: value for name, value in found.items() if name[0] == "weightkeeper_keeper_state"} == {
        "empty": 0, "loading": 0, "ready": 1, "failed": 0, "released": 0,
    }  # fmt: skip


def test_adopted_weights_took_no_load():
    """A duration of nothing would be taken for a fast one."""
    adopted = msgspec.structs.replace(HELD, adopted_from="vllm-a")
    for held, count in ((HELD, 1), (adopted, 0)):
        status = Status("ready", "0", 1, 0.0, "", 1, held=held)
        names = [family.name for family in metrics.KeeperCollector(lambda status=status: status).collect()]
        assert names.count("weightkeeper_load_duration_seconds") == count
        assert names.count("weightkeeper_weights_bytes") == 1


def test_an_empty_keeper_has_metrics_too():
    """Nothing held is no weights, not an error."""
    status = Status(state="empty", version="1", pid=1, started_at=0.0, config="", own_bytes=7)
    port = metrics.serve(metrics.registry(metrics.KeeperCollector(lambda: status)), "127.0.0.1", 0)
    found = asked(port)
    assert found["weightkeeper_keeper_state", "empty"] == 1
    assert not any(name[0] == "weightkeeper_weights_bytes" for name in found)


def test_a_running_keeper_answers_on_the_port_that_was_asked_for(tmp_path):
    """From a real process; without the option there is no port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keeper = KeeperProcess(tmp_path, "--metrics-port", str(port)).start(with_config=False)
    try:
        keeper.wait_for_state("empty")
        found = asked(port)
        assert found["weightkeeper_keeper_state", "empty"] == 1
        assert 0 < found["weightkeeper_keeper_memory_bytes",] < 45e6
    finally:
        keeper.kill()


def test_what_is_put_on_record_is_counted(tmp_path):
    """By service, action and result, with the seconds and the phases."""
    measure = Measure("127.0.0.1", 0)
    history = History(tmp_path, observe=measure.count)
    for seconds in (1.5, 0.5):
        history.append(Record("t", "engine", "reload", "c", "healthy", seconds, phases={"fork": 0.25}))
    history.append(Record("t", "engine", "reload", "c", "refused", 0.1))
    found = asked(measure.port)
    assert found["weightkeeper_supervisor_actions_total", "reload", "healthy", "engine"] == 2
    assert found["weightkeeper_supervisor_actions_total", "reload", "refused", "engine"] == 1
    assert found["weightkeeper_supervisor_action_duration_seconds_sum", "reload", "engine"] == pytest.approx(2.1)
    assert found["weightkeeper_engine_start_phase_seconds", "fork", "engine"] == 0.25


def test_a_port_that_is_taken_is_said():
    """With its number."""
    port = metrics.serve(metrics.registry(), "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"--metrics-port {port} on 127.0.0.1: Address already in use"):
        metrics.serve(metrics.registry(), "127.0.0.1", port)


def test_without_the_package_it_is_said_only_where_metrics_are_asked_for():
    """The images may leave it out."""
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from weightkeeper import metrics; import weightkeeper.supervisor.loop\n"
        "try: metrics.registry()\nexcept metrics.ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "--metrics-port needs the Python package prometheus-client, which is not here\n"
