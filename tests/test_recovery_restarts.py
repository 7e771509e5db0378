"""The benchmark without an agent, and with everything started at once: on real processes, with a stand-in for vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from models import write
from recovery_runs import ENVIRONMENT, Benchmark

from weightkeeper.recovery import report
from weightkeeper.recovery.summary import join
from weightkeeper.recovery.table import WITHOUT_AGENT

AGENT_PACKAGES = ("openai", "tenacity")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Benchmark, int, str, str]:
    """A run to its end, where the packages that the agent needs break whoever imports them."""
    directory = tmp_path_factory.mktemp("whole")
    for name in AGENT_PACKAGES:
        (directory / f"{name}.py").write_text("raise SystemExit('the package of an agent was imported')\n")
    benchmark = Benchmark(
        directory, model, "--no-agent", "--together", "-n", "2",
        "--scenarios", "mapped,reload,server-crash,agent-crash", paths=[directory],
    )  # fmt: skip
    return benchmark, *benchmark.end()


def test_restarts_alone_need_no_package_of_an_agent(whole):
    """Each sample ends with the first right completion; no job was done, and none is claimed."""
    benchmark, code, _, log = whole
    assert code == 0, log
    run = benchmark.run()
    assert run.ended == "whole" and run.subject.has_agent is False
    outcomes = [(sample.scenario, sample.outcome) for sample in run.samples]
    assert sorted(outcomes) == sorted([(name, "right") for name in ("disk", "mapped", "reload", "server-crash")] * 2)
    for sample in run.samples:
        assert sample.agent is None and sample.timeline == ()
        assert 0 <= sample.gone_s <= sample.health_s <= sample.first_s == sample.right_s
        assert sum(sample.phases.values()) == pytest.approx(sample.right_s, abs=1e-3)
    assert run.reference is None and run.control is None
    assert not (benchmark.out / "agents").exists()


def test_the_first_counted_start_is_from_disk_and_gives_the_reference(whole):
    """Not the uncounted one, which may have compiled and had others beside it."""
    benchmark, *_ = whole
    run = benchmark.run()
    assert run.samples[0].scenario == "disk"
    assert len(run.expected.token_ids) == run.subject.tokens == 8


def test_the_result_says_that_no_agent_worked(whole):
    """In the table and on the page; what only an agent can tell is not there."""
    benchmark, _, out, _ = whole
    assert WITHOUT_AGENT in out and "agent's pause" not in out and "effects" not in out
    assert "- agent-crash: no agent works in this run: --no-agent" in out
    page = report.page(join([benchmark.run()]))
    assert "No agent worked in this run" in page and "What the agent saw" not in page
    assert "A lost engine answered rightly again after" in page and "no agent worked meanwhile" in page


def test_the_table_tells_where_seconds_and_memory_go(whole):
    """Phases of all scenarios, and what the holder costs."""
    _, _, out, _ = whole
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")]
    rows = {row[0]: row for row in reversed(cells)}  # of one name, the first
    assert rows["mapped"][1] == "2 of 2" and rows["mapped"][-1].count("×") == 3
    assert rows["weightkeeper"][2] == "1.0 MiB"
    heads = next(row for row in cells if row[0] == "median s of")
    assert sorted(heads[1:]) == ["disk", "mapped", "reload", "server-crash"]
    assert {"old engine gone", "engine core imported", "fork", "answered", "log: map and bind (ms)"} <= rows.keys()


def test_holders_started_beside_the_first_engine(whole):
    """They have the weights before the first sample; only the engine beside them has a KV cache of a given size."""
    benchmark, *_ = whole
    assert benchmark.run().samples[0].memory.keeper_bytes == 1 << 20
    given = {name: yaml.safe_load((benchmark.out / f"{name}.yaml").read_text()) for name in ("disk-together", "disk")}
    assert given["disk-together"] == given["disk"] | {"kv-cache-memory-bytes": 1 << 30}
    starts = sorted(log.stem for log in benchmark.out.glob("*-disk*.log"))
    assert starts[0] == "001-disk-together" and len(starts) == 3  # no start is made for the reference alone


def test_a_run_without_an_agent_leaves_nothing_behind(whole):
    """No process, no socket, no temporary directory."""
    whole[0].assert_nothing_is_left()


def test_other_tokens_are_wrong_and_told(tmp_path, model):
    """Both are shown, the sample is in no median, and the run has not passed."""
    benchmark = Benchmark(tmp_path, model, "--no-agent", "-n", "1", "--scenarios", "mapped", zero_copy={"other": "x"})
    code, out, log = benchmark.end()
    assert code == 1, log
    run = benchmark.run()
    wrong = next(sample for sample in run.samples if sample.scenario == "mapped")
    assert wrong.outcome == "wrong" and wrong.first_s is not None and wrong.right_s is None
    assert wrong.message.startswith("tokens [")
    assert wrong.message.endswith(f", and not tokens {list(run.expected.token_ids)}")
    assert f"Not right:\n- mapped: 1 wrong; round 1: {wrong.message}" in out
    benchmark.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("trouble", "code", "text"),
    [
        (["500"], 1, "the first start from the disk gave no reference: the completion was answered with status 500"),
        (["short"], 1, "the first start from the disk gave no reference: the completion was cut short: 4 of 8 tokens"),
        (["", "other"], 2, "the same completion asked twice of the same engine differs: tokens ["),
    ],
    ids=["failed", "cut", "twice"],
)
def test_without_a_reference_nothing_is_measured(tmp_path, model, trouble, code, text):
    """The run ends with what is wrong; it would judge by nothing."""
    (tmp_path / "b").mkdir()
    file = tmp_path / "trouble"
    file.write_text("\n".join(trouble) + "\n")
    benchmark = Benchmark(tmp_path / "b", model, "--no-agent", "--scenarios", "mapped", trouble=str(file))
    found, _, log = benchmark.end()
    assert (found, text in log) == (code, True), log
    assert benchmark.run().ended == "failed" and text in benchmark.run().message
    benchmark.assert_nothing_is_left()


@pytest.mark.parametrize("missing", [*AGENT_PACKAGES, ",".join(AGENT_PACKAGES)])
def test_a_missing_package_of_the_agent_is_found_before_anything_starts(tmp_path, model, missing):
    """With its name and both remedies."""
    script = (
        f"import sys; sys.modules |= dict.fromkeys({missing.split(',')}); from weightkeeper.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "recovery", "run", "--model", str(model), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "run.json")], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"the Python package {' and '.join(missing.split(','))}; install `weightkeeper[recovery]`" in done.stderr
    assert "or give --no-agent to measure restarts alone" in done.stderr
    assert list(tmp_path.iterdir()) == []
