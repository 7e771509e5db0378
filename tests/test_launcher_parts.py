"""The launcher's parts by themselves: arguments, variables, delays, phases, health, memory, history."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import types
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keepers import wait_for

from weightkeeper import engine_config, nvml
from weightkeeper.errors import ConfigError
from weightkeeper.launcher import arguments, environment, gpu_memory, health, holders, processes
from weightkeeper.launcher.address import Address
from weightkeeper.launcher.backoff import BROKEN_AFTER, Backoff
from weightkeeper.launcher.gpu_memory import GpuMemory
from weightkeeper.launcher.history import EngineHistory
from weightkeeper.launcher.listener import Listener
from weightkeeper.launcher.preparing import Preparer
from weightkeeper.launcher.private import PrivateDirectory
from weightkeeper.launcher.reaping import Exit, Reaper
from weightkeeper.launcher.settings import Settings, checked_name
from weightkeeper.launcher.templates import Templates
from weightkeeper.launcher.timeline import Timeline, drain
from weightkeeper.launcher.wishes import Wishes


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return str(path)


def test_explicit_arguments_win_over_the_config_file(tmp_path):
    """As in vLLM, in both spellings, with dashes or underscores; of two the last one counts."""
    path = config(tmp_path, "model: a\nport: 1\nhost: 127.0.0.1\nshutdown_timeout: 7\n")
    read = arguments.read(("--port=2", "--config", path, "--port", "3", "--shutdown_timeout", "9"), {})
    assert (read.address, read.model, read.shutdown_timeout) == (Address("127.0.0.1", 3), "a", 9.0)
    assert arguments.read(("b", "--config", path), {}).model == "b"
    assert arguments.read(("b",), {}).address == Address("", 8000)
    assert arguments.read(("b", "--uds", "/x/y"), {}).address == Address("", 8000, "/x/y")


@pytest.mark.parametrize("words", [("--config", "{}"), ("--config={}",)])
def test_the_server_reads_a_copy_of_the_config_file(tmp_path, words):
    """Named as the file is, in two words, which is the spelling that vLLM reads."""
    path = config(tmp_path, "model: a\n")
    given = ("x", *(word.format(path) for word in words), "--port", "1")
    written = arguments.read(given, {}).write(tmp_path / "copy")
    assert written == ["x", "--config", str(tmp_path / "copy" / "engine.yaml"), "--port", "1"]
    assert (tmp_path / "copy" / "engine.yaml").read_bytes() == b"model: a\n"
    assert arguments.is_unread(given) == (len(words) == 1)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--config",), "--config has no file behind it"),
        (("--config=",), "--config has no file behind it"),
        (("--config", "a", "--config=b"), "given more than once"),
        (("--config", "/nowhere"), "/nowhere: No such file"),
        (("--config", "/dev/zero"), "/dev/zero: no regular file"),
        (("--config", "/tmp"), "/tmp: "),
        (("--port", "70000"), "--port 70000: expected a number from 0 to 65535"),
        (("--port", "-1"), "--port -1: expected"),
    ],
)
def test_arguments_that_the_launcher_cannot_use_are_refused(given, reason):
    """With the option and what is wrong."""
    with pytest.raises(ConfigError, match=reason):
        arguments.read(given, {})


def test_a_config_fifo_is_refused_and_not_waited_for(tmp_path):
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(ConfigError, match="no regular file"):
        arguments.read(("--config", str(tmp_path / "fifo.yaml")), {})


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_arguments_are_read_or_refused(words):
    """Nothing but a ConfigError comes out."""
    try:
        read = arguments.read(tuple(words), {})
    except ConfigError:
        return
    assert read.write(Path("/nowhere/at/all")) == words


def test_variables_are_read_line_by_line():
    """Comments and empty lines do not count, one pair of quotes is taken off, nothing is replaced."""
    text = "# c\n\n A=1\nexport B = two words \nC='x\"y'\nD=\nE=a=b#c\nF=$A\n"
    expected = {"A": "1", "B": "two words", "C": 'x"y', "D": "", "E": "a=b#c", "F": "$A"}
    assert environment.parse(text, "f") == expected


@pytest.mark.parametrize("line", ["A", "=1", "1A=2", "A B=1", "A=\0"])
def test_a_line_that_is_no_variable_is_refused(line):
    """With file and line."""
    with pytest.raises(ConfigError, match="f, line 2: "):
        environment.parse(f"X=1\n{line}\n", "f")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    """What is read can be an environment."""
    try:
        values = environment.parse(text, "f")
    except ConfigError:
        return
    assert all(name.isidentifier() and "\0" not in value for name, value in values.items())


def test_a_later_file_wins_and_changes_have_names(tmp_path):
    """Over the inherited environment."""
    (tmp_path / "a").write_text("A=1\nB=1\n")
    (tmp_path / "b").write_text("B=2\n")
    new = environment.read([tmp_path / "a", tmp_path / "b"], {"B": "0", "C": "0"})
    assert new == {"A": "1", "B": "2", "C": "0"}
    assert environment.changed({"B": "0", "C": "0", "D": "0"}, new) == ["A", "B", "D"]
    with pytest.raises(ConfigError, match="No such file"):
        environment.read([tmp_path / "c"], {})


def test_delays_double_and_begin_anew_after_a_minute_of_health():
    """0 for the first, then 1, 2, 4 … 60 seconds."""
    backoff = Backoff()
    assert [backoff.died(1.0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff.died(60.0), backoff.died(59.9)] == [0, 1]


def test_five_deaths_without_health_break_the_circle():
    """One moment of health in between starts the count anew, and so does somebody who asks."""
    backoff = Backoff()
    assert [backoff.died(None) for _ in range(4)] == [0, 1, 2, 4]
    assert backoff.died(0.1) is not None
    assert [backoff.died(None) is None for _ in range(BROKEN_AFTER)] == [False] * 4 + [True]
    backoff.forgive()
    assert backoff.died(None) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5))))
def test_phases_add_up_whatever_the_marks_say(marks):
    """Late, early and from many processes: together they are the time from the beginning to the last."""
    line = Timeline(begun=1.0)
    for name, at in marks:
        line.add(name, at)
    assert all(seconds >= 0 for seconds in line.phases.values())
    assert sum(line.phases.values()) == pytest.approx(line.seconds)


def test_a_mark_takes_the_time_since_the_one_before():
    """Whoever made that; a name that comes twice has both times."""
    line = Timeline(begun=10.0)
    for name, at in (("map", 13.0), ("fork", 11.0), ("map", 14.0), ("server", 14.5)):
        line.add(name, at)
    assert line.phases == {"fork": 1.0, "map": 3.0, "server": 0.5}
    assert list(line.phases) == ["fork", "map", "server"]


def test_what_is_no_mark_is_left_out():
    """Whoever holds the socket may send anything."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    marks = []
    with receiver, sender:
        for data in (b"", b"{", b"\xff", b"[]", b'{"process":"a","pid":"x","name":"b","at":1}', b"x" * 5000):
            sender.send(data)
        sender.send(json.dumps({"process": "a", "pid": 1, "name": "b", "at": 2.5, "more": 1}).encode())
        drain(receiver, marks.append)
    assert [(mark.process, mark.pid, mark.name, mark.at) for mark in marks] == [("a", 1, "b", 2.5)]


def test_the_history_keeps_its_newer_half(tmp_path, monkeypatch):
    """Where it would grow over its limit; every line stays whole."""
    monkeypatch.setattr("weightkeeper.launcher.history.MAX_BYTES", 2000)
    history = EngineHistory(tmp_path / "new", "e")
    for number in range(100):
        history.append("ready", number, 1, "start", phases={"map": 0.5})
    lines = (tmp_path / "new" / "engine-e.jsonl").read_text().splitlines()
    generations = [json.loads(line)["generation"] for line in lines]
    assert generations == list(range(generations[0], 100)) and 5 < len(generations) < 20


def test_a_state_directory_that_cannot_be_used_is_refused(tmp_path):
    """At the start, with the way out."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another with --state-dir"):
        EngineHistory(tmp_path / "file" / "x", "e")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 64, "ü", "a b"])
def test_a_name_that_is_no_file_name_is_refused(name):
    """It becomes part of paths."""
    with pytest.raises(ConfigError, match="cannot be an engine's name"):
        checked_name(name)


def test_a_socket_is_traced_to_who_holds_it():
    """By the links in /proc; the port by the table of listeners."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken.set_inheritable(True)
        child = subprocess.Popen(["sleep", "100"], pass_fds=[taken.fileno()])
        try:
            assert holders.of_sockets([os.fstat(taken.fileno()).st_ino]) == [child.pid]
            assert holders.of_port(taken.getsockname()[1]) == f"pid {child.pid} (sleep)"
        finally:
            child.kill()
            child.wait()


def test_a_program_has_another_stack_than_who_forked_it():
    """That tells a fork, which is a part of the server, from a program that it runs."""
    ours = processes.process(os.getpid())
    fork, program = os.fork(), 0
    if fork == 0:
        signal.pause()
    try:
        program = subprocess.Popen(["sleep", "100"])
        assert processes.process(fork).stack == ours.stack != 0
        assert wait_for(lambda: processes.process(program.pid).stack, "a program with a stack") != ours.stack
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        if program:
            program.kill()
            program.wait()


def test_an_exit_is_shown_as_a_shell_does():
    """Code, or 128 and the signal."""
    assert [str(Exit(code=3)), str(Exit(signal=9)), str(Exit(signal=44))] == [
        "exit code 3",
        "signal 9 (SIGKILL)",
        "signal 44",
    ]
    assert [Exit(code=3).status, Exit(signal=9).status, Exit.of(9), Exit.of(3 << 8)] == [
        3,
        137,
        Exit(signal=9),
        Exit(code=3),
    ]


def answered(listener: Listener, answers: list[bytes], tls: health.Tls = "none", context=None) -> str:
    """What `fails` says of a server that gives these answers, one a connection."""

    def serve() -> None:
        for answer in answers:
            client, _ = listener.socket.accept()
            with client:
                try:
                    wrapped = context.wrap_socket(client, server_side=True) if context else client
                    wrapped.recv(1000)
                    wrapped.sendall(answer)
                    wrapped.close()
                except OSError:
                    pass

    server = threading.Thread(target=serve)
    server.start()
    try:
        return anyio.run(health.fails, listener, tls, 5.0)
    finally:
        server.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "/health answers 503"),
        (b"HTTP/1.1\r\n", "/health answers 0"),
        (b"nonsense\r\n", "/health answers 0"),
        (b"", "/health cannot be asked: EndOfStream"),
    ],
)
def test_only_status_200_is_health(answer, reason):
    """Everything else is said in words."""
    listener = Listener(Address("127.0.0.1", 0))
    try:
        assert answered(listener, [answer]) == reason
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("host", "reach"),
    [("localhost", "127.0.0.1"), ("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")],
)
def test_health_is_asked_where_the_socket_really_is(host, reach):
    """By number: a name may stand for an IPv6 address, too, at which somebody else listens."""
    listener = Listener(Address(host, 0))
    try:
        assert listener.reach == (reach, listener.socket.getsockname()[1])
        assert Address(host, 0).resolved().host == listener.at.host
    finally:
        listener.close()


def test_health_is_asked_by_ipv6_where_the_socket_is():
    """The wildcard is asked at the loopback address."""
    try:
        listeners = [Listener(Address(host, 0)) for host in ("::", "::1")]
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert [each.reach[0] for each in listeners] == ["::1", "::1"]
    assert [answered(each, [b"HTTP/1.1 200 OK\r\n\r\n"]) for each in listeners] == ["", ""]
    for each in listeners:
        each.close()


def test_a_host_that_nobody_knows_is_refused():
    """With the address."""
    with pytest.raises(ConfigError, match=r"^no\.such\.host\.invalid:80: "):
        Address("no.such.host.invalid", 80).resolved()


@pytest.mark.parametrize("slow", ["weightkeeper.engine_config.parse", "socket.getaddrinfo"])
def test_slow_reading_does_not_stop_the_launcher(tmp_path, monkeypatch, slow):
    """Neither a large file nor a slow name server: health, signals and the control socket are answered meanwhile."""
    began, goes_on = threading.Event(), threading.Event()
    module, _, name = slow.rpartition(".")
    real = getattr(sys.modules[module], name)

    def waits(*args, **kwargs):
        began.set()
        assert goes_on.wait(5), "the event loop stands still"
        return real(*args, **kwargs)

    monkeypatch.setattr(slow, waits)
    settings = Settings(("--config", config(tmp_path, "port: 0\nmodel: m\n")), "e", prefork=False)
    directory = PrivateDirectory()
    preparer = Preparer(settings, Templates(settings, Reaper()), directory, Wishes(), lambda _: None)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(preparer.first)
            with anyio.fail_after(20):
                while not began.is_set():
                    await anyio.sleep(0.01)
            goes_on.set()

    anyio.run(run)
    preparer.settle()
    directory.close()


def test_a_plan_that_is_read_once_more_outlives_the_others(tmp_path, monkeypatch):
    """A server that becomes healthy in that moment has all other plans let go of, but not one that is to be served."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    file = Path(config(tmp_path, "port: 0\nmodel: m\n"))
    settings = Settings(("--config", str(file)), "e", application="standin_server", prefork=False)
    directory, reaper, wishes, refusals = PrivateDirectory(), Reaper(), Wishes(), []
    preparer = Preparer(settings, Templates(settings, reaper), directory, wishes, refusals.append)
    at_read, real = [], engine_config.parse

    def parse(*args):
        if at_read:
            anyio.from_thread.run_sync(at_read.pop(0))
        return real(*args)

    monkeypatch.setattr(engine_config, "parse", parse)

    async def run() -> None:
        served = await preparer.first()
        preparer.settle(served)
        file.write_text(f"port: {served.listener.at.port}\nhost: 127.0.0.1\nmodel: m\n")
        at_read.append(lambda: wishes.ask_to_reload("again"))
        at_read.append(lambda: preparer.settle(served, wishes.plan, served))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(preparer.run)
            wishes.ask_to_reload("edit")
            with anyio.fail_after(60):
                while wishes.plan is None:
                    reaper.reap()
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()

    anyio.run(run)
    assert (at_read, refusals) == ([], [""])
    name = wishes.plan.arguments[wishes.plan.arguments.index("--config") + 1]
    assert Path(name).read_text() == file.read_text()
    assert wishes.plan.listener.is_open
    preparer.settle()
    assert not wishes.plan.copy.exists() and not wishes.plan.listener.is_open
    directory.close()


def test_a_queue_alone_is_no_health():
    """The kernel takes the connection of a server that does not accept."""
    listener = Listener(Address("127.0.0.1", 0))
    try:
        assert anyio.run(health.fails, listener, "none", 0.1) == "no answer from /health within 0.1 s"
    finally:
        listener.close()


def test_a_server_with_tls_is_asked_with_tls(tmp_path):
    """Its own certificate is of no account, and one that wants the client's is alive."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", "k", "-out", "c"]
    if subprocess.run(made, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c", tmp_path / "k")
    listener = Listener(Address("127.0.0.1", 0))
    try:
        assert answered(listener, [b"HTTP/1.1 200 OK\r\n\r\n"], "server", context) == ""
        assert answered(listener, [b"HTTP/1.1 500 No\r\n\r\n"], "server", context) == "/health answers 500"
        context.verify_mode = ssl.CERT_REQUIRED
        assert answered(listener, [b""], "mutual", context) == ""
    finally:
        listener.close()
    given = ("m", "--ssl-keyfile", "k", "--ssl-certfile=c")
    assert [arguments.read((*given, *more), {}).tls for more in ((), ("--ssl-cert-reqs=2",))] == ["server", "mutual"]


class Nvml(types.ModuleType):
    """A stand-in for NVML: two GPUs, whose memory in use comes from a list, one number a question."""

    class NVMLError(Exception):
        pass

    def __init__(self, used: list[int]):
        super().__init__("pynvml")
        self.used = used
        self.asked: list[int] = []
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetUUID = lambda index: f"GPU-{index}abc"

    def nvmlDeviceGetMemoryInfo(self, index: int):
        self.asked.append(index)
        if not self.used:
            raise self.NVMLError("lost")
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return types.SimpleNamespace(used=used * 2**30)


def settle(monkeypatch, used: list[int], seen: str = "0") -> Nvml:
    nvml = Nvml(used)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = GpuMemory()
    memory.note({"CUDA_VISIBLE_DEVICES": seen})
    anyio.run(memory.settled, {"CUDA_VISIBLE_DEVICES": seen})
    memory.close()
    return nvml


def test_the_next_start_waits_for_the_memory_of_the_one_before(monkeypatch):
    """Until no more is in use than before it."""
    nvml = settle(monkeypatch, [1, 60, 60, 30, 1, 7])
    assert nvml.used == [7]


def test_memory_that_stays_is_said_and_not_waited_for_long(monkeypatch, caplog):
    """It gets no less any more: another process has it, a keeper that has loaded meanwhile, say."""
    caplog.set_level("INFO")
    settle(monkeypatch, [1, 60, 21])
    assert caplog.messages == ["GPU memory: 21.5 GB more in use than before this server; not by a process of ours"]


@pytest.mark.parametrize(
    ("seen", "asked"), [("1", {1}), ("GPU-0a", {0}), ("0,1", {0, 1}), ("MIG-7", {0, 1}), ("", set())]
)
def test_only_visible_gpus_count(monkeypatch, seen, asked):
    """By index, by UUID or its beginning; of a MIG id all may be meant."""
    assert set(settle(monkeypatch, [1], seen).asked) == asked


def test_without_nvml_nothing_is_waited_for(monkeypatch):
    """Neither where there are no bindings nor where the driver fails."""
    monkeypatch.setattr(nvml, "bindings", lambda: None)
    memory = GpuMemory()
    memory.note({})
    anyio.run(memory.settled, {})
    monkeypatch.undo()
    settle(monkeypatch, [])


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_whose_memory_nobody_can_ask_for_is_said(monkeypatch, caplog, tmp_path, has_driver):
    """A machine without a GPU has nothing to wait for, and nothing to say."""
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(nvml, "bindings", lambda: None)
    monkeypatch.setattr(gpu_memory, "_DRIVER", driver)
    GpuMemory()
    assert [message.partition(":")[0] for message in caplog.messages] == ["GPU memory"] * has_driver
