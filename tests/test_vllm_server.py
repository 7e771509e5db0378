"""What the launcher's application does around vLLM's server, as far as it needs no running server."""

import ast
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from weightkeeper import phases, threads, vllm_imports, vllm_messages
from weightkeeper.errors import ConfigError

OF_OTHER_VERSIONS: set[str] = set()
"""Messages that the installed vLLM does not have."""


@pytest.fixture
def marks(monkeypatch):
    """What this process marks, as a function that takes in what there is."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    monkeypatch.setenv(phases.CHANNEL, str(sender.fileno()))

    def taken() -> list[dict]:
        found = []
        try:
            while True:
                found.append(json.loads(receiver.recv(4096)))
        except BlockingIOError:
            return found

    with receiver, sender:
        yield taken


def said(text: str, *args: object, name: str = "vllm.v1.engine.core") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, __file__, 1, text, args, None)


def test_a_mark_says_who_what_and_when(marks):
    """One datagram; the time is that of the monotonic clock, which all processes of a host share."""
    before = time.monotonic()
    phases.mark("server", "config")
    phases.mark("worker 1", "map", at=12.5)
    first, second = marks()
    assert before <= first.pop("at") <= time.monotonic()
    assert first == {"process": "server", "pid": os.getpid(), "name": "config"}
    assert second == {"process": "worker 1", "pid": os.getpid(), "name": "map", "at": 12.5}


def test_marks_go_to_a_path_as_well(marks, monkeypatch, tmp_path):
    """A process that is started anew inherits no descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "s"))
        monkeypatch.setenv(phases.CHANNEL, str(tmp_path / "s"))
        phases.mark("engine core", "device")
        assert json.loads(bound.recv(4096))["name"] == "device"
    assert marks() == []


def test_a_descriptor_that_is_something_else_by_now_gets_nothing(monkeypatch):
    """The number may belong to a stream of somebody's in a process that did not inherit ours."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setenv(phases.CHANNEL, str(ours.fileno()))
        phases.mark("server", "config")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("channel", ["", "1000000", "/nowhere/s", "x\0y", "-1"])
def test_a_mark_that_cannot_be_made_is_no_fault(channel, monkeypatch):
    """A start is worth more than its times."""
    if "\0" in channel:
        monkeypatch.setitem(os.environ._data, b"WEIGHTKEEPER_PHASES", os.fsencode(channel))
    else:
        monkeypatch.setenv(phases.CHANNEL, channel)
    phases.mark("server", "config")


def test_a_launcher_that_does_not_read_holds_nobody_up(marks):
    """A full socket drops marks."""
    for _ in range(5000):
        phases.mark("server", "config")
    assert 0 < len(marks()) < 5000


def test_a_message_ends_a_phase(marks):
    """By how its format string begins, with or without a prefix of vLLM's own."""
    vllm_messages.read(said("Initializing a V1 LLM engine (v%s) with config: %s", "0", "c"))
    vllm_messages.read(said("Application startup complete.", name="uvicorn.error"))
    vllm_messages.read(said("Application startup complete.", name="mine"))
    vllm_messages.read(said("Something else, not Available KV cache memory"))
    assert [(mark["process"], mark["name"]) for mark in marks()] == [("server", "engine core"), ("server", "server")]


def test_a_message_that_tells_how_long_its_phase_took_ends_the_one_before_it_too(marks):
    """Looking back by the message's own number."""
    for text, arguments in (
        ("%storch.compile took %.2f s in total", ("", 3.5)),
        ("torch.compile took %.2f s in total", (3.5,)),
        ("Graph capturing finished in %.0f secs, took %.2f GiB", (7.25, 0.5)),
    ):
        vllm_messages.read(said(text, *arguments))
        before, ended = marks()
        expected = {"c": ("profiling", "compile", 3.5), "G": ("warm-up", "graph capture", 7.25)}[
            "G" if text[0] == "G" else "c"
        ]
        assert (before["name"], ended["name"]) == expected[:2]
        assert ended["at"] - before["at"] == pytest.approx(expected[2])


def test_processes_have_the_names_that_people_use():
    """Not those of multiprocessing."""
    process = multiprocessing.current_process()
    names = {}
    for name in ("MainProcess", "EngineCore", "VllmWorker-3", "Other"):
        process.name, old = name, process.name
        names[name] = vllm_messages.process_name()
        process.name = old
    assert names == {"MainProcess": "server", "EngineCore": "engine core", "VllmWorker-3": "worker 3", "Other": "Other"}


def test_marks_survive_a_new_logging_configuration_and_a_broken_message(marks):
    """vLLM configures logging in each process, and a mark never costs a log line."""
    script = textwrap.dedent("""
        import logging, logging.config
        from weightkeeper import vllm_messages
        vllm_messages.install()
        vllm_messages.install()
        logging.config.dictConfig({
            "version": 1, "disable_existing_loggers": False,
            "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
            "loggers": {"vllm": {"handlers": ["out"], "level": "INFO"}},
        })
        logging.getLogger("vllm.x").info("Starting to load model %s...", "m")
        logging.getLogger("vllm.x").info("Graph capturing finished in %(seconds)s", {"seconds": "no number"})
        vllm_messages.MESSAGES = None
        logging.getLogger("vllm.x").info("Starting to load model %s...", "n")
    """)
    number = int(os.environ[phases.CHANNEL])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, pass_fds=[number])
    assert (
        run.stdout
        == "Starting to load model m...\nGraph capturing finished in no number\nStarting to load model n...\n"
    )
    assert [mark["name"] for mark in marks()] == ["device", "warm-up", "graph capture"]


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"MKL_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "5"}, 2),
        ({"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "5"}, 5),
    ],
)
def test_the_users_number_of_threads_counts(environment, count):
    """As OpenMP and torch read it."""
    assert threads.wanted(environment) == count


def test_without_a_number_no_more_threads_than_processors():
    """And at least one."""
    assert 1 <= threads.wanted({}) <= len(os.sched_getaffinity(0))


def test_a_module_whose_import_spoils_the_fork_is_found_in_a_child_and_named(tmp_path):
    """What an import did cannot be taken back, so it is tried first; one that fails, crashes or exits costs nothing."""
    (tmp_path / "good_one.py").write_text("")
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
    )
    (tmp_path / "failing.py").write_text("raise RuntimeError('not here')\n")
    (tmp_path / "crashing.py").write_text("import os\nos.abort()\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no such device')\n")
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "good_two.py").write_text("")
    script = textwrap.dedent("""
        import logging, sys
        from weightkeeper import vllm_imports
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        names = ["good_one", "threaded", "failing", "missing", "crashing", "leaving", "interrupted", "good_two"]
        try:
            found = vllm_imports._harmless(names)
        except BaseException as error:
            found = f"the child goes on with {error!r}"
        print(found, {*names} & {*sys.modules})
    """)
    late = "weightkeeper: {} is imported only after the fork:".format
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.splitlines() == [
        f"{late('threaded')} the imports left 2 threads running, and a fork keeps only one"
        " (besides it: Thread-1 (sleep) of Python)",
        *(
            f"{late(name)} it ended the process, crashed or took over 60 s"
            for name in ("crashing", "leaving", "interrupted")
        ),
        "['good_one', 'failing', 'missing', 'good_two'] set()",
    ]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM is imported here
@pytest.mark.parametrize(
    ("given", "in_file", "refused"),
    [
        (["--por", "8123"], "", "--por is an abbreviation of --port"),
        (["--ho=::1"], "", "--ho is an abbreviation of --host"),
        (["--ud", "/s"], "", "--ud is an abbreviation of --uds"),
        (["--shutdown_time", "3"], "", "--shutdown_time is an abbreviation of --shutdown-timeout"),
        ([], "por: 8123", "engine.yaml: por is an abbreviation of --port"),
        (["--port", "8123", "--served_model_nam", "port"], "max-model-le: 64", None),
    ],
)
def test_an_option_that_the_launcher_reads_has_its_full_name(tmp_path, monkeypatch, given, in_file, refused):
    """vLLM's parser completes a part of a name, where the launcher would take the default."""
    from weightkeeper import vllm_server

    class Passed(Exception):
        """The check goes on to what comes behind the options' names."""

    def passed(*_: object) -> None:
        raise Passed

    (tmp_path / "engine.yaml").write_text(f"model: m\n{in_file}\n")
    monkeypatch.setattr(vllm_server, "_refuse_unforked", passed)
    monkeypatch.setattr(vllm_server, "_is_warm", True)
    monkeypatch.setattr(vllm_server, "_checked", lambda words: vllm_server._parser().parse_args(["serve", *words]))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    with pytest.raises(Passed if refused is None else ConfigError) as caught:
        vllm_server.check(["--config", str(tmp_path / "engine.yaml"), *given])
    if refused is not None:
        assert str(caught.value) == f"{refused}, which the launcher has to read; write it in full"


def test_the_import_that_left_a_thread_is_named():
    """The first one, whatever comes after it."""
    script = textwrap.dedent("""
        import threading, time
        from weightkeeper import vllm_imports
        vllm_imports._look("good")
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        vllm_imports._look("threaded")
        vllm_imports._look("later")
        print(": ".join(vllm_imports._unfit_since))
    """)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.startswith("threaded: the imports left 2 threads running")


def test_names_of_modules_are_given_once():
    """A list that grew by looking."""
    named = vllm_imports.SERVER + vllm_imports.LATE + vllm_imports.LATE_ON_GPU
    assert len(set(named)) == len(named)


def sources() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def strings(file: Path) -> list[str]:
    """How each string of a Python file begins, f-strings by their first part."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.mark.vllm
def test_each_message_is_one_that_the_installed_vllm_logs():
    """Read in vLLM's own sources, so that a text that changed is seen here and not as a phase that is missing."""
    said_by_vllm = {"Application startup complete."}  # uvicorn's
    for folder in ("v1", "compilation", "model_executor", "entrypoints"):
        for file in (sources() / folder).rglob("*.py"):
            if "logger" in (text := file.read_text()) and any(
                m.text.removeprefix("%s") in text for m in vllm_messages.MESSAGES
            ):
                said_by_vllm.update(strings(file))
    missing = {
        message.text
        for message in vllm_messages.MESSAGES
        if not any(each.startswith((message.text, f"%s{message.text}")) for each in said_by_vllm)
    }
    assert missing == OF_OTHER_VERSIONS


@pytest.mark.vllm
@pytest.mark.parametrize("name", vllm_imports.SERVER)
def test_each_module_of_every_server_is_there(name):
    """Those without which nothing is served."""
    path = sources().parent / Path(*name.split("."))
    assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()
