"""The supervisor on real containers: a stand-in engine behind our launcher, a keeper and one more service.

Each test says what has to happen; the fixture checks after each that sidecar and other service were never touched.
"""

import os
import re
import signal
import subprocess
import threading
import time

import pytest
from stand import ENGINE, by_rename, in_place, run, until

pytestmark = pytest.mark.docker

RELOAD = "reload engine: engine.yaml max-model-len 2048 → 1024"
HEALTHY = "engine healthy S after reload"
EDITED = ENGINE.replace("2048", "1024")


@pytest.mark.parametrize("save", [in_place, by_rename])
def test_a_save_reloads(stand, save):
    """In place and by rename: the container is not even started again, a new server has the new value, on record."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    save(stand.engine_yaml, EDITED)
    stand.only(RELOAD, HEALTHY)
    assert stand.start_of() == before
    status = stand.engine()
    assert (status["generation"], status["state"]) == (generation + 1, "ready")
    assert stand.options()["max-model-len"] == "1024"
    [record] = stand.history()
    assert record["seconds"] > 0
    assert sum(record["phases"].values()) > 0
    assert record | {"time": "", "seconds": 0, "phases": {}} == {
        "time": "", "service": "engine", "action": "reload", "cause": "engine.yaml max-model-len 2048 → 1024",
        "result": "healthy", "seconds": 0, "before": before[0], "after": before[0], "detail": "",
        "from": {"max-model-len": "2048"}, "to": {"max-model-len": "1024"}, "phases": {},
    }  # fmt: skip


def test_from_save_to_action_it_takes_no_longer_than_promised(stand):
    """1.5 s after the last write, by the log's own clock; five times that on a busy machine."""
    saved = time.time()
    stand.engine_yaml.write_text(EDITED)
    stand.expect(RELOAD)
    assert time.time() - saved < 7.5
    stand.only(RELOAD, HEALTHY)


def test_comments_order_and_line_ends_do_nothing(stand):
    """Values are compared, in the config file and in the environment file."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    stand.engine_yaml.write_bytes(b"max-model-len: 2048 # tokens\r\n'model': \"/model\"\r\n")
    stand.expect("nothing to do: engine.yaml changed, no value did")
    (stand.directory / "engine.env").write_text("# both\nB='2'\nA=1\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation)
    assert stand.history() == []


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("LEVEL: ${LEVEL:-one}", "LEVEL: two", "environment LEVEL"),
        ("/config/engine.yaml]\n    environment", "/config/engine.yaml, --seed, '1']\n    environment", "command"),
    ],
)
def test_an_edit_of_the_definition_recreates(stand, old, new, cause):
    """Another container, healthy, on record with both ids."""
    before = stand.start_of()
    text = stand.compose_yaml.read_text()
    assert old in text
    by_rename(stand.compose_yaml, text.replace(old, new, 1))
    stand.only(f"recreate engine: {cause}", "engine healthy S after recreate")
    after = stand.start_of()
    assert after[0] != before[0]
    assert [(one["action"], one["result"], one["before"], one["after"]) for one in stand.history()] == [
        ("recreate", "healthy", before[0], after[0])
    ]


def test_a_value_that_one_service_uses_recreates_that_one(stand):
    """In the project's `.env`, which did not exist before, and in an environment file."""
    first = stand.start_of()
    (stand.directory / ".env").write_text("LEVEL=two\n")
    stand.expect("engine healthy")
    second = stand.start_of()
    (stand.directory / "engine.env").write_text("A=1\nB=3\n")
    stand.only(
        "recreate engine: environment LEVEL",
        "engine healthy S after recreate",
        "recreate engine: environment B",
        "engine healthy S after recreate",
    )
    assert {"LEVEL=two", "B=3"} < set(stand.inspect()["Config"]["Env"])
    third = stand.start_of()
    assert [(one["action"], one["result"], one["before"], one["after"]) for one in stand.history()] == [
        ("recreate", "healthy", first[0], second[0]),
        ("recreate", "healthy", second[0], third[0]),
    ]


def test_an_override_file_that_appears_takes_part(stand):
    """With a list that replaces the command; the new config file is watched from then on."""
    before = stand.start_of()
    (stand.directory / "config" / "other.yaml").write_text("model: /model\nmax-model-len: 1\n")
    (stand.directory / "compose.override.yaml").write_text(
        "services: {engine: {command: !override [weightkeeper, engine, --, --config, /config/other.yaml]}}\n"
    )
    stand.expect("engine healthy")
    after = stand.start_of()
    (stand.directory / "config" / "other.yaml").write_text("model: /model\nmax-model-len: 2\n")
    until(lambda: len(stand.messages()) == 4, "recreation and reload")
    assert stand.messages() == [
        "recreate engine: command; other.yaml max-model-len 2048 → 1",
        "engine healthy S after recreate",
        "reload engine: other.yaml max-model-len 1 → 2",
        HEALTHY,
    ]
    assert stand.start_of() == after and after[0] != before[0]
    assert stand.options()["max-model-len"] == "2"
    assert stand.done() == [("recreate", "healthy"), ("reload", "healthy")]


def test_a_burst_of_both_kinds_is_one_recreation(stand):
    """One plan for all that came to rest together: four files, as at the checkout of a branch."""
    before = stand.start_of()
    by_rename(stand.engine_yaml, EDITED)
    by_rename(stand.compose_yaml, stand.compose_yaml.read_text().replace("-one", "-two"))
    by_rename(stand.directory / "engine.env", "A=1\nB=4\n")
    (stand.directory / ".env").write_text("OTHER=1\n")
    stand.only(
        "recreate engine: environment B LEVEL; engine.yaml max-model-len 2048 → 1024",
        "engine healthy S after recreate",
    )
    [record] = stand.history()
    assert (record["before"], record["after"]) == (before[0], stand.start_of()[0])
    assert record["before"] != record["after"]


@pytest.mark.parametrize("text", ["", "model: a\n b: c\n", None, "unreadable"])
def test_a_file_that_cannot_be_used_keeps_the_engine(stand, text):
    """Empty, broken, deleted, unreadable; and back as it was: nothing, and said once."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    if text == "unreadable":
        stand.engine_yaml.unlink()
        stand.engine_yaml.mkdir()
    else:
        stand.engine_yaml.unlink() if text is None else stand.engine_yaml.write_text(text)
    stand.expect("keep engine: ")
    (stand.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    if text == "unreadable":
        stand.engine_yaml.rmdir()
    stand.engine_yaml.write_text(ENGINE)
    stand.expect("nothing to do: engine.yaml changed, no value did")
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation)
    assert len(stand.messages()) == 3
    assert stand.history() == []


def test_a_yaml_fault_is_said_with_its_place_and_the_right_file_counts(stand):
    """Line and column; the right file is compared with what was applied last."""
    fault = f"keep engine: {stand.engine_yaml}, line 2 column 3: mapping values are not allowed here"
    stand.engine_yaml.write_text("model: a\n b: c\n")
    stand.expect(fault)
    stand.engine_yaml.write_text(EDITED)
    stand.only(fault, RELOAD, HEALTHY)


def test_a_broken_compose_file_keeps_everything_and_is_said_once(stand):
    """Restored it does nothing."""
    text = stand.compose_yaml.read_text()
    before = stand.start_of()
    stand.compose_yaml.write_text(text.replace("services:", "services: ["))
    stand.expect("keep every engine: ")
    stand.compose_yaml.write_text(text)
    stand.expect("nothing to do: compose.yaml changed, no value did")
    assert stand.start_of() == before
    assert len(stand.messages()) == 2
    assert stand.messages()[0].startswith("keep every engine: yaml: line ")


def test_what_is_not_labelled_is_said_and_not_touched(stand):
    """The sidecar above all. The fixture compares its id and its start."""
    text = stand.compose_yaml.read_text()
    line = "keep sidecar: environment SIDE changed, not supervised; apply it with `docker compose up -d sidecar`"
    for count, value in enumerate(("two", "three"), 1):
        stand.compose_yaml.write_text(text.replace("SIDE: one", f"SIDE: {value}"))
        until(lambda count=count: stand.messages().count(line) == count, line)
    stand.only(line, line)
    assert stand.history() == []


def test_a_file_written_in_chunks_is_one_action(stand):
    """Truncate, 200 ms, and the rest in two chunks."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    with stand.engine_yaml.open("w") as file:
        for chunk in ("", "model: /model\nmax-mod", "el-len: 1024\n"):
            file.write(chunk)
            file.flush()
            time.sleep(0.2)
    stand.only(RELOAD, HEALTHY)
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation + 1)
    assert stand.done() == [("reload", "healthy")]


def test_noise_at_a_hundred_writes_a_second_delays_nothing_for_ever(stand):
    """Another file of the same directory is written all the time, the config file itself for a while: one action."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    is_over = threading.Event()

    def write() -> None:
        while not is_over.wait(0.01):
            (stand.engine_yaml.parent / "noise").write_text(str(time.time()))

    noise = threading.Thread(target=write)
    noise.start()
    try:
        for number in range(50):
            stand.engine_yaml.write_text(ENGINE + f"# {number}\n")
            time.sleep(0.01)
        stand.engine_yaml.write_text(EDITED)
        stand.expect(HEALTHY.split(" S ")[0])
    finally:
        is_over.set()
        noise.join()
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation + 1)
    assert stand.done() == [("reload", "healthy")]


def test_a_value_that_the_check_refuses_keeps_the_server(stand):
    """No start is wasted on it, it is said once, and the right value after it is one reload."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    stand.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    stand.expect("engine goes on as it is: ")
    (stand.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    assert stand.engine()["generation"] == generation
    assert stand.options()["max-model-len"] == "2048"
    stand.engine_yaml.write_text(EDITED)
    until(lambda: stand.messages()[-1:] == [HEALTHY], "the right value is served")
    assert stand.messages() == [
        "reload engine: engine.yaml max-model-len 2048 → -1",
        "engine goes on as it is: max-model-len -1 is not positive",
        "nothing to do: engine.env changed, no value did",
        RELOAD,
        HEALTHY,
    ]
    assert stand.done() == [("reload", "refused"), ("reload", "healthy")]
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation + 1)


def test_a_refused_value_that_is_taken_back_does_nothing(stand):
    """The engine serves what the file says again."""
    stand.engine_yaml.write_text(ENGINE.replace("2048", "-1"))
    stand.expect("engine goes on as it is: ")
    stand.engine_yaml.write_text(ENGINE)
    stand.expect("nothing to do: engine.yaml changed, no value did")
    assert stand.done() == [("reload", "refused")]


def test_a_definition_that_does_not_come_up_is_rolled_back_once(stand):
    """An image that is not there, and a command that ends: the last good definition serves; a new edit counts."""
    before = stand.start_of()
    text = stand.compose_yaml.read_text()
    stand.compose_yaml.write_text(
        text.replace("engine:\n    <<: *engine\n", "engine:\n    <<: *engine\n    image: weightkeeper-none:none\n")
    )
    stand.expect("engine healthy")
    assert stand.start_of() == before
    assert stand.done() == [("recreate", "failed"), ("rollback", "healthy")]
    stand.compose_yaml.write_text(text.replace("weightkeeper, engine,", "weightkeeper, engine, --no-such-option,", 1))
    until(lambda: len(stand.done()) == 4, "the other definition is rolled back, too")
    assert stand.done()[2:] == [("recreate", "exited"), ("rollback", "healthy")]
    (stand.directory / "engine.env").write_text("# other\nA=1\nB=2\n")
    stand.expect("nothing to do: engine.env changed, no value did")
    stand.compose_yaml.write_text(text)
    stand.expect("nothing to do: compose.yaml changed, no value did")
    assert len(stand.done()) == 4
    assert stand.inspect()["State"]["Health"]["Status"] == "healthy"


def test_changes_while_an_engine_starts_are_one_action_afterwards(stand):
    """Not one for each save, and not before the engine is up."""
    stand.engine_yaml.write_text(ENGINE + "start-delay: 4\n")
    stand.expect("reload engine: ")
    for length in ("3", "4", "5"):
        stand.engine_yaml.write_text(ENGINE.replace("2048", length))
    stand.expect("reload engine: engine.yaml max-model-len 2048 → 5")
    stand.only(
        "reload engine: engine.yaml start-delay (unset) → 4",
        HEALTHY,
        "reload engine: engine.yaml max-model-len 2048 → 5, start-delay 4 → (unset)",
        HEALTHY,
    )


def test_an_edit_whose_container_is_made_anew_by_hand_meanwhile_is_applied(stand):
    """The one that was asked is gone, which is said; the new one has read the file, so nothing is left to do."""
    before = stand.start_of()
    stand.engine_yaml.write_text(ENGINE + "start-delay: 3\n")
    stand.expect("reload engine: engine.yaml start-delay (unset) → 3")
    compose = ("docker", "compose", "--project-directory", stand.directory)
    run(*compose, "up", "--detach", "--no-deps", "--force-recreate", "engine")
    stand.expect("engine: what was tried in vain was read since, and counts as applied")
    assert stand.start_of()[0] != before[0]
    assert stand.done() == [("reload", "failed")]
    until(lambda: stand.inspect()["State"]["Health"]["Status"] == "healthy", "the new container is healthy")
    assert stand.options()["start-delay"] == "3"
    assert stand.weightkeeper("plan").stdout == "nothing to do\n"


def test_an_engine_that_comes_and_goes_is_said_and_left_to_the_user(stand):
    """Started by hand it is supervised from then on; removed from the files it is named, and not ended."""
    text, before = stand.compose_yaml.read_text(), stand.start_of()
    (stand.directory / "config" / "second.yaml").write_text("model: /model\nmax-model-len: 7\n")
    second = (
        "services:\n  second:\n    <<: *engine\n"
        "    command: [weightkeeper, engine, --, --config, /config/second.yaml]\n"
    )
    stand.compose_yaml.write_text(text.replace("services:\n", second))
    stand.expect("keep second: new in the project; apply it with `docker compose up -d second`")
    run("docker", "compose", "--project-directory", stand.directory, "up", "--detach", "--no-deps", "second")
    until(lambda: stand.inspect("second")["State"]["Health"]["Status"] == "healthy", "the second engine is healthy")
    (stand.directory / "config" / "second.yaml").write_text("model: /model\nmax-model-len: 8\n")
    stand.expect("second healthy")
    start = stand.start_of("second")
    stand.compose_yaml.write_text(text)
    stand.expect("keep second: no longer in the project; end it with `docker compose rm -sf second`")
    assert (stand.start_of("second"), stand.start_of()) == (start, before)
    run("docker", "rm", "--force", f"{stand.name}-second-1")
    assert [(one["service"], one["action"], one["result"]) for one in stand.history()] == [
        ("second", "reload", "healthy")
    ]


def test_a_service_of_a_profile_that_is_not_active_is_none(stand):
    """And its coming does nothing to the others."""
    text = stand.compose_yaml.read_text()
    more = "  more: {image: none, profiles: [x]}\nvolumes:\n  sockets:"
    before = stand.start_of()
    stand.compose_yaml.write_text(text.replace("volumes:\n  sockets:", more))
    stand.expect("nothing to do: compose.yaml changed, no value did")
    (stand.directory / ".env").write_text("COMPOSE_PROFILES=x\n")
    stand.expect("keep more: new in the project; apply it with `docker compose up -d more`")
    assert stand.start_of() == before
    assert stand.history() == []


def test_a_crash_of_the_container_is_recorded_and_docker_brings_it_back(stand):
    """The launcher itself is killed. Nothing is restarted by us."""
    before = stand.start_of()
    os.kill(stand.inspect()["State"]["Pid"], signal.SIGKILL)
    stand.only("engine went down by itself: exit code 137 (SIGKILL)", "engine healthy S after it went down")
    after = stand.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert stand.done() == [("crash", "exited"), ("start", "healthy")]


def test_restart_by_hand_reloads(stand):
    """Exit 0 when a new server is healthy, and the container was not started again; on record."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    done = stand.weightkeeper("restart", "engine", "--cause", "make restart-engine")
    assert done.returncode == 0
    assert "reload engine: make restart-engine" in done.stderr.splitlines()[0]
    assert re.search(r"engine healthy \d+\.\d s after reload$", done.stderr)
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation + 1)
    assert [(one["cause"], one["result"]) for one in stand.history()] == [("make restart-engine", "healthy")]
    stand.only()


def test_restart_by_hand_can_restart_the_container(stand):
    """With `--container`; no crash for the supervisor."""
    before = stand.start_of()
    done = stand.weightkeeper("restart", "engine", "--container")
    assert done.returncode == 0, done.stderr
    after = stand.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert stand.done() == [("restart", "healthy")]
    stand.only()


@pytest.mark.parametrize("service", ["sidecar", "unlabelled", "gone"])
def test_restart_by_hand_refuses_what_is_not_supervised(stand, service):
    """By name, with the remedy, and nothing is on record. The fixture compares starts."""
    done = stand.weightkeeper("restart", service)
    assert done.returncode == 1
    assert service in done.stderr
    assert "docker compose up -d" in done.stderr
    assert stand.history() == []


def test_a_plan_says_what_an_edit_would_do(stand):
    """Asked before it is saved, as text and as data; nothing is done."""
    assert stand.weightkeeper("plan").stdout == "nothing to do\n"
    candidate = stand.directory.parent / "candidate.yaml"
    candidate.write_text(EDITED)
    given = ("--with", f"{stand.engine_yaml}={candidate}")
    assert stand.weightkeeper("plan", *given).stdout == f"{RELOAD}\n"
    shown = stand.weightkeeper("plan", "--json", *given).stdout
    assert '"action":"reload"' in shown and '"kind":"reload"' in shown and '"reason":"the KV cache"' in shown
    candidate.write_text("model: [")
    assert stand.weightkeeper("plan", *given).stdout.startswith(f"keep engine: {candidate}, line 1 ")
    stand.only()
    assert stand.history() == []


def test_a_second_supervisor_refuses(stand):
    """With the same state directory, and with another: the project's directory is locked, too."""
    done = stand.weightkeeper("supervise")
    assert done.returncode == 2
    assert f"another supervisor is at work on {stand.name}; stop it first" in done.stderr
    command = [*done.args[: done.args.index("--state-dir")], "--state-dir", str(stand.directory.parent / "other")]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert f"another supervisor is at work on {stand.name}; stop it first" in again.stderr
    stand.only()
