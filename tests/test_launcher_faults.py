"""The launcher under faults of its surroundings: none of them ends a good server, or the launcher."""

import dataclasses
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from keepers import DEADLINE_SECONDS, descriptors_of, wait_for
from launchers import LauncherProcess, launcher

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import arguments, client, environment, processes, stamp, sweeping
from weightkeeper.launcher.checking import MAX_REASON_BYTES, cut
from weightkeeper.launcher.history import EngineHistory
from weightkeeper.launcher.reaping import Exit, Reaper
from weightkeeper.launcher.tree import Tree

BOMB = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("".join(f"k{i}: [1, 2, 3, 'abc']\n" for i in range(44_000)), "over 65536 bytes; is this the engine's config"),
        (BOMB, "over 20000 values, with each alias counted as what it stands for"),
        ("a: &a [*a]\n", "over 20000 values"),
        ("port: 0x" + "f" * 60_000, "a number in the config file: Exceeds the limit"),
    ],
    ids=["large", "merged", "endless", "number"],
)
def test_a_config_file_that_would_take_too_long_is_refused(text, reason):
    """Before it is taken apart; a megabyte took ten seconds, and a few lines of merge keys all memory."""
    with launcher() as engine:
        before = engine.ready()
        engine.config.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            client.reload(engine.socket_dir, "e", timeout_s=20)
        assert engine.facts() == before


@pytest.mark.parametrize("line", ['host: "10.0..1–"', 'host: "a\\0b"', 'uds: "\\0abc"', 'uds: "/tmp/a\\0b"'])
def test_an_address_that_is_none_is_refused_and_the_server_goes_on(line):
    """Whatever the socket library raises for it."""
    with launcher() as engine:
        before = engine.ready()
        engine.config.write_text(f"model: m\nport: {engine.port}\n{line}\n")
        with pytest.raises(ConfigError):
            client.reload(engine.socket_dir, "e")
        assert engine.facts() == before, engine.text()


def limited(engine: LauncherProcess, number: int) -> None:
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (number, 4096))


def test_a_launcher_without_free_descriptors_goes_on_without_a_template():
    """And has a new one as soon as there is room."""
    with launcher() as engine:
        facts, template = engine.ready(), engine.status().template
        limited(engine, 3)
        os.kill(template, signal.SIGKILL)
        engine.wait_for_text("no new template, the next try is in 0.5 s: ")
        assert engine.facts() == facts
        limited(engine, 1024)
        wait_for(lambda: (now := engine.status()) and now.template not in (0, template), "a new template")


def test_a_server_that_dies_while_no_descriptor_is_free_comes_back():
    """A failed look at the processes or a failed pipe is a failed start at most."""
    with launcher() as engine:
        facts = engine.ready()
        limited(engine, 3)
        os.kill(facts["pid"], signal.SIGKILL)
        engine.wait_for_text("the server's processes cannot be seen: Too many open files")
        limited(engine, 1024)
        wait_for(lambda: (now := engine.status()) and now.state == "ready" and now.generation > 1, "a new server")


@pytest.fixture
def checking(tmp_path):
    """A ready engine whose next configuration is being checked, for as long as a file exists."""
    waits = tmp_path / "waits"
    waits.touch()
    with launcher() as engine:
        facts = engine.ready()
        engine.edit(answer="new", check_waits=str(waits))
        known = {each.pid for each in engine.left()}
        engine.send(signal.SIGHUP)
        wait_for(lambda: {each.pid for each in engine.left()} - known, "a check that runs")
        yield engine, facts, waits


def test_a_crash_does_not_wait_for_a_check(checking):
    """The old configuration comes back at once, and the new one when it has been checked."""
    engine, facts, waits = checking
    os.kill(facts["pid"], signal.SIGKILL)
    assert engine.ready(2)["answer"] == ""
    waits.unlink()
    assert engine.ready(3)["answer"] == "new"


def test_the_end_does_not_wait_for_a_check(checking):
    """The check ends with the launcher."""
    engine, _, waits = checking
    assert engine.end() == 0
    assert not engine.left() and waits.exists()


def test_a_removed_socket_file_is_bound_anew():
    """The server that cannot be reached any more is replaced by one that can."""
    with launcher() as engine:
        path = engine.directory / "http.sock"
        engine.ready()
        engine.edit(uds=str(path))
        client.reload(engine.socket_dir, "e")
        engine.wait_for_state("ready", 2)
        path.unlink()
        engine.wait_for_state("ready", 3)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))


def test_a_fifo_of_variables_is_refused_and_not_waited_for(tmp_path):
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="no regular file; --env-file has to name"):
        environment.read([tmp_path / "fifo"], {})


@pytest.mark.parametrize(
    ("line", "shown"), [("HF-TOKEN=secret", ", found HF-TOKEN=…"), ("secret", ""), ("se+cret==", ""), ("1Secret=x", "")]
)
def test_a_wrong_line_of_variables_shows_no_secret(line, shown):
    """The name at most, where it looks like one."""
    with pytest.raises(ConfigError, match=f"^f, line 2: expected NAME=VALUE{re.escape(shown)}$"):
        environment.parse(f"A=1\n{line}\n", "f")


def test_the_history_is_its_owners_alone(tmp_path):
    """Also one that was made otherwise, and after it was shortened."""
    path = tmp_path / "engine-e.jsonl"
    path.touch(0o644)
    EngineHistory(tmp_path, "e")
    assert path.stat().st_mode & 0o777 == 0o600


@contextmanager
def full_after(more: int, path: Path, pid: int = 0) -> Iterator[None]:
    """No file grows beyond what this one has and `more` bytes; the write that would is cut short, as on a full disk."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def generations(path: Path) -> list[int]:
    return [json.loads(line)["generation"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("more", [0, 1, 40])
def test_a_full_disk_spoils_no_line_of_the_history(tmp_path, more, caplog):
    """What does not fit is not there at all, and is in the log; what comes later follows as if nothing had been."""
    history, path = EngineHistory(tmp_path, "e"), tmp_path / "engine-e.jsonl"
    history.append("ready", 1, 1, "start")
    with full_after(more, path):
        history.append("ended", 2, 1, "no room")
    history.append("ready", 3, 1, "room again")
    assert generations(path) == [1, 3]
    assert "this is not in it: {" in caplog.text and "no room" in caplog.text


def test_a_line_that_was_cut_short_ends_before_the_next_one(tmp_path):
    """By a power failure, say; the next line is whole."""
    path = tmp_path / "engine-e.jsonl"
    path.write_text('{"time":"2026-')
    EngineHistory(tmp_path, "e").append("ready", 1, 1, "start")
    cut_short, whole = path.read_text().splitlines()
    assert cut_short == '{"time":"2026-' and json.loads(whole)["generation"] == 1


def test_a_full_disk_while_the_history_is_shortened_takes_no_room(tmp_path, monkeypatch):
    """The old file stays as it is, and no half of a new one."""
    monkeypatch.setattr("weightkeeper.launcher.history.MAX_BYTES", 1000)
    history, path = EngineHistory(tmp_path, "e"), tmp_path / "engine-e.jsonl"
    while path.stat().st_size < 900:
        history.append("ready", 1, 1, "start")
    before = path.read_bytes()
    with full_after(100 - len(before), path):
        history.append("ready", 8, 1, "no room" * 10)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, [path.name])
    history.append("ready", 9, 1, "start")
    assert generations(path)[-1] == 9


def test_a_history_with_a_name_that_is_no_text_goes_on(tmp_path):
    """Paths in a cause need not be."""
    EngineHistory(tmp_path, "e").append("refused", 1, 1, "\udcff: no such file")
    assert json.loads((tmp_path / "engine-e.jsonl").read_text())["cause"] == "?: no such file"


def test_a_full_disk_does_not_end_the_launcher():
    """Neither that of the history nor that of the log."""
    with launcher() as engine:
        facts, path = engine.ready(), engine.state_dir / "engine-e.jsonl"
        with full_after(20, path, engine.process.pid):
            os.kill(facts["pid"], signal.SIGKILL)
            engine.ready(2)
        os.kill(engine.status().pid, signal.SIGKILL)
        engine.ready(3)
        assert [(each["event"], each["generation"]) for each in engine.history()] == [
            ("ready", 1), ("ended", 2), ("ready", 3)
        ]  # fmt: skip


def test_a_directory_as_config_file_leaks_nothing(tmp_path):
    """It is refused, and its descriptor closed."""
    before = descriptors_of(os.getpid())
    for _ in range(5):
        with pytest.raises(ConfigError, match="no regular file"):
            arguments.read(("--config", str(tmp_path)), {})
    assert descriptors_of(os.getpid()) == before


def test_a_bad_edit_while_the_template_warms_does_not_end_the_launcher():
    """What was read at first is served, and the refusal shown."""
    with launcher(variables={"STANDIN_WARM": "1.0"}, answer="first") as engine:
        engine.wait_until_it_warms()
        engine.edit(refuse="no")
        engine.send(signal.SIGHUP)
        assert engine.ready()["answer"] == "first"
        assert engine.status().refusal == "no"


def test_the_last_good_configuration_has_a_template_of_its_variables():
    """Variables that act at import are those of the template, not those of the fork."""
    engine = LauncherProcess()
    variables, trouble = engine.directory / "variables", engine.directory / "trouble"
    variables.write_text("COLOUR=good\n")
    engine.options = ("--env-file", str(variables))
    try:
        engine.start().ready()
        variables.write_text("COLOUR=bad\n")
        trouble.touch()
        engine.edit(crash_while=str(trouble))
        client.reload(engine.socket_dir, "e")
        engine.wait_for_state("broken")
        client.reload(engine.socket_dir, "e", is_last_good=True)
        template = engine.wait_for_state("ready").template
        assert b"COLOUR=good" in Path(f"/proc/{template}/environ").read_bytes().split(b"\0")
        assert engine.facts()["environment"]["COLOUR"] == "good"
    finally:
        engine.close()


def test_a_delay_is_no_part_of_the_fork():
    """It has a phase of its own."""
    with launcher("--restart-delay", "0.3", "--restart-delay-max", "0.3") as engine:
        for generation in (1, 2):
            os.kill(engine.ready(generation)["pid"], signal.SIGKILL)
        engine.ready(3)
        assert list(engine.status().phases)[:3] == ["stop", "wait", "fork"]
        assert engine.status().phases["wait"] >= 0.3


def test_a_signal_during_the_imports_of_the_launcher_is_heard():
    """SIGHUP does not end it."""
    with launcher() as engine:
        status = Path(f"/proc/{engine.process.pid}/status")
        wait_for(lambda: caught(status) & 1 << signal.SIGHUP - 1, "the first handler")
        engine.send(signal.SIGHUP)
        engine.ready()


def caught(status: Path) -> int:
    return int(re.search(r"SigCgt:\s+(\w+)", status.read_text())[1], 16)


@pytest.mark.parametrize(("verb", "code"), [("engine", 7), ("engine-status", -signal.SIGHUP)])
def test_a_signal_before_anything_was_read_is_ignored(tmp_path, verb, code):
    """From the first line of the program on, before it imports any other package; only the launcher."""
    first = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nraise SystemExit(7)\n"
    (tmp_path / "click.py").write_text(first)
    path = os.pathsep.join([str(tmp_path), *(each for each in sys.path if each)])
    command = [sys.executable, "-m", "weightkeeper.cli", verb]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode == code


def test_a_long_refusal_is_cut():
    """To 4 KiB of UTF-8, in both ways of starting."""
    assert len(cut("ü" * 5000).encode()) <= MAX_REASON_BYTES and cut("ü" * 2048) == "ü" * 2048
    for options in ((), ("--no-prefork",)):
        with launcher(*options) as engine:
            engine.ready()
            engine.edit(refuse="x" * 60_000)
            with pytest.raises(ConfigError, match=r"^x{4093}…$"):
                client.reload(engine.socket_dir, "e")


def test_a_start_that_does_not_come_up_in_time_is_a_crash():
    """With its limit in the cause."""
    with launcher("--start-timeout", "0.2", slow=100) as engine:
        status = engine.wait_for_state("broken", 5)
        assert status.cause == "/health did not answer 200 within 0.2 s of the start"


def test_a_signal_after_the_end_is_decided_changes_nothing():
    """The exit code stays the server's."""
    program = (
        "import os, signal, sys\n"
        "from weightkeeper.launcher.loop import ENDING, deaf_afterwards\n"
        "with deaf_afterwards(): signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)\n"
        "for number in ENDING: os.kill(os.getpid(), number)\n"
        "sys.exit(7)\n"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    assert subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}).returncode == 7


@pytest.fixture
def sleeper():
    """A process that would sleep for a minute, and has no number."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def seen_once(monkeypatch: pytest.MonkeyPatch, found: processes.Process) -> None:
    """The first look at the numbers finds a process that need not be there any more, the later ones nothing."""
    looks = iter([[found]])
    monkeypatch.setattr(stamp, "bearers", lambda first: next(looks, []))


@pytest.mark.parametrize("lack", [None, errno.ENOSYS, errno.EPERM])
def test_the_sweep_kills_what_has_a_number(monkeypatch, sleeper, lack):
    """Also where the kernel or its filter has no pidfd."""

    def pidfd_open(pid: int) -> int:
        raise OSError(lack, os.strerror(lack))

    if lack is not None:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    first = stamp.new()
    stamp.put(sleeper.pid, first + 1)
    swept = sweeping.sweep(first, 10)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert [each.partition(" (")[0] for each in swept.killed] == [f"pid {sleeper.pid}"] and not swept.left


@pytest.mark.parametrize(("ticks", "number"), [(-1, 1), (0, None)], ids=["start", "number"])
def test_the_sweep_spares_who_has_got_the_pid_of_one_that_ended(monkeypatch, sleeper, ticks, number):
    """Told by its start, and within the same tick by its number."""
    first = stamp.new()
    if number is not None:
        stamp.put(sleeper.pid, first + number)
    now = processes.process(sleeper.pid)
    seen_once(monkeypatch, dataclasses.replace(now, started=now.started + ticks))
    assert sweeping.sweep(first, 10) == sweeping.Swept([], [])
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.5)


def test_the_tree_spares_who_has_got_the_pid_of_one_that_ended(monkeypatch, sleeper):
    """Neither killed nor taken for a part of the server."""
    now = processes.process(sleeper.pid)
    stale = dataclasses.replace(now, started=now.started - 1)
    monkeypatch.setattr(processes, "table", lambda: {sleeper.pid: stale})
    tree = Tree(sleeper.pid, stamp.new(), Reaper())
    tree.close()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.5)


def test_a_look_at_a_process_that_is_ending_does_not_hide_its_loss(monkeypatch):
    """Between the signal and its end it shows no stack, and still runs."""
    code = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(100)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        child = int(server.stdout.readline())
        tree = Tree(server.pid, stamp.new(), Reaper())
        time.sleep(1.1)
        tree.look()
        table = processes.table()
        table[child] = dataclasses.replace(table[child], state="R", stack=0)
        with monkeypatch.context() as patched:
            patched.setattr(processes, "table", lambda: table)
            assert child in {each.pid for each in tree.look()}
        os.kill(child, signal.SIGKILL)

        async def death() -> tuple[processes.Process, Exit | None]:
            with anyio.fail_after(DEADLINE_SECONDS):
                return await tree.death()

        who, how = anyio.run(death)
        tree.close()
        assert (who.pid, how) == (child, Exit(signal=signal.SIGKILL))
    finally:
        server.kill()
        server.communicate()


def test_a_zombie_that_the_server_leaves_does_not_have_the_tree_look_without_end():
    """Its end is seen once; as long as its parent did not ask for it, it would be seen again at each look."""
    code = "import os, time; child = os.fork(); child or os._exit(0); print(child, flush=True); time.sleep(100)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # a shell may ask
    try:
        child = int(server.stdout.readline())
        wait_for(lambda: processes.process(child).state == "Z", "zombie")
        tree, looks = Tree(server.pid, stamp.new(), Reaper()), []
        look = tree.look
        tree.look = lambda: looks.append(0) or look()

        async def watch() -> None:
            with anyio.move_on_after(1.2):
                await tree.death()

        anyio.run(watch)
        tree.close()
        assert processes.process(child).state == "Z"
        assert 1 <= len(looks) <= 4  # one at the zombie's end, one each half second
    finally:
        server.kill()
        server.communicate()


def test_what_may_not_be_killed_is_looked_for_less_and_less_often(monkeypatch, sleeper):
    """Until it is named as left: every hundredth of a second would cost half a core."""
    first, looks, clock = stamp.new(), [], [0.0]
    stamp.put(sleeper.pid, first + 1)
    found = processes.process(sleeper.pid)

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(stamp, "bearers", lambda first: looks.append(first) or [found])
    monkeypatch.setattr(signal, "pidfd_send_signal", forbidden)
    monkeypatch.setattr(os, "kill", forbidden)
    monkeypatch.setattr(sweeping, "time", types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    swept = sweeping.sweep(first, 10)
    monkeypatch.undo()
    assert (swept.killed, swept.left) == ([], [str(found)])
    assert len(looks) < 400
