"""The commands around a keeper: what they print where, and their exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from keepers import keeper, wait_for

from weightkeeper import client
from weightkeeper.commands.status import rows
from weightkeeper.protocol import Held, Lease, Loading, Report, Status

FINGERPRINT = {"dtype": "bfloat16"}
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run(*arguments, **settings):
    """Exit code, stdout and stderr of the program."""
    result = subprocess.run(
        [sys.executable, "-m", "weightkeeper.cli", *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        **settings,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["serve", "status", "health", "load", "release"])
def test_every_command_explains_itself(command):
    """--help exits 0, a wrong option exits 2."""
    code, out, _ = run(command, "--help")
    assert code == 0
    assert out.startswith(f"Usage: python -m weightkeeper.cli {command} [OPTIONS]")
    assert "--socket-dir" in out
    code, out, err = run(command, "--bogus")
    assert (code, out) == (2, "")
    assert "No such option" in err


@pytest.mark.parametrize("command", ["status", "health", "load", "release"])
def test_without_a_keeper_every_command_fails_with_the_cause(tmp_path, command):
    """Exit code 1, one line on stderr, nothing on stdout."""
    tmp_path.chmod(0o700)
    code, out, err = run(command, "--socket-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.endswith(
        f": there is no socket at {tmp_path}/control.sock; is the sidecar running, with the same volume?\n"
    )
    assert err.count("\n") == 1


def test_health_tells_loading_failed_ready_and_released_apart(tmp_path):
    """G09: 0 only where the keeper serves as it was told to; the reason on stderr otherwise."""
    with keeper(tmp_path, stop_at="progress") as one:
        directory = ("--socket-dir", one.socket_dir)
        wait_for(one.stopped.exists, "the loader at its stage")
        assert run("health", *directory) == (1, "", "loading: reading, 50 % (524.3 kB of 1.0 MB)\n")
        one.plan(failed=["checkpoint", "part 2 of 2 is missing"])
        os.kill(int(one.stopped.read_text()), signal.SIGKILL)
        wait_for(lambda: "missing" in one.status().failure, "the second failure")
        assert run("health", *directory) == (1, "", "failed: part 2 of 2 is missing\n")
        one.plan()
        one.wait_for_state("ready")
        assert run("health", *directory) == (0, "ready: /models/tiny, 1.0 MB, 0 engine(s)\n", "")
        client.release(one.socket_dir)
        assert run("health", *directory) == (
            0, "released: the weights were released; engines load from disk\n", "",
        )  # fmt: skip


def test_an_empty_keeper_is_healthy(tmp_path):
    """It was never told to load anything."""
    with keeper(tmp_path, with_config=False) as one:
        one.wait_for_state("empty")
        assert run("health", "--socket-dir", one.socket_dir) == (
            0, "empty: no model was named; engines load from disk\n", "",
        )  # fmt: skip


def test_the_socket_directory_comes_from_the_environment_too(tmp_path):
    """As it does in the images."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        ENVIRONMENT["WEIGHTKEEPER_SOCKET_DIR"] = one.socket_dir
        try:
            assert run("health")[0] == 0
        finally:
            del ENVIRONMENT["WEIGHTKEEPER_SOCKET_DIR"]


def test_release_and_load_go_and_come_back(tmp_path):
    """With --wait, load returns when the weights are there, and says how it went on."""
    with keeper(tmp_path, fill=1) as one:
        directory = ("--socket-dir", one.socket_dir)
        one.wait_for_state("ready")
        assert run("release", *directory) == (0, "released: generation 1, 1.0 MB\n", "")
        assert one.status().state == "released"
        code, out, _ = run("load", "--wait", *directory)
        assert code == 0
        assert re.fullmatch(r"ready: /models/tiny, 1\.0 MB in \d+\.\d s\n", out)
        assert run("load", *directory) == (0, "loading\n", "")
        wait_for(lambda: one.status().loads == 3, "the third load")


def test_release_is_refused_while_an_engine_maps_unless_forced(tmp_path):
    """The engine is named."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        with client.open_session(one.socket_dir, "cpu-0", name="vllm-a") as session:
            os.close(session.map(FINGERPRINT, "zero_copy").descriptors[0])
            code, out, err = run("release", "--socket-dir", one.socket_dir)
            assert (code, out) == (1, "")
            assert err.startswith("weightkeeper: 1 engine(s) map the weights: vllm-a; stop them first")
            assert run("release", "--force", "--socket-dir", one.socket_dir)[0] == 0


def test_a_load_that_fails_fails_the_command(tmp_path):
    """Also where older weights are still served."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        one.plan(failed=["checkpoint", "part 2 of 2 is missing"])
        code, out, err = run("load", "--wait", "--socket-dir", one.socket_dir)
        assert (code, out) == (1, "")
        assert err.endswith("weightkeeper: part 2 of 2 is missing\n")
        code, out, _ = run("health", "--socket-dir", one.socket_dir)
        assert (code, out) == (
            0, "ready: /models/tiny, 1.0 MB, 0 engine(s); the last load failed: part 2 of 2 is missing\n",
        )  # fmt: skip


JOINED = "already loading; what was changed since that load began is loaded after it\n"


def test_waiting_for_a_load_ends_with_ctrl_c_and_with_release(tmp_path):
    """Ctrl-C leaves the load alone and exits 130; a release meanwhile is a failure of the command."""
    with keeper(tmp_path, stop_at="progress") as one:
        wait_for(one.stopped.exists, "the loader at its stage")
        command = [sys.executable, "-m", "weightkeeper.cli", "load", "--wait", "--socket-dir", one.socket_dir]
        for how, code, last in (
            ("interrupt", 130, "\ninterrupted"),
            ("release", 1, "weightkeeper: the load was stopped: the weights were released meanwhile"),
        ):
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as waiting:
                assert waiting.stderr.readline() == JOINED
                assert waiting.stderr.readline() == "reading, 50 % (524.3 kB of 1.0 MB)\n"
                if how == "interrupt":
                    waiting.send_signal(signal.SIGINT)
                else:
                    client.release(one.socket_dir)
                assert waiting.stderr.read() == f"{last}\n"
                assert waiting.wait(30) == code
            if how == "interrupt":
                assert one.status().state == "loading"


def test_status_as_json_is_the_whole_status(tmp_path):
    """Every field of the protocol's message, under its own name."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        code, out, _ = run("status", "--json", "--socket-dir", one.socket_dir)
        found = json.loads(out)
        assert code == 0
        assert set(found) == {"type", *Status.__struct_fields__}
        assert (found["state"], found["held"]["devices"]) == ("ready", {"cpu-0": 1 << 20})


def test_status_shows_a_running_keeper(tmp_path):
    """The table of a real one."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        code, out, err = run("status", "--socket-dir", one.socket_dir)
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0] == "state        ready"
        assert lines[1] == "model        /models/tiny"
        assert lines[-1] == f"config       {one.config}"


def test_status_has_a_line_for_everything():
    """Held, releasing, leases, loading, failure, fallbacks and the last start with its phases."""
    now = time.time()
    held = Held(3, "/models/smollm2", "f" * 64, 269_060_552, {"cpu-0": 269_060_552}, 272, "host", 3.21, now - 300)
    old = Held(2, "/models/old", "e" * 64, 1000, {"cpu-0": 1000}, 1, "host", 1.0, now - 9000)
    state = Status(
        state="ready",
        version="0.1.0",
        pid=7,
        started_at=now - 12_000,
        config="/config/engine.yaml",
        own_bytes=29_614_080,
        held=held,
        releasing=(old,),
        leases=(
            Lease("vllm-a", "cpu-0", "zero_copy", 1000, 0, now - 61, 3),
            Lease("", "cpu-0", "copy", 1000, 42, now - 200_000, 2),
        ),
        loading=Loading("reading", 50, 200, 12.3),
        failure="first\nsecond",
        fallbacks={"no_socket": 1, "mismatch": 2},
        last_report=Report(
            "mapped", "vllm-a", mode="zero_copy", nbytes=269_060_552, milliseconds=12.4, phases={"map": 1.0}
        ),
        last_report_at=now - 61,
    )
    assert list(rows(state, now)) == [
        ("state", "ready"),
        ("loading", "reading, 25 % (50 B of 200 B), for 12.3 s"),
        ("last load", "failed: first"),
        ("last load", "second"),
        ("model", "/models/smollm2"),
        ("weights", "269.1 MB of host memory, 272 tensors, generation 3, loaded in 3.2 s, 5 min ago"),
        ("fingerprint", "f" * 16),
        ("devices", "cpu-0  269.1 MB"),
        ("releasing", "generation 2, 1.0 kB, mapped by 1 engine(s)"),
        ("engines", "vllm-a  cpu-0  zero_copy, generation 3, uid 1000, for 1 min"),
        ("engines", "without a name  cpu-0  copy, generation 2, pid 42, uid 1000, for 2 d 7 h"),
        ("fallbacks", "mismatch 2, no_socket 1"),
        ("last start", "vllm-a: zero_copy, 269.1 MB in 12 ms, 1 min ago"),
        ("last start", "map 1.00 s"),
        ("keeper", "0.1.0, pid 7, 29.6 MB of its own, up 3 h 20 min"),
        ("config", "/config/engine.yaml"),
    ]
