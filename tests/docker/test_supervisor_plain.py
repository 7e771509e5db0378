"""The supervisor with an engine that has no launcher: its container is restarted, since nobody in it can be asked."""

import os
import signal
import subprocess

import pytest
from stand import ENGINE, IMAGE, by_rename, in_place, until

pytestmark = pytest.mark.docker

RESTART = "restart engine: engine.yaml max-model-len 2048 → 1024"
HEALTHY = "engine healthy S after restart"
EDITED = ENGINE.replace("2048", "1024")


@pytest.mark.parametrize("save", [in_place, by_rename])
def test_a_save_restarts(plain, save):
    """In place and by rename: the same container, started again, with the new value, on record."""
    before = plain.start_of()
    save(plain.engine_yaml, EDITED)
    plain.only(RESTART, HEALTHY)
    after = plain.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert plain.options()["max-model-len"] == "1024"
    [record] = plain.history()
    assert (record["action"], record["result"], record["from"], record["to"]) == (
        "restart", "healthy", {"max-model-len": "2048"}, {"max-model-len": "1024"},
    )  # fmt: skip


def test_both_kinds_of_change_are_one_recreation(plain):
    """A new container reads the new file anyway."""
    plain.engine_yaml.write_text(EDITED)
    plain.compose_yaml.write_text(plain.compose_yaml.read_text().replace("-one", "-two"))
    plain.only(
        "recreate engine: environment LEVEL; engine.yaml max-model-len 2048 → 1024",
        "engine healthy S after recreate",
    )
    assert len(plain.history()) == 1


def test_a_value_that_ends_the_engine_is_said_and_the_right_one_brings_it_back(plain):
    """The engine is never left down once its file is right again."""
    before = plain.start_of()
    plain.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    plain.expect("engine exited with code 1 ")
    plain.engine_yaml.write_text(ENGINE)
    plain.expect("restart engine: engine.yaml max-model-len -1 → 2048")
    until(lambda: HEALTHY in plain.messages(), "the restart is done")
    ours = [one for one in plain.history() if one["action"] == "restart"]
    assert [(one["result"], one["detail"]) for one in ours] == [("exited", "with code 1"), ("healthy", "")]
    assert plain.inspect()["State"]["Health"]["Status"] == "healthy"
    assert plain.start_of()[0] == before[0]


def test_a_crash_is_recorded_and_docker_brings_the_engine_back(plain):
    """kill -9 of the engine's process: exit code, and the recovery. Nothing is restarted by us."""
    before = plain.start_of()
    os.kill(plain.inspect()["State"]["Pid"], signal.SIGKILL)
    plain.only("engine went down by itself: exit code 137 (SIGKILL)", "engine healthy S after it went down")
    after = plain.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert [(one["action"], one["cause"], one["result"]) for one in plain.history()] == [
        ("crash", "exit code 137 (SIGKILL)", "exited"),
        ("start", "exit code 137 (SIGKILL)", "healthy"),
    ]


def test_restart_by_hand(plain):
    """Exit 0 when it is healthy, on record, and no crash for the supervisor."""
    before = plain.start_of()
    done = plain.weightkeeper("restart", "engine", "--cause", "make restart-engine")
    assert done.returncode == 0
    assert "restart engine: make restart-engine" in done.stderr.splitlines()[0]
    after = plain.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert [(one["cause"], one["result"]) for one in plain.history()] == [("make restart-engine", "healthy")]
    plain.only()


def test_a_mount_of_a_single_file_is_said_and_a_rename_is_applied(prepared_plain):
    """The engine sees the renamed file because its container is restarted; a reload would show it the old one."""
    text = prepared_plain.compose_yaml.read_text()
    single = 'volumes: ["./config/engine.yaml:/config/engine.yaml:ro", '
    prepared_plain.compose_yaml.write_text(text.replace('volumes: ["./config:/config:ro", ', single, 1))
    prepared_plain.up()
    prepared_plain.supervise()
    notice = f"engine mounts the single file {prepared_plain.engine_yaml}: after a save by rename it sees the old one"
    prepared_plain.expect(notice)
    by_rename(prepared_plain.engine_yaml, EDITED)
    prepared_plain.expect("engine healthy")
    assert prepared_plain.options()["max-model-len"] == "1024"
    assert prepared_plain.log.read_text().count(notice) == 1


def test_restart_by_hand_says_when_the_engine_does_not_come_up(prepared_plain):
    """Exit code 1, with the engine's own."""
    prepared_plain.up()
    prepared_plain.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    done = prepared_plain.weightkeeper("restart", "engine")
    assert done.returncode == 1
    assert "engine exited with code 1 " in done.stderr


def test_the_stand_in_ends_on_a_wrong_value(image):
    """Without that, the tests above would say nothing."""
    command = ["docker", "run", "--rm", IMAGE, "python3", "/standin/standin.py", "--max-model-len", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "max-model-len 0 is not positive" in done.stderr
