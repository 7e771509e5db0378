"""The benchmark as a program: on real processes, with a stand-in in place of vLLM's server."""

import contextlib
import json
import signal
from pathlib import Path
from random import Random

import pytest
from keepers import wait_for
from models import write
from recovery_runs import Benchmark

from weightkeeper.recovery import engine, page_cache, plan, processes, result, runner
from weightkeeper.recovery.bench import Bench, Settings
from weightkeeper.recovery.launched import shortened
from weightkeeper.recovery.scenarios import ALL

ROUNDED = 1e-4
"""Seconds; what rounding may add to each value of a sample."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Benchmark, int, str, str]:
    """A run of some scenarios, once each, to its end."""
    benchmark = Benchmark(
        tmp_path_factory.mktemp("whole"), model, "-n", "1", "--throughput", "1", "--clients", "2",
        "--throughput-of", "disk,reload",
        "--scenarios", "mapped,engine-core,reload,server-crash,sidecar-crash,agent-crash,ipc_cache",
        start=0.6,  # longer than a busy machine stops anybody
    )  # fmt: skip
    return benchmark, *benchmark.end()


def test_a_run_measures_everything_that_was_asked_for(whole):
    """One right sample of each scenario and of the baseline, and it says so."""
    benchmark, code, out, log = whole
    assert code == 0, log
    run = benchmark.run()
    assert run.ended == "whole"
    assert {sample.scenario: sample.outcome for sample in run.samples} == dict.fromkeys(
        ("disk", "mapped", "engine-core", "reload", "server-crash", "sidecar-crash", "agent-crash"), "right"
    )
    assert [sample.order for sample in run.samples] == list(range(1, 8))
    assert "| mapped        | 1 of 1 |" in out


def test_every_field_is_filled(whole):
    """Of the samples that start an engine, nothing is null or empty but a message, and errors where there were none."""
    benchmark, *_ = whole
    run = json.loads(benchmark.file.read_text())
    assert [name for name, value in run.items() if value in (None, "", [], {})] == ["message", "expected"]
    for sample in run["samples"]:
        if sample["scenario"] in ("disk", "mapped", "engine-core", "reload", "server-crash"):
            empty = {name for name, value in sample.items() if value in (None, "", [], {})}
            assert empty <= {"message", "details"}, sample["scenario"]
            assert sample["memory"]["engine_bytes"] > 1 << 20
            assert sample["memory"]["keeper_bytes"] == 1 << 20 or sample["scenario"] == "disk"
    starts = {each["name"]: each for each in run["scenarios"]}
    assert starts["mapped"]["held"]["weight_bytes"] == 1 << 20
    assert starts["mapped"]["held"]["cuda_libraries"] == []
    for name in ("disk", "reload"):
        load = starts[name]["throughput"]
        assert load["first_minute"] > 0 and load["steady"] > 0 and len(load["curve"]) == 2
    assert run["machine"]["page_cache_bytes_s"] > 0 and run["machine"]["versions"]["weightkeeper"]


def test_moments_of_a_sample_are_in_order(whole):
    """The old engine is gone, the new one healthy, it answers, it answers right; phases add up to that."""
    benchmark, *_ = whole
    for sample in benchmark.run().samples:
        assert 0 <= sample.gone_s <= sample.health_s
        assert 0 <= sample.first_s <= sample.right_s
        assert sum(sample.phases.values()) == pytest.approx(
            max(sample.right_s, sample.gone_s), abs=ROUNDED * (1 + len(sample.phases))
        )
        kinds = [moment.kind for moment in sample.timeline]
        assert kinds[0] == "started" and kinds[-1] == "finished"
        assert sample.timeline[0].at < 0 < sample.timeline[-1].at


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (0.0, {"fork": 0.1, "weights": 0.5, "healthy": 0.2}),
        (0.4, {"fork": 0.1, "weights": 0.1, "healthy": 0.2}),
        (0.65, {"fork": 0.1, "weights": 0.0, "healthy": 0.05}),
        (9.0, {"fork": 0.0, "weights": 0.0, "healthy": 0.0}),
    ],
)
def test_what_phases_overlap_is_taken_from_the_longest_first(seconds, left):
    """They add up afterwards, in the order they had, and none is negative."""
    found = shortened({"fork": 0.1, "weights": 0.5, "healthy": 0.2}, seconds)
    assert list(found) == list(left)
    assert found == pytest.approx(left)


def test_the_agent_sees_the_interruption(whole):
    """Its longest pause holds the moment of the loss where it cost something; a reload costs no request at all."""
    benchmark, *_ = whole
    samples = {sample.scenario: sample for sample in benchmark.run().samples}
    for name in ("disk", "mapped", "server-crash", "agent-crash"):
        pause = samples[name].agent.longest
        assert pause.start <= samples[name].gone_s < pause.start + pause.seconds, name
    assert samples["disk"].agent.failed > 0
    assert any("refused" in error.lower() for error in samples["disk"].agent.errors)  # it would be seen
    reload = samples["reload"].agent
    assert (reload.cut, reload.failed) == (0, 0), reload.errors
    assert samples["sidecar-crash"].agent.failed == 0
    assert "resumed" in [moment.kind for moment in samples["agent-crash"].timeline]


def test_phases_come_from_the_log_or_from_the_launcher(whole):
    """Names of either, with what they have in common around them."""
    benchmark, *_ = whole
    samples = {sample.scenario: sample for sample in benchmark.run().samples}
    assert list(samples["mapped"].phases) == [
        "old engine gone", "server imported", "engine core imported", "weights there", "healthy", "answered",
    ]  # fmt: skip
    assert samples["mapped"].details == {"weights": 0.1, "map and bind (ms)": 1.5}
    assert {"old engine gone", "fork", "answered"} < samples["server-crash"].phases.keys()


def test_the_wrong_agent_is_caught(whole):
    """In every run: the check that passes the others fails it."""
    benchmark, _, _, log = whole
    control = benchmark.run().control
    assert control.caught and control.verdict.repeated and not control.verdict.passed
    assert "recovery: the deliberately wrong agent was caught" in log


def test_what_cannot_run_here_is_listed_with_its_reason(whole):
    """Nothing is left out in silence."""
    benchmark, *_ = whole
    run = benchmark.run()
    reasons = {each.name: each.reason for each in run.skipped}
    assert reasons["ipc_cache"] == "vLLM's ipc_cache needs a GPU"
    assert reasons["copy"] == reasons["docker-restart"] == "was not asked for"
    assert {each.name for each in run.scenarios} | reasons.keys() == {each.name for each in ALL}


def test_a_run_leaves_nothing_behind(whole):
    """No process, no socket, no temporary directory."""
    whole[0].assert_nothing_is_left()


def test_an_interrupted_run_keeps_its_samples_and_leaves_nothing(tmp_path, model):
    """Ctrl-C in the middle of a sample. One scenario's engine had other weights: its samples are wrong."""
    benchmark = Benchmark(tmp_path, model, "-n", "100", "--scenarios", "copy,server-crash", "--throughput", "0",
                          copy={"other": "weights"})  # fmt: skip
    wait_for(lambda: benchmark.file.exists() and len(benchmark.run().samples) >= 3, "three samples")
    benchmark.process.send_signal(signal.SIGINT)
    code, _, log = benchmark.end()
    assert code == 130, log
    run = benchmark.run()
    assert run.ended == "interrupted" and run.message == "Ctrl-C"
    outcomes = {sample.scenario: sample.outcome for sample in run.samples}
    assert outcomes == {"disk": "right", "copy": "wrong", "server-crash": "right"}
    wrong = next(sample for sample in run.samples if sample.outcome == "wrong")
    assert wrong.agent.different and wrong.first_s is not None and wrong.right_s is None
    assert wrong.message.startswith("the answers of steps ")
    benchmark.assert_nothing_is_left()


def test_a_killed_run_keeps_its_samples_and_leaves_nothing(tmp_path, model):
    """SIGKILL, at which it can do nothing itself: sidecar, launcher, server and agent end all the same."""
    benchmark = Benchmark(tmp_path, model, "-n", "100", "--scenarios", "server-crash", "--throughput", "0")
    wait_for(lambda: benchmark.file.exists() and len(benchmark.run().samples) >= 2, "two samples")
    wait_for(lambda: {word for line in benchmark.left() for word in line.split()} >= {"serve", "engine"}, "a launcher")
    benchmark.process.kill()
    assert benchmark.end()[0] == -signal.SIGKILL
    assert benchmark.run().ended == "running" and len(benchmark.run().samples) >= 2
    benchmark.assert_nothing_is_left()


def test_a_terminated_first_start_leaves_nothing(tmp_path, model):
    """SIGTERM while nothing is healthy yet."""
    benchmark = Benchmark(tmp_path, model, "--throughput", "0", never=True)
    wait_for(lambda: any("standin_model.py" in line for line in benchmark.left()[1:]), "a server")
    benchmark.process.send_signal(signal.SIGTERM)
    assert benchmark.end()[0] == 143
    run = benchmark.run()
    assert (run.ended, run.message) == ("interrupted", "by a signal, exit code 143")
    benchmark.assert_nothing_is_left()


def test_a_scenario_that_fails_is_given_up_and_the_others_go_on(tmp_path, model):
    """Never healthy within the limit: two failed samples, then it is skipped with the reason; nothing is left."""
    benchmark = Benchmark(tmp_path, model, "-n", "3", "--scenarios", "mapped", "--throughput", "0", "--limit", "2",
                          zero_copy={"never": True})  # fmt: skip
    code, out, log = benchmark.end()
    assert code == 1, log
    run = benchmark.run()
    outcomes = sorted((sample.scenario, sample.outcome) for sample in run.samples)
    assert outcomes == [*[("disk", "right")] * 3, *[("mapped", "failed")] * 2]
    failed = next(sample for sample in run.samples if sample.outcome == "failed")
    assert failed.message.startswith("/health does not answer after 2 s; --limit SECONDS gives it longer:")
    assert failed.agent.failed > 0 and failed.right_s is None
    (given_up,) = [each for each in run.skipped if each.name == "mapped"]
    assert given_up.reason == (
        "given up after 2 failures in a row: /health does not answer after 2 s; --limit SECONDS gives it longer:"
    )
    assert "| mapped   | 0 of 2 | – " in out
    benchmark.assert_nothing_is_left()


def test_time_has_an_end(tmp_path, model, monkeypatch):
    """No sample is begun that would probably not end in time."""
    monkeypatch.setenv(processes.MARK, "")
    said: list[str] = []
    settings = Settings(model, {}, tmp_path / "out")
    planned = plan.Plan(5, 0, 30.0, 0.0, None, 1, tmp_path / "run.json", ("weightkeeper",))
    with contextlib.closing(Bench(settings)) as bench:
        going = runner.Runner(bench, planned, ALL[:1], ALL[1:], said.append)
        rounds = going._rounds()
        assert next(rounds) == (ALL[0], 1)
        going._took["disk"] = 31.0
        assert next(rounds, None) is None
    assert going.run.ended == result.read(planned.file).ended == "out of time"
    assert said[-1] == "time is over before round 2, disk"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--scenarios", "disk,other"), "--scenarios: other unknown; there are disk, disk-cold"),
        (("--option", "port=1"), "--option port=1: the benchmark sets port itself"),
        (("--together", "--scenarios", "disk"), "--together: no sidecar or daemon holds weights for any of these"),
        (("--together", "--project", "/nowhere"), "--together: all containers of a --project are up"),
        (("--json", "/nowhere/run.json"), "--json /nowhere/run.json: its directory is not there"),
        (("--json", "/tmp"), "--json /tmp: is a directory; give a file"),
        (("--out", "/proc/out"), "--out /proc/out: "),
        (("--scenarios", "recreate"), "none of them can be measured here: recreate: needs containers"),
        (("--scenarios", ","), "no name of a scenario is given"),
        (("--restart-docker", "true"), "--restart-docker: containers are restarted with it; give --project"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_settings_are_found_before_anything_is_started(tmp_path, model, options, text):
    """By name."""
    benchmark = Benchmark(tmp_path, model, *options)
    code, _, log = benchmark.end()
    assert code in (1, 2) and text in log
    assert not benchmark.file.exists()
    benchmark.assert_nothing_is_left()


def test_the_order_is_shuffled_and_groups_stay_together():
    """Every scenario once in a round; those behind a launcher share it, and a sidecar crashes under a mapped engine."""
    orders = [[one.name for one in plan.shuffled(ALL, Random(seed))] for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    for order in orders:
        assert sorted(order) == sorted(one.name for one in ALL)
        for group in (("reload", "server-crash", "core-crash"), ("mapped", "engine-core", "sidecar-crash")):
            places = [order.index(name) for name in group]
            assert max(places) - min(places) == 2


def test_the_page_cache_is_looked_at_and_emptied(tmp_path):
    """A file that was just read is in it; one that was put out is not, where the file system lets it."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * (8 << 20))
    file.read_bytes()
    if page_cache.cached_share([file]) is None:
        pytest.skip("this file system does not tell what is in the page cache")
    assert page_cache.cached_share([file]) == 1.0
    assert page_cache.drop([file]) < 0.5


LOG = """\
    0.500 INFO non-default args: {}
    2.000 INFO Initializing a V1 LLM engine (v0.30.0) with config
    3.000 INFO Starting to load model /m...
    3.600 INFO Model loading took 13.4 GiB memory and 0.600000 seconds
    5.000 INFO Graph capturing finished in 3 secs, took 0.5 GiB
    6.000 INFO Graph capturing finished in 4 secs, took 0.5 GiB
    6.500 INFO init engine (profile, create kv cache, warmup model) took 2.90 s (compilation: 1.00 s)
"""


def test_logs_are_read():
    """Phases end with their lines; vLLM captures graphs twice and says so twice."""
    lines = [(float(line[:9]), line[10:]) for line in LOG.splitlines()]
    assert engine.marks(lines) == {
        "server imported": 0.5, "engine core imported": 2.0, "device ready": 3.0, "weights there": 3.6,
        "engine ready": 6.5,
    }  # fmt: skip
    assert engine.details(lines) == {"weights": 0.6, "graph capture": 7.0, "init engine": 2.9}
    assert engine.FELL_BACK.search("WARNING weightkeeper: fallback to disk, code=mismatch: dtype")


def test_a_job_that_differs_by_itself_is_no_reference(tmp_path, model):
    """Where the same engine answers otherwise the second time, the run ends and says what to do."""
    tmp_path.joinpath("b").mkdir()
    trouble = tmp_path / "trouble"
    reference = 6 * max(one.times_steps for one in ALL)
    trouble.write_text("\n" * (reference + 3) + "other\n")
    benchmark = Benchmark(tmp_path / "b", model, "--throughput", "0", trouble=str(trouble))
    code, _, log = benchmark.end()
    assert code == 2, log
    assert "weightkeeper: the same job done twice on the same engine differs: the answers of steps 4, 5, " in log
    assert benchmark.run().ended == "failed" and "differs" in benchmark.run().message
    benchmark.assert_nothing_is_left()
