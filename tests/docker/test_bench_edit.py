"""The benchmark of edits: that it runs, and what it makes of what the supervisor said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

from bench_edit import Sample, measure, table  # noqa: E402
from edited_projects import Target, written  # noqa: E402

pytestmark = pytest.mark.docker

LOG = """\
2026-01-31 12:00:00,250 INFO weightkeeper.supervisor.loop: reload engine: engine.yaml max-model-len 1 → 2
2026-01-31 12:00:01,500 INFO weightkeeper.supervisor.say: engine healthy 1.2 s after reload
2026-01-31 12:00:02,000 INFO weightkeeper.sup"""


def test_lines_of_a_log_have_their_times_and_a_half_one_is_left(tmp_path):
    """A line that is being written is read at the next look."""
    log = tmp_path / "log"
    log.write_text(LOG)
    (first, decision), (second, healthy) = written(log, 0)
    assert second - first == pytest.approx(1.25)
    assert decision.startswith("reload engine: ")
    assert healthy == "engine healthy 1.2 s after reload"


def test_a_save_that_the_supervisor_refuses_ends_the_benchmark(tmp_path):
    """With what it said: a number would be none of a reload."""
    said: list[tuple[float, str]] = []
    target = Target(tmp_path, None, lambda: list(said), "max-model-len", ("1", "-1"))

    def save() -> None:
        said.extend([(0.0, "reload engine: engine.yaml max-model-len 1 → -1"), (0.1, "engine goes on as it is: no")])

    with pytest.raises(SystemExit, match="engine goes on as it is: no"):
        measure(target, "in place", save)


def test_a_table_has_median_and_most_of_each_kind_and_of_all():
    """Seconds since the last write."""
    samples = [Sample("in place", "reload", 0.5, 1.0), Sample("in place", "reload", 0.75, 2.0)]
    samples.append(Sample("compose.yaml", "recreate", 1.25, 4.0))
    _, _, *rows = table(samples).splitlines()
    assert rows == [
        "| compose.yaml (recreate) | 1 | 1.25 s | 1.25 s | 4.00 s | 4.00 s |",
        "| in place (reload) | 2 | 0.62 s | 0.75 s | 1.50 s | 2.00 s |",
        "| all | 3 | 0.75 s | 1.25 s | 2.00 s | 4.00 s |",
    ]


def test_each_kind_of_save_is_measured_on_a_project_of_its_own(tmp_path):
    """One save of each kind: what was decided, and when; nothing is left of the project."""
    out = tmp_path / "edit.json"
    command = [sys.executable, str(SCRIPTS / "bench_edit.py"), "-n", "4", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    samples = json.loads(out.read_text())["samples"]
    assert {one["kind"]: one["action"] for one in samples} == {
        "in place": "reload", "by rename": "reload", "link swapped": "reload", "compose.yaml": "recreate",
    }  # fmt: skip
    assert all(0 < one["decided"] < one["healthy"] for one in samples)
    assert "| all | 4 | " in done.stdout
