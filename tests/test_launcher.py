"""The launcher as a process: starts, reloads, crashes, ends."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
from clients import CLIENTS, Clients
from keepers import descriptors_of, wait_for
from launchers import LauncherProcess, age, assert_nothing_left, free_port, has_ended, is_gone, launcher

from weightkeeper.errors import ConfigError
from weightkeeper.launcher import client, processes
from weightkeeper.launcher.tree import ESTABLISHED_SECONDS


def test_a_server_is_forked_from_the_template_and_is_the_launchers_child():
    """With its imports, in a session of its own, with a temporary directory of its own and the user's environment."""
    with launcher() as engine:
        facts = engine.ready()
        status = engine.status()
        assert facts["parent"] == engine.process.pid
        assert facts["warmed"] == [str(status.template)]
        assert status.prefork and status.threads == 1 and status.model == "m"
        assert processes.process(facts["pid"]).session == facts["pid"]
        assert set(status.processes) == {facts["pid"], facts["core"], facts["worker"]}
        assert Path(facts["environment"]["TMPDIR"]).parent.parent == engine.temporary
        assert "OMP_NUM_THREADS" not in facts["environment"]


IGNORING = """
import os, signal, sys
for number in (signal.SIGUSR1, signal.SIGRTMIN, signal.SIGRTMAX):
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_the_servers_threads_and_signals_are_the_users_own(monkeypatch):
    """The template's single thread is its own affair, and no signal stays ignored or blocked, whoever started us."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engine = LauncherProcess(prefix=(sys.executable, "-c", IGNORING))
    try:
        engine.start()
        facts = engine.ready()
        assert facts["environment"]["OMP_NUM_THREADS"] == "7"
        template = Path(f"/proc/{engine.status().template}/environ").read_bytes()
        assert b"OMP_NUM_THREADS=1" in template.split(b"\0")
        lines = Path(f"/proc/{facts['core']}/status").read_text().splitlines()
        masks = dict(line.split(":\t") for line in lines if line.startswith("Sig"))
        assert int(masks["SigBlk"], 16) == 0
        # 32 and 33 are the C library's own: it lets nobody set them, so what a parent of ours ignored of them stays so
        ignored = {number for number in range(1, 65) if int(masks["SigIgn"], 16) >> number - 1 & 1} - {32, 33}
        assert ignored == {signal.SIGPIPE, signal.SIGXFSZ}  # as Python starts
        assert engine.end() == 0
    finally:
        engine.close()


def test_a_reload_replaces_the_server_and_not_the_template():
    """SIGHUP reads the config file again; the new server has it, and the old one is gone with all of its processes."""
    with launcher(answer="one") as engine:
        before, template = engine.ready(), engine.status().template
        engine.edit(answer="two")
        engine.send(signal.SIGHUP)
        after = engine.ready(2)
        assert (before["answer"], after["answer"]) == ("one", "two")
        assert after["warmed"] == before["warmed"] == [str(template)]
        assert is_gone(before["pid"], before["core"], before["worker"])()
        status = engine.status()
        assert status.restarts == {"reload": 1}
        assert (status.last_exit.cause, status.last_exit.code) == ("reload: SIGHUP", 0)
        assert status.last_exit.was_asked and status.last_exit.pid == before["pid"]


def test_the_phases_of_a_start_add_up():
    """To the seconds of the start, in status, log and history; those of a reload begin with the old server's stop."""
    with launcher() as engine:
        engine.ready()
        engine.send(signal.SIGHUP)
        engine.ready(2)
        status = engine.status()
        assert list(status.phases) == ["stop", "fork", "engine core", "server", "first health"]
        assert sum(status.phases.values()) == pytest.approx(status.start_seconds, abs=1e-6)
        started, ended, again = engine.history()
        assert (started["event"], started["cause"], started["generation"]) == ("ready", "start", 1)
        assert (ended["event"], ended["cause"], ended["code"]) == ("ended", "reload: SIGHUP", 0)
        assert again["phases"] == pytest.approx(status.phases)
        assert f"generation 2: ready after {status.start_seconds:.2f} s: stop " in engine.text()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"refuse": "max_model_len is too much"}, "max_model_len is too much"),
        ({"break": True}, "the check of the arguments broke off: signal 11 (SIGSEGV)"),
        ({"port": "many"}, "--port many: expected a number from 0 to 65535"),
        ({"shutdown-timeout": "long"}, "--shutdown-timeout long: expected seconds"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_refused_reload_leaves_the_server_serving(edit, reason):
    """The reason is in the log, in the status and in the history, until a reload passes."""
    with launcher(answer="good") as engine:
        before = engine.ready()
        engine.edit(answer="bad", **edit)
        engine.send(signal.SIGHUP)
        engine.wait_for_text(f"reload refused, the server goes on as it is: {reason}")
        assert reason in engine.status().refusal
        assert engine.facts() == before
        engine.edit(answer="better")
        engine.send(signal.SIGHUP)
        assert engine.ready(2)["answer"] == "better"
        assert engine.status().refusal == ""
        assert [each["event"] for each in engine.history()] == ["ready", "refused", "ended", "ready"]


@pytest.mark.parametrize("edit", [{}, {"host": "127.0.0.1"}, {"port": 0}], ids=["as it is", "a host", "a port"])
def test_a_check_that_passes_changes_nothing(edit):
    """Neither server nor address; the reload that comes after it finds all as it was."""
    with launcher(answer="old") as engine:
        before, known = engine.ready(), {each.pid for each in engine.left()}
        engine.edit(answer="new", **edit)
        assert client.check(engine.socket_dir, "e") == "the configuration would be accepted"
        assert engine.facts() == before
        assert {each.pid for each in engine.left()} == known
        assert listening(engine.port) == {"0.0.0.0"}
        assert engine.status().generation == 1
        assert len(list(engine.temporary.rglob("engine.yaml"))) <= 1
        engine.edit(answer="new")
        client.reload(engine.socket_dir, "e")
        assert engine.ready(2)["answer"] == "new"


def test_a_check_with_other_variables_leaves_the_template(tmp_path):
    """Another one has to warm for it, and is gone afterwards."""
    variables = tmp_path / "variables"
    variables.write_text("COLOUR=old\n")
    with launcher("--env-file", str(variables)) as engine:
        before = engine.ready()
        template = engine.status().template
        variables.write_text("COLOUR=new\n")
        client.check(engine.socket_dir, "e")
        assert engine.status().template == template
        os.kill(before["pid"], signal.SIGKILL)
        assert engine.ready(2)["environment"]["COLOUR"] == "old"
        client.reload(engine.socket_dir, "e")
        assert engine.ready(3)["environment"]["COLOUR"] == "new"


def test_a_check_that_fails_says_why_and_the_server_serves_on():
    """As a refused reload does."""
    with launcher() as engine:
        before = engine.ready()
        engine.edit(refuse="max_model_len is too much")
        with pytest.raises(ConfigError, match="max_model_len is too much"):
            client.check(engine.socket_dir, "e")
        assert engine.facts() == before
        assert "max_model_len is too much" in engine.status().refusal


def test_a_check_while_the_template_warms_is_answered_and_served_by_nobody():
    """The first server is of the file as it was read for it."""
    with launcher(variables={"STANDIN_WARM": "1.0"}, answer="first") as engine:
        engine.wait_until_it_warms()
        with ThreadPoolExecutor(1) as asking:
            answer = asking.submit(client.check, engine.socket_dir, "e")
            assert answer.result() == "the configuration would be accepted"
        assert engine.ready(1)["answer"] == "first"


@pytest.mark.parametrize("content", ["model: [", "", "- a\n", "model: m\nmodel: n\n", None])
def test_a_config_file_that_cannot_be_read_leaves_the_server_serving(content):
    """Broken, empty, no mapping, ambiguous, gone."""
    with launcher() as engine:
        before = engine.ready()
        engine.config.unlink() if content is None else engine.config.write_text(content)
        with pytest.raises(ConfigError, match=str(engine.config)):
            client.reload(engine.socket_dir, "e")
        assert engine.facts() == before


def test_a_crash_restarts_what_was_checked():
    """An edit takes effect at a reload only, where it is checked."""
    with launcher(answer="checked") as engine:
        facts = engine.ready()
        engine.edit(answer="not checked", crash=3)
        os.kill(facts["pid"], signal.SIGKILL)
        assert engine.ready(2)["answer"] == "checked"


def wait_for_part(engine: LauncherProcess, pid: int) -> None:
    """Until the launcher knows this process for a part of its server: a status is a look, and it takes two, apart."""
    wait_for(lambda: pid in engine.status().processes, f"process {pid} among the server's")
    seen = monotonic()
    wait_for(
        lambda: monotonic() - seen > ESTABLISHED_SECONDS and pid in engine.status().processes,
        f"process {pid} for so long",
    )


@pytest.mark.parametrize("victim", ["pid", "core", "worker"])
def test_a_killed_process_brings_a_new_server(victim):
    """Whichever of the tree it is; nothing of the old tree is left, and the cause names it."""
    with launcher() as engine:
        facts = engine.ready()
        wait_for_part(engine, facts["worker"])
        os.kill(facts[victim], signal.SIGKILL)
        after = engine.ready(2)
        assert is_gone(facts["pid"], facts["core"], facts["worker"])()
        assert after["warmed"] == facts["warmed"]
        status = engine.status()
        assert status.restarts == {"crash": 1}
        assert status.last_exit.signal == signal.SIGKILL and not status.last_exit.was_asked
        if victim == "pid":
            assert status.last_exit.cause == "crash: signal 9 (SIGKILL)"
        else:
            assert status.last_exit.cause.startswith(f"crash: pid {facts[victim]} (python")


def test_a_server_that_says_it_is_broken_is_not_waited_for():
    """It has reaped its engine core, as one that ends in good order does; its answer at /health tells them apart."""
    with launcher(notices=True) as engine:
        facts = engine.ready()
        wait_for_part(engine, facts["core"])
        engine.send(signal.SIGSTOP)  # until nothing is left of it to be looked at
        os.kill(facts["core"], signal.SIGKILL)
        wait_for(is_gone(facts["core"]), "the server has reaped its engine core")
        engine.send(signal.SIGCONT)
        engine.ready(2)
        assert is_gone(facts["pid"], facts["core"], facts["worker"])()
        cause = engine.status().last_exit.cause
        assert cause.startswith(f"crash: pid {facts['core']} (python")
        assert cause.endswith(" ended, and /health answers 503")


def test_a_helper_that_ends_is_no_crash():
    """Programs that a server runs come and go, also by a signal, and forks may end with code 0."""
    with launcher() as engine:
        facts = engine.ready()
        program, fork = engine.facts("/program")["child"], engine.facts("/fork")["child"]
        wait_for(lambda: age(program) > 2.2, "helpers that have been seen")
        os.kill(program, signal.SIGKILL)
        os.kill(fork, signal.SIGTERM)
        wait_for(lambda: has_ended(program) and has_ended(fork), "the end of the helpers")
        engine.send(signal.SIGHUP)
        engine.ready(2)
        assert engine.status().restarts == {"reload": 1}
        assert engine.history()[0]["pid"] == facts["pid"]


def test_a_server_that_no_longer_answers_is_replaced(tmp_path):
    """After three failures in a row, though it lives."""
    hang = tmp_path / "hang"
    with launcher("--health-interval", "0.3", hang=str(hang)) as engine:
        facts = engine.ready()
        hang.touch()
        wait_for(is_gone(facts["pid"]), "the end of the silent server")
        hang.unlink()
        engine.ready(2)
        assert engine.status().restarts == {"unhealthy": 1}
        cause = "unhealthy: no answer from /health within 0.3 s, 3 times in a row"
        assert engine.status().last_exit.cause == cause


def test_a_server_that_starts_is_given_its_time(tmp_path):
    """Health counts from the first answer on, and one waiting connection is all that the launcher makes meanwhile."""
    hang = tmp_path / "hang"
    hang.touch()
    with launcher("--health-interval", "0.3", slow=1.5, hang=str(hang)) as engine:
        starting = engine.wait_for_state("starting")
        pid = wait_for(lambda: starting.pid or engine.status().pid, "a server")
        wait_for(lambda: age(pid) > 1.2, "four intervals of health checks")
        queued = subprocess.run(["ss", "-Hlt", f"sport = :{engine.port}"], capture_output=True, text=True)
        if queued.returncode == 0 and queued.stdout:
            assert int(queued.stdout.split()[1]) <= 1
        hang.unlink()
        engine.ready(1)
        assert engine.status().restarts == {}


def test_five_deaths_without_health_break_the_circle_until_somebody_asks():
    """Clients then get 503 with the cause at once; SIGHUP with a better configuration goes on."""
    with launcher(crash=3) as engine:
        status = engine.wait_for_state("broken")
        assert status.generation == 5 and status.restarts == {"crash": 5}
        assert status.cause == "exit code 3" and status.last_exit.code == 3
        with pytest.raises(urllib.error.HTTPError) as refused:
            engine.facts("/health")
        assert refused.value.code == 503
        assert b"the engine is broken: exit code 3" in refused.value.read()
        assert engine.history()[-1]["event"] == "broken"
        engine.edit()
        engine.send(signal.SIGHUP)
        engine.ready(6)


def test_a_restart_by_hand_leaves_the_broken_state(tmp_path):
    """With the same configuration, once the world around it is better."""
    trouble = tmp_path / "trouble"
    trouble.touch()
    with launcher(crash_while=str(trouble)) as engine:
        engine.wait_for_state("broken", 5)
        trouble.unlink()
        assert client.restart(engine.socket_dir, "e", "disk is back") == "the server is being replaced"
        engine.ready(6)
        assert engine.history()[-1]["cause"] == "restart: disk is back"


def test_a_restart_by_hand_replaces_a_ready_server():
    """Without reading the configuration again."""
    with launcher(answer="one") as engine:
        before = engine.ready()
        engine.edit(answer="two")
        client.restart(engine.socket_dir, "e", "by hand")
        after = engine.ready(2)
        assert after["answer"] == "one" and after["pid"] != before["pid"]
        assert engine.status().last_exit.cause == "restart: by hand"


def test_a_burst_of_signals_is_one_reload():
    """Whoever asks before the reading has begun is answered by it."""
    with launcher() as engine:
        engine.ready()
        for _ in range(50):
            engine.send(signal.SIGHUP)
        engine.ready(2)
        engine.send(signal.SIGHUP)
        engine.ready(3)
        assert engine.status().restarts == {"reload": 2}


def test_a_reload_while_a_server_starts_replaces_that_server():
    """The slow one never becomes ready."""
    with launcher(slow=100) as engine:
        starting = wait_for(lambda: (now := engine.status()) and now.pid and now, "a server that starts")
        engine.edit(answer="quick")
        engine.send(signal.SIGHUP)
        assert engine.ready(2)["answer"] == "quick"
        assert is_gone(starting.pid)()


def test_a_reload_while_the_template_warms_is_answered_by_the_first_start():
    """There is nothing to replace yet; what is started is what the file says at the end."""
    with launcher(variables={"STANDIN_WARM": "1.0"}, answer="old") as engine:
        engine.wait_until_it_warms()
        engine.edit(answer="new")
        engine.send(signal.SIGHUP)
        assert engine.ready(1)["answer"] == "new"
        assert engine.status().restarts == {}


RELOADS = 10


@pytest.mark.parametrize(
    ("application", "keeping"), [("standin_server", 0), ("standin_uvicorn", CLIENTS // 2)], ids=["new", "new and kept"]
)
def test_clients_wait_while_servers_are_replaced(application, keeping):
    """100 clients over ten reloads: each has whole answers of all servers, and none is refused, reset or cut.

    Those who keep their connection leave it where the server says so, which uvicorn with our draining does.
    """
    if keeping:
        pytest.importorskip("uvloop", reason="it comes with vLLM")
    with launcher("--application", application, "--health-interval", "5") as engine:
        pids = [engine.wait_for_state("ready", 1).pid]
        with Clients(engine.port, "/", lambda answer: answer["pid"], keeping) as clients:
            clients.until_all_are_answered_by(pids[0])
            for generation in range(2, RELOADS + 2):
                client.reload(engine.socket_dir, "e")
                pids.append(engine.wait_for_state("ready", generation).pid)
                clients.until_all_are_answered_by(pids[-1])
        assert not clients.failures
        assert clients.answers.keys() == set(pids)
        print(f"{clients.answers.total()} answers, {clients.told} with the word to leave, {clients.missed} missed it")
        assert bool(clients.told) == bool(keeping)
        assert engine.status().restarts == {"reload": RELOADS}


def test_a_request_in_flight_ends_whole_at_a_reload():
    """The old server drains before the new one is forked."""
    with launcher(drain=1.0) as engine:
        before = engine.ready()
        with ThreadPoolExecutor(1) as clients:
            slow = clients.submit(engine.facts, "/sleep?0.7")
            wait_for(lambda: engine.facts("/busy")["busy"], "the request has arrived")
            client.reload(engine.socket_dir, "e")
            engine.wait_for_state("reloading")
            assert slow.result()["pid"] == before["pid"]
        assert engine.ready(2)["pid"] != before["pid"]


@pytest.mark.parametrize("also", ["nothing else", "the template", "its group"])
@pytest.mark.parametrize("options", [(), ("--no-prefork",)], ids=["forked", "plain"])
def test_the_launchers_own_death_leaves_no_process(options, also):
    """kill -9 of the launcher, also together with its template, ends all that it and its server have started."""
    engine = LauncherProcess(*options)
    try:
        engine.start()
        engine.ready()
        left = [engine.facts(way)["child"] for way in WAYS]
        shared = Path("/dev/shm", engine.facts("/shared")["child"])
        assert shared.exists()
        template = engine.status().template
        if also == "its group":
            os.killpg(engine.process.pid, signal.SIGKILL)
        else:
            engine.process.kill()
        if also == "the template" and template:
            os.kill(template, signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL
        wait_for(lambda: not engine.left() and all(map(has_ended, left)), "the end of everything")
        assert not shared.exists()
        engine.wait_for_text("the launcher was killed, and so was what it has left: pid ")
        assert len(list(engine.temporary.iterdir())) == 1
        engine.start()
        engine.ready()
        assert len(list(engine.temporary.iterdir())) == 1
        assert "of a launcher that ended without clearing up" in engine.text()
        assert engine.end() == 0
        assert_nothing_left(engine)
    finally:
        engine.close()


def test_a_warden_that_dies_is_replaced():
    """The launcher's death still leaves nothing."""
    with launcher("--no-prefork") as engine:
        facts, warden = engine.ready(), engine.status().warden
        os.kill(warden, signal.SIGKILL)
        wait_for(lambda: engine.status().warden not in (0, warden), "a new warden")
        assert "the warden ended by itself, signal 9 (SIGKILL); starting a new one" in engine.text()
        assert engine.facts() == facts
        engine.process.kill()
        assert engine.wait() == -signal.SIGKILL
        wait_for(lambda: not engine.left(), "the end of everything")
        for left in (*engine.temporary.iterdir(), Path(engine.socket_dir)):
            shutil.rmtree(left)


def test_a_template_that_dies_is_replaced_and_the_server_goes_on():
    """The next server has the new template's imports."""
    with launcher() as engine:
        facts, template = engine.ready(), engine.status().template
        os.kill(template, signal.SIGKILL)
        renewed = wait_for(lambda: (now := engine.status()).template not in (0, template) and now, "a new template")
        assert engine.facts() == facts
        assert "the template ended by itself, signal 9 (SIGKILL); warming a new one" in engine.text()
        engine.send(signal.SIGHUP)
        assert engine.ready(2)["warmed"] == [str(renewed.template)]


def test_a_server_that_dies_with_its_template_comes_back():
    """The start waits for the imports of a new template."""
    with launcher() as engine:
        facts = engine.ready()
        os.kill(engine.status().template, signal.SIGKILL)
        os.kill(facts["pid"], signal.SIGKILL)
        assert engine.ready(2)["warmed"] != facts["warmed"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            "thread",
            "the imports left 2 threads running, and a fork keeps only one (besides it: Thread-1 (sleep) of Python)",
        ),
        ("fail", "ImportError: no module of this name"),
        ("exit", "3 templates in a row ended while they were warming"),
    ],
)
def test_a_template_that_cannot_fork_leads_to_the_plain_way(how, why):
    """It is said in one line, and the engine works."""
    with launcher(variables={"STANDIN_WARM": how}) as engine:
        facts = engine.ready()
        assert facts["warmed"] == [] and facts["parent"] == engine.process.pid
        status = engine.status()
        assert (status.prefork, status.template, status.why_plain) == (False, 0, why)
        assert engine.text().count(f"servers are started plainly, without a fork: {why}") == 1
        os.kill(facts["core"], signal.SIGKILL)
        engine.ready(2)


def test_the_plain_way_has_the_same_control():
    """--no-prefork: reload, refusal, crash and phases work without a template."""
    with launcher("--no-prefork", answer="one") as engine:
        facts = engine.ready()
        assert engine.status().why_plain == "--no-prefork" and facts["warmed"] == []
        assert next(iter(engine.status().phases)) == "imports"
        engine.edit(refuse="no")
        with pytest.raises(ConfigError, match=r"^no$"):
            client.reload(engine.socket_dir, "e")
        assert engine.facts() == facts
        engine.edit(answer="two")
        client.reload(engine.socket_dir, "e")
        assert engine.ready(2)["answer"] == "two"
        os.kill(engine.status().pid, signal.SIGKILL)
        engine.ready(3)


def test_a_changed_variable_replaces_the_template():
    """The new one is ready before the old goes; the log names the variable; equal values change nothing."""
    engine = LauncherProcess()
    variables = engine.directory / "variables"
    engine.options = ("--env-file", str(variables))
    variables.write_text("# for the server\nCOLOUR=red\nSHAPE=round\n")
    try:
        engine.start()
        assert engine.ready()["environment"]["COLOUR"] == "red"
        template = engine.status().template
        variables.write_text("SHAPE=round\nCOLOUR='red'\n")
        engine.send(signal.SIGHUP)
        engine.ready(2)
        assert engine.status().template == template
        variables.write_text("COLOUR=blue\n")
        engine.send(signal.SIGHUP)
        facts = engine.ready(3)
        assert facts["environment"]["COLOUR"] == "blue" and "SHAPE" not in facts["environment"]
        assert facts["warmed"] == [str(engine.status().template)] != [str(template)]
        assert "environment: COLOUR, SHAPE changed; warming a template that has it" in engine.text()
        wait_for(is_gone(template), "the end of the old template")
        variables.write_text("COLOUR\n")
        with pytest.raises(ConfigError, match=r"line 1: expected NAME=VALUE$"):
            client.reload(engine.socket_dir, "e")
        assert engine.facts() == facts
        assert engine.end() == 0
        assert_nothing_left(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("options", [(), ("--no-prefork",)], ids=["forked", "plain"])
def test_variables_that_the_imports_set_are_the_servers_too(options, monkeypatch):
    """Forked or not; what the user has set is left where the imports leave it."""
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS"):  # vLLM, imported by other tests, sets them here
        monkeypatch.delenv(name, raising=False)
    with launcher(*options, variables={"STANDIN_DEFAULT": "of the user"}) as engine:
        variables = engine.ready()["environment"]
        assert (variables["STANDIN_IMPORTED"], variables["STANDIN_DEFAULT"]) == ("1", "of the user")
        assert variables.get("PYTORCH_NVML_BASED_CUDA_CHECK") == (None if options else "1")
        assert "OMP_NUM_THREADS" not in variables


def test_what_a_server_leaves_in_a_session_of_its_own_is_ended():
    """Orphans of the old tree are found before the next server starts."""
    with launcher(leave=True) as engine:
        facts = engine.ready()
        left = wait_for(lambda: [p for p in engine.status().processes.items() if p[1] == "sleep"], "the sleeper")[0][0]
        os.kill(facts["pid"], signal.SIGKILL)
        engine.ready(2)
        assert is_gone(left, facts["core"], facts["worker"])()


WAYS = ["/session", "/daemon", "/forked-daemon"]
"""Of leaving the server: a session and environment of its own; without parent and descriptors; without exec as well."""


def start_and_crash(engine: LauncherProcess, way: str) -> int:
    """Have the server start a process and be killed before anybody can look; the pid of what it started."""
    file = engine.directory / "child"
    with suppress(ConnectionError, http.client.HTTPException):
        engine.facts(f"{way}?{file}")
    return int(file.read_text())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [(), ("--no-prefork",)], ids=["forked", "plain"])
def test_what_goes_its_own_way_a_moment_before_a_crash_is_ended(options, way):
    """It has the server's number, whatever else it gave up, and is gone before the next server is there."""
    with launcher(*options) as engine:
        engine.ready()
        child = start_and_crash(engine, way)
        engine.ready(2)
        assert has_ended(child)


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_its_own_way_is_shown_and_ends_with_the_engine(way):
    """At a reload, and at the launcher's end."""
    with launcher() as engine:
        engine.ready()
        for generation in (2, 3):
            child = engine.facts(way)["child"]
            assert child in engine.status().processes
            if generation == 2:
                client.reload(engine.socket_dir, "e")
                engine.ready(2)
            else:
                assert engine.end() == 0
            assert has_ended(child)


def test_a_launcher_that_can_give_no_numbers_says_so():
    """It works, as far as sessions and parents tell what belongs to a server."""
    limited = "import os, resource, sys; resource.setrlimit(10, (99, 99)); os.execvp(sys.argv[1], sys.argv[1:])"
    engine = LauncherProcess(prefix=(sys.executable, "-c", limited))
    try:
        engine.start()
        facts = engine.ready()
        assert "no number can be given to the server's processes: the hard limit of file locks is 99" in engine.text()
        os.kill(facts["core"], signal.SIGKILL)
        engine.ready(2)
        assert engine.status().warden == 0
        assert engine.end() == 0
        assert_nothing_left(engine)
    finally:
        engine.close()


def test_a_daemon_that_ends_well_is_no_crash():
    """The launcher, its parent by then, knows its exit code also where it has reaped it already."""
    with launcher() as engine:
        facts = engine.ready()
        child = engine.facts("/forked-daemon")["child"]
        wait_for_part(engine, child)
        os.kill(child, signal.SIGTERM)
        wait_for(is_gone(child), "the end of the daemon")
        engine.send(signal.SIGHUP)
        engine.ready(2)
        assert engine.status().restarts == {"reload": 1}
        assert engine.history()[0]["pid"] == facts["pid"]


def test_what_the_launcher_has_not_started_is_left_alone():
    """Children of its process from before it was the launcher."""
    engine = LauncherProcess(prefix=("sh", "-c", 'sleep 1000 & exec "$@"', "sh"))
    try:
        engine.start()
        facts = engine.ready()
        others = [each for each in processes.table().values() if each.parent == engine.process.pid]
        (before,) = [each.pid for each in others if each.name == "sleep"]
        os.kill(facts["pid"], signal.SIGKILL)
        engine.ready(2)
        assert before not in engine.status().processes
        assert engine.end() == 0
        assert [each.pid for each in engine.left()] == [before]
    finally:
        engine.close()


def test_no_zombie_stays():
    """Orphans that the launcher inherits are reaped, and no crash of the server."""
    with launcher() as engine:
        facts = engine.ready()
        orphan = engine.facts("/orphan")["child"]
        wait_for(lambda: processes.process(orphan).parent == engine.process.pid, "adoption")
        os.kill(orphan, signal.SIGKILL)
        wait_for(is_gone(orphan), "the orphan is reaped")
        assert engine.facts() == facts
        children = [each for each in processes.table().values() if each.parent == engine.process.pid]
        assert all(each.is_alive for each in children)


def test_twenty_reloads_leave_everything_flat():
    """Processes, descriptors and threads of launcher and template, and files, are as after the first."""

    def measure() -> tuple:
        status = engine.status()
        both = (status.launcher, status.template)
        descriptors = [wait_for(lambda pid=pid: settled(pid), "settled descriptors") for pid in both]
        threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in both]
        files = sorted(path.name.rstrip("0123456789") for path in engine.temporary.rglob("*"))
        return descriptors, threads, len(engine.left()), files

    def settled(pid: int) -> int | None:
        """Without a connection that comes or goes: the same ten times."""
        counts = {wait_for(lambda: descriptors_of(pid), "descriptors") for _ in range(10) if not sleep(0.02)}
        return counts.pop() if len(counts) == 1 else None

    with launcher() as engine:
        engine.ready()
        engine.send(signal.SIGHUP)
        engine.ready(2)
        before = measure()
        for generation in range(3, 23):
            client.reload(engine.socket_dir, "e")
            engine.wait_for_state("ready", generation)
        engine.facts()
        assert measure() == before


@pytest.mark.parametrize(
    ("config", "code"),
    [({"code": 0}, 0), ({"code": 5}, 5), ({"code": -15}, -15), ({"ignore_term": True}, -9)],
    ids=["zero", "code", "signal", "killed"],
)
def test_the_launcher_ends_as_its_server_did(config, code):
    """At SIGTERM, with its exit code or by its signal; SIGKILL after the grace."""
    with launcher("--stop-grace", "1", **config) as engine:
        engine.ready()
        assert engine.end() == code
        assert engine.history()[-1]["cause"] == "stop: SIGTERM"


@pytest.mark.parametrize(("kill", "code"), [(signal.SIGKILL, -9), (signal.SIGSEGV, -11), (None, 4)])
def test_without_restarts_the_servers_end_is_the_launchers(kill, code):
    """Codes and signals reach Docker unchanged, and nothing stays behind."""
    with launcher("--no-restart", code=4) as engine:
        facts = engine.ready()
        os.kill(facts["pid"], kill or signal.SIGTERM)
        assert engine.wait() == code
        assert engine.history()[-1]["generation"] == 1


def test_without_restarts_a_server_that_ends_well_ends_the_launcher():
    """With 0."""
    with launcher("--no-restart") as engine:
        os.kill(engine.ready()["pid"], signal.SIGTERM)
        assert engine.wait() == 0


def test_a_server_that_ends_well_unasked_is_started_again():
    """Nobody wanted it to end."""
    with launcher() as engine:
        os.kill(engine.ready()["pid"], signal.SIGTERM)
        engine.ready(2)
        assert engine.status().last_exit.cause == "crash: exit code 0"


@pytest.mark.parametrize("state", ["warming", "starting", "waiting", "broken", "reloading"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_is_clean_in_every_state(state, number):
    """Nothing stays behind; SIGINT is 130."""
    config = {"starting": {"slow": 100}, "waiting": {"crash": 3}, "broken": {"crash": 3}, "reloading": {"drain": 0.5}}
    options = ("--restart-delay", "50", "--restart-delay-max", "50") if state == "waiting" else ()
    warm = {"STANDIN_WARM": "100"} if state == "warming" else {}
    with launcher(*options, variables=warm, **config.get(state, {})) as engine:
        if state == "reloading":
            engine.ready()
            client.reload(engine.socket_dir, "e")
        if state == "starting":
            wait_for(lambda: (now := engine.status()) and len(now.processes) == 3, "a whole server")
        engine.wait_for_state(state)
        expected = -signal.SIGTERM if state == "starting" else 0
        assert engine.end(number) == (130 if number == signal.SIGINT else expected)


def starting(engine: LauncherProcess) -> int:
    """Generation of a server that has started its processes and serves nobody yet."""
    wait_for(lambda: (now := engine.status()) and len(now.processes) == 3, "a whole server")
    return engine.status().generation


def test_a_server_that_serves_nobody_yet_is_replaced_at_once():
    """Whatever it makes of a SIGTERM: vLLM loses one that comes while it starts."""
    with launcher("--stop-grace", "1000", slow=1000, ignore_term=True) as engine:
        generation = starting(engine)
        engine.edit()
        client.reload(engine.socket_dir, "e")
        engine.ready(generation + 1)
        last = engine.status().last_exit
        assert (last.generation, last.signal, last.was_asked) == (generation, signal.SIGKILL, True)


def test_a_server_that_serves_nobody_yet_ends_the_launcher_as_sigterm_does():
    """Not as something that had to be killed."""
    with launcher("--stop-grace", "1000", slow=1000, ignore_term=True) as engine:
        starting(engine)
        assert engine.end() == -signal.SIGTERM


def test_a_server_that_is_not_healthy_yet_may_have_clients_and_is_drained(tmp_path):
    """It accepts, and does not answer /health."""
    (hang := tmp_path / "hang").touch()
    with launcher("--stop-grace", "1000", hang=str(hang), drain=0.3) as engine:
        engine.wait_for_state("starting")
        assert engine.facts()["pid"] == engine.status().pid
        assert engine.status().state == "starting"
        engine.edit()
        client.reload(engine.socket_dir, "e")
        engine.wait_for_state("reloading")
        hang.unlink()
        engine.ready(2)
        assert (engine.status().last_exit.code, engine.status().last_exit.was_asked) == (0, True)


def test_a_second_signal_ends_at_once():
    """Without the grace that the first one gives."""
    with launcher("--stop-grace", "1000", ignore_term=True) as engine:
        engine.ready()
        engine.send(signal.SIGINT)
        engine.wait_for_state("draining")
        assert engine.end(signal.SIGINT) == 130
        assert engine.history()[-1]["signal"] == signal.SIGKILL


def test_a_first_configuration_that_is_refused_ends_the_launcher():
    """With code 2 and the server's own words; nothing was started."""
    with launcher(refuse="no such model") as engine:
        assert engine.wait() == 2
        assert engine.text().splitlines()[-1] == "weightkeeper: no such model"


def test_wrong_arguments_are_refused_in_the_servers_words():
    """Its parser's last line, not a traceback."""
    engine = LauncherProcess()
    engine.arguments = (*engine.arguments, "--bad")
    try:
        assert engine.start().wait() == 2
        assert engine.text().splitlines()[-1] == "weightkeeper: serve: error: unrecognized arguments: --bad"
    finally:
        engine.close()


def test_a_taken_port_is_refused_with_who_has_it():
    """At the start with code 2; at a reload the server stays where it is."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reason = f"0.0.0.0:{port}: Address already in use, by pid {os.getpid()} ("
        with launcher(port=port) as engine:
            assert engine.wait() == 2
            assert reason in engine.text()
        with launcher() as engine:
            facts = engine.ready()
            engine.edit(port=port)
            with pytest.raises(ConfigError, match="Address already in use"):
                client.reload(engine.socket_dir, "e")
            assert engine.facts() == facts


def test_a_reload_can_move_the_port_and_back():
    """The old socket is closed when the new server starts."""
    with launcher() as engine:
        engine.ready()
        old, engine.port = engine.port, free_port()
        engine.edit()
        client.reload(engine.socket_dir, "e")
        engine.ready(2)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", old))
        engine.port = old
        engine.edit()
        client.reload(engine.socket_dir, "e")
        engine.ready(3)


HOSTS = [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "localhost")]


@pytest.mark.parametrize(("old", "new"), HOSTS)
def test_a_reload_can_change_the_host_alone(old, new):
    """The port is ours already. The old address is left when the new server starts, and nobody else gets it."""
    with launcher(host=old) as engine:
        engine.wait_for_state("ready", 1)
        for generation, host in ((2, new), (3, old), (4, new)):
            engine.edit(host=host)
            client.reload(engine.socket_dir, "e")
            at = socket.gethostbyname(host)
            assert engine.wait_for_state("ready", generation).address == f"{at}:{engine.port}"
            socket.create_connection((at, engine.port)).close()
            assert listening(engine.port) == {at}
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="Address already in use"):
                    other.bind((at, engine.port))


def listening(port: int) -> set[str]:
    """IPv4 addresses at which somebody listens on this port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and int(fields[1][-4:], 16) == port}
    return {socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in found}


def test_clients_wait_while_the_host_gets_narrower():
    """Those of the new address are taken by it from the moment in which it is accepted; none is refused or reset."""
    with launcher(host="0.0.0.0", drain=0.3) as engine:
        first = engine.ready()
        stop = threading.Event()

        def ask() -> set[int]:
            seen = set()
            while not stop.is_set():
                seen.add(engine.facts()["pid"])
            return seen

        with ThreadPoolExecutor(2) as clients:
            asking = [clients.submit(ask) for _ in range(2)]
            try:
                engine.edit(host="127.0.0.1")
                client.reload(engine.socket_dir, "e")
                last = engine.wait_for_state("ready", 2).pid
                wait_for(lambda: engine.facts()["pid"] == last, "the new server answers")
            finally:
                stop.set()
            assert set.union(*(each.result() for each in asking)) == {first["pid"], last}


@pytest.mark.parametrize(("good", "bad"), HOSTS[:2])
def test_the_last_good_configuration_gets_its_host_back(good, bad):
    """Also where the port is the same: the broken one's listener is ours, too."""
    with launcher(host=good) as engine:
        engine.ready()
        engine.edit(host=bad, crash=3)
        client.reload(engine.socket_dir, "e")
        engine.wait_for_state("broken")
        assert listening(engine.port) == {bad}
        client.reload(engine.socket_dir, "e", is_last_good=True)
        assert engine.wait_for_state("ready").address == f"{good}:{engine.port}"
        assert engine.facts() and listening(engine.port) == {good}


def test_a_host_that_was_not_taken_after_all_takes_no_clients(tmp_path):
    """Two requests, of which the first one passes its check and the second does not: the server goes on as it was."""
    waits = tmp_path / "waits"
    waits.touch()
    with launcher(host="0.0.0.0") as engine:
        before = engine.ready()
        engine.edit(host="127.0.0.1", check_waits=str(waits))
        known = {each.pid for each in engine.left()}
        engine.send(signal.SIGHUP)
        wait_for(lambda: {each.pid for each in engine.left()} - known, "a check that runs")
        engine.edit(refuse="no")
        engine.send(signal.SIGHUP)
        assert engine.status().state == "ready"
        waits.unlink()
        engine.wait_for_text("reload refused, the server goes on as it is: no")
        assert listening(engine.port) == {"0.0.0.0"}
        assert engine.facts() == before


def test_a_port_that_the_kernel_chooses_is_said():
    """Once in the log, and in the status; it stays over reloads, and health is asked there."""
    with launcher(port=0) as engine:
        address = engine.wait_for_state("ready", 1).address
        host, _, engine.port = address.partition(":")
        assert host == "0.0.0.0" and int(engine.port) > 0
        first = engine.facts()
        client.reload(engine.socket_dir, "e")
        assert engine.wait_for_state("ready", 2).address == address
        assert engine.facts()["pid"] != first["pid"]
        assert engine.text().count(f"listening at {address}") == 1


def test_a_server_can_listen_on_a_path():
    """--uds: a dead socket is taken over, a live one is refused, and none is left at the end."""
    engine = LauncherProcess()
    path = engine.directory / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    engine.edit(uds=str(path))
    try:
        engine.start().wait_for_state("ready", 1)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert asking.recv(12) == b"HTTP/1.0 200"
        os.kill(engine.status().pid, signal.SIGKILL)
        engine.wait_for_state("ready", 2)
        assert engine.end() == 0 and not path.exists()
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(str(path))
            live.listen()
            assert engine.start().wait() == 2
        assert f"--uds {path}: Address already in use" in engine.text()
    finally:
        engine.close()


def test_two_launchers_of_one_name_are_refused():
    """The second one says so, and the first one goes on."""
    with launcher() as engine:
        facts = engine.ready()
        other = LauncherProcess()
        other.socket_dir = engine.socket_dir
        try:
            assert other.start().wait() == 1
            assert "a live launcher has the name e; give another --name" in other.text()
        finally:
            other.close()
        assert engine.facts() == facts


def test_process_one_hears_its_signals_and_ends_with_128_and_the_signal():
    """In a PID namespace of its own; orphans are reaped there, too."""
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no new PID namespace can be made here")
    engine = LauncherProcess("--stop-grace", "1", prefix=prefix, ignore_term=True)
    try:
        engine.start()
        status = engine.wait_for_state("ready", 1)
        assert status.launcher == 1
        first = wait_for(
            lambda: [p for p in processes.table().values() if p.parent == engine.process.pid], "process 1"
        )[0]
        os.kill(first.pid, signal.SIGHUP)
        engine.wait_for_state("ready", 2)
        server = next(
            p for p in processes.table().values() if p.parent == first.pid and p.session == p.pid and _is_server(p)
        )
        os.kill(server.pid, signal.SIGKILL)
        engine.wait_for_state("ready", 3)
        os.kill(first.pid, signal.SIGTERM)
        assert engine.wait() == 128 + signal.SIGKILL
        assert not engine.left()
    finally:
        engine.close()


def _is_server(process: processes.Process) -> bool:
    """It has an engine core below it; the template has nothing."""
    return any(each.parent == process.pid for each in processes.table().values())


def test_the_commands_speak_to_a_launcher():
    """status as table and JSON, reload with its refusal, restart."""

    def run(command: str, *options: str) -> subprocess.CompletedProcess:
        arguments = [
            sys.executable,
            "-m",
            "weightkeeper.cli",
            command,
            "--name",
            "e",
            "--socket-dir",
            engine.socket_dir,
        ]
        return subprocess.run([*arguments, *options], capture_output=True, text=True)

    with launcher() as engine:
        engine.ready()
        table = run("engine-status")
        assert table.stdout.splitlines()[0].startswith("state        ready for ")
        assert f"address      0.0.0.0:{engine.port}" in table.stdout
        assert '"state": "ready"' in run("engine-status", "--json").stdout
        assert run("engine-reload").stdout == "the configuration is accepted, the server is being replaced\n"
        engine.ready(2)
        assert run("engine-reload", "--check").stdout == "the configuration would be accepted\n"
        assert run("engine-reload", "--check", "--last-good").returncode == 2
        engine.edit(refuse="too long")
        checked = run("engine-reload", "--check")
        assert (checked.returncode, checked.stderr) == (2, "weightkeeper: too long\n")
        refused = run("engine-reload")
        assert (refused.returncode, refused.stderr) == (2, "weightkeeper: too long\n")
        assert run("engine-restart", "--cause", "why not").stdout == "the server is being replaced\n"
        engine.ready(3)
        assert engine.status().last_exit.cause == "restart: why not"
        assert "refused      " in run("engine-status").stdout
        engine.edit(refuse="too long\n  by far")
        assert run("engine-reload").returncode == 2
        assert " ago: too long; by far\n" in run("engine-status").stdout
    lost = run("engine-status")
    assert lost.returncode == 1 and "is `weightkeeper engine --name e` running" in lost.stderr


def test_no_control_socket_where_none_is_wanted():
    """The engine works by signals alone."""
    with launcher("--no-control") as engine:
        engine.wait_for_text("generation 1: ready")
        assert engine.facts()["model"] == "m"
        assert not Path(engine.socket_dir).exists()
        assert engine.end() == 0
        Path(engine.socket_dir).mkdir()
