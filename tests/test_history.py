"""The history of what was done to engines: JSON lines that survive crashes, full files and several writers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from weightkeeper.commands.history import command
from weightkeeper.errors import ConfigError
from weightkeeper.supervisor.history import NAME, History, Record, now


def record(cause: str = "engine.yaml seed 1 → 2", **changes: object) -> Record:
    given = {
        "time": "2026-01-31T12:00:00.000Z", "service": "engine", "action": "restart", "cause": cause,
        "result": "healthy", "seconds": 23.4, "before": "a" * 64, "after": "a" * 64,
    }  # fmt: skip
    return Record(**(given | changes))


def test_a_record_comes_back_as_it_was(tmp_path):
    """What is appended is read, in order."""
    records = [record(), record("environment LEVEL", action="recreate", after="b" * 64)]
    for one in records:
        History(tmp_path).append(one)
    assert History(tmp_path).read() == records


def test_a_record_is_one_line_of_json_with_stable_names(tmp_path):
    """Scripts read these names."""
    History(tmp_path).append(record())
    assert json.loads((tmp_path / NAME).read_text()) == {
        "time": "2026-01-31T12:00:00.000Z", "service": "engine", "action": "restart",
        "cause": "engine.yaml seed 1 → 2", "result": "healthy", "seconds": 23.4,
        "before": "a" * 64, "after": "a" * 64, "detail": "", "from": {}, "to": {}, "phases": {},
    }  # fmt: skip


def test_a_directory_without_history_has_none(tmp_path):
    """The first supervisor of a machine starts with nothing."""
    assert History(tmp_path).read() == []


def test_the_file_stays_bounded_and_keeps_the_newest(tmp_path):
    """A crash loop of months fills no disk."""
    history = History(tmp_path, max_bytes=10_000)
    for number in range(200):
        history.append(record(str(number)))
        assert (tmp_path / NAME).stat().st_size <= 10_000
    kept = [int(one.cause) for one in history.read()]
    assert kept == list(range(kept[0], 200))
    assert len(kept) >= 10


def test_a_line_cut_by_a_crash_costs_only_itself(tmp_path):
    """A writer that died in the middle of a line leaves the lines around it readable."""
    history = History(tmp_path)
    history.append(record("first"))
    with (tmp_path / NAME).open("ab") as stream:
        stream.write(msgspec.json.encode(record("cut"))[:40])
    history.append(record("last"))
    assert [one.cause for one in history.read()] == ["first", "last"]


def test_two_writers_lose_nothing(tmp_path):
    """`weightkeeper restart` writes while the supervisor does, also while the file is being cut."""
    script = (
        "import sys; from pathlib import Path; from weightkeeper.supervisor.history import *\n"
        "for i in range(100): History(Path(sys.argv[1]), 20_000).append("
        "Record(now(), sys.argv[2], 'restart', str(i), 'healthy', 1.0))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, tmp_path, name]) for name in ("one", "two")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    raw = (tmp_path / NAME).read_bytes().splitlines()
    records = History(tmp_path).read()
    assert len(records) == len(raw), "no line is cut"
    for name in ("one", "two"):
        causes = [int(one.cause) for one in records if one.service == name]
        assert causes == list(range(100 - len(causes), 100)), "only the oldest may be gone"
    assert len(records) > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the place of another user")
def test_a_directory_of_another_user_is_refused_with_the_remedy(tmp_path):
    """Path, owner, our uid and what to do, in one line."""
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError) as caught:
            History(state).check()
    finally:
        os.seteuid(0)
    assert str(caught.value) == (
        f"{state / NAME}: Permission denied; the directory belongs to uid 0, we are 65534;"
        " chown it, or give another with --state-dir"
    )


def test_time_is_utc_to_the_millisecond():
    """Sorts as text."""
    assert len(now()) == len("2026-01-31T12:00:00.000Z")
    assert now().endswith("Z")


def test_the_program_prints_the_last_records(tmp_path):
    """One line a record, the latest last."""
    for number in range(3):
        History(tmp_path).append(record(str(number)))
    result = CliRunner().invoke(command, ["-n", "2", "--state-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "2026-01-31T12:00:00.000Z  restart engine: 1 — healthy after 23.4 s",
        "2026-01-31T12:00:00.000Z  restart engine: 2 — healthy after 23.4 s",
    ]


def test_the_program_prints_json_lines(tmp_path):
    """Each line is a record as it lies on the disk."""
    History(tmp_path).append(record())
    result = CliRunner().invoke(command, ["--json", "--state-dir", str(tmp_path)])
    assert result.output == (tmp_path / NAME).read_text()


def test_the_program_says_that_there_is_nothing(tmp_path):
    """An empty answer could be a fault; this is none."""
    result = CliRunner().invoke(command, ["--state-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "nothing yet\n")
