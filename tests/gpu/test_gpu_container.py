"""The launcher as an engine's container runs it, without Docker: process 1 of its own namespaces. `make test-gpu`"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
import pytest
import yaml
from gpu_engines import CACHE_BYTES, GIGABYTES, IN_CONTAINER, Keeper, Models, children, start, used
from gpu_machine import GPU, REHEARSING, TESTS, WHY_NOT, wait_until_free
from keepers import wait_for

from weightkeeper.errors import EngineLostError
from weightkeeper.launcher import client
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.recovery.completion import PROMPT
from weightkeeper.recovery.gpu import settled_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

COMPOSE = TESTS.parent / "compose"
KIND = "" if REHEARSING else ".gpu"
IMAGE = TESTS.parent / "images/engine"
ENGINE = "engine"
"""As WEIGHTKEEPER_ENGINE says in compose.yaml."""

LOCAL = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""There is a loopback interface and no other, where Docker gives one more."""

KINDS = ("pid", "ipc", "net", "uts", "mnt")
TOKENS = 24
START_SECONDS = 240
SLACK_BYTES = 64 << 20
MAPPED_LINE = re.compile(r"weightkeeper: (\w+), mapped \d+ bytes and copied \d+ in [\d.]+ ms")
ASK = """
import json, sys
from weightkeeper.recovery.completion import complete
print(json.dumps(complete(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 60.0).token_ids))
"""


class Compose(yaml.SafeLoader):
    """Reads a file of Compose's, whose tags say what it takes back."""


Compose.add_constructor("!reset", lambda *_: None)


def options() -> dict[str, Any]:
    """The container's config file, but for the model, its share of the GPU, and graphs, which take minutes."""
    values = yaml.safe_load((COMPOSE / f"engine{KIND}.yaml").read_text())
    del values["model"]
    values.pop("gpu-memory-utilization", None)
    return values | {"enforce-eager": True, "kv-cache-memory-bytes": CACHE_BYTES}


class Container:
    """What Docker would start for the service `engine`, with the keeper's config file and socket directory.

    Attributes:
        process: `unshare`.
        pid: of its child, which is process 1 in there, as seen from here.
    """

    def __init__(self, keeper: Keeper, directory: Path):
        programs = directory / "bin"
        programs.mkdir()
        program = programs / "weightkeeper"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m weightkeeper.cli "$@"\n')
        program.chmod(0o755)
        self._environment = os.environ | engines.QUIET | LOCAL | {
            "PATH": os.pathsep.join([str(programs), str(IMAGE), os.environ["PATH"]]),
            "PYTHONUNBUFFERED": "1",
            "WEIGHTKEEPER_ENGINE": ENGINE,
            "WEIGHTKEEPER_SOCKET_DIR": str(keeper.sockets),
            "WEIGHTKEEPER_TAKE_IPC_CACHE": "1",
        }  # fmt: skip
        self._sockets = str(keeper.sockets)
        self._log = directory / "log"
        places = {"/var/cache/weightkeeper": str(directory / "state"), f"/config/engine{KIND}.yaml": str(keeper.config)}
        services = yaml.load((COMPOSE / f"compose{KIND}.yaml").read_text(), Compose)["services"]
        command = [places.get(word, word) for word in services[ENGINE]["command"]]
        assert set(places.values()) <= set(command)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*IN_CONTAINER, str(IMAGE / "engine-entrypoint"), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
            )  # fmt: skip

        self.pid = wait_for(lambda: children(self.process.pid), "process 1 of the container")[0]

    def inside(self, *command: str, seconds: float = 60) -> str:
        """What a program in there prints, as by `docker exec`; a test fails where it does."""
        entered = ["nsenter", "--target", str(self.pid), *(f"--{name}" for name in ("pid", "ipc", "net", "uts"))]
        done = subprocess.run(
            [*entered, "--mount", *command],
            env=self._environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self.log()[-6000:]}"
        return done.stdout

    def ask(self, port: int, model: str) -> list[int]:
        """Tokens of one greedy completion."""
        return json.loads(self.inside(sys.executable, "-c", ASK, str(port), model, str(TOKENS)))

    def ready(self, generation: int) -> EngineStatus:
        """What the launcher says once this generation answers."""

        def reached() -> EngineStatus | None:
            assert self.process.poll() is None, self.log()[-6000:]
            try:
                status = client.status(self._sockets, ENGINE)
            except EngineLostError:
                return None
            assert status.state != "broken", self.log()[-6000:]
            return status if (status.state, status.generation) == ("ready", generation) else None

        return wait_for(reached, f"generation {generation}", START_SECONDS)

    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        """As `docker stop`; the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()  # its child, and all that is in there with it, ends too
        self.process.wait()


def namespaces(pid: int | str) -> dict[str, str]:
    return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in KINDS}


class Served:
    """What was seen of a container from its start to its end, with a load from disk beside it.

    Attributes:
        disk: tokens from disk.
        answers: tokens of its two generations.
        states: what the launcher said of them.
        seen: namespaces of keeper, launcher and this program.
        accepted: what `weightkeeper engine-reload` printed.
        before: the keeper's status while the second generation served; `after`, when the container was gone.
        code: its exit code.
        used: bytes in use on the GPU before all of it, and with the keeper alone.
    """

    def __init__(self, model: Path, directory: Path, pool: ThreadPoolExecutor):
        level = settled_bytes([GPU]) if GPU else 0
        values = options()
        place = values["port"], values["served-model-name"]
        keeper = Keeper(model, prefix=IN_CONTAINER, environment=LOCAL, **values)
        container = None
        try:
            keeper.until_answers()
            container = Container(keeper, directory)
            disk = pool.submit(from_disk, model, values["max-model-len"])
            self.states = [container.ready(1)]
            container.inside("engine-health")
            self.answers = [container.ask(*place)]
            self.seen = [namespaces(pid) for pid in (keeper.pid, container.pid, "self")]
            self.accepted = container.inside("weightkeeper", "engine-reload", seconds=120)
            self.states.append(container.ready(2))
            self.answers.append(container.ask(*place))
            self.before = keeper.status()
            self.disk = disk.result()
            self.code = container.end()
            self.log = container.log()
            self.after = keeper.until(lambda status: not status.leases)
            wait_for(lambda: not children(keeper.pid), "the loader's end")
            self.used = level, wait_until_free(level + self.after.held.nbytes) if GPU else used()
        finally:
            if container:
                container.close()
            keeper.close()


def from_disk(model: Path, length: int) -> list[int]:
    """Tokens of the same completion in an engine from disk."""
    request = {"prompts": [PROMPT], "max_tokens": TOKENS, "max_model_len": length, "repack": False}
    with start(model, plain=True, **request) as engine:
        answer = engine.answer()
        engine.end()
    return answer["tokens"][0]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    model = Models(tmp_path_factory.mktemp("models"), {"base": ["--gigabytes", GIGABYTES]})["base"]
    with ThreadPoolExecutor(1) as pool:
        yield Served(model, tmp_path_factory.mktemp("container"), pool)


def test_keeper_and_launcher_are_in_namespaces_of_their_own(served):
    """Each is process 1 in its own, neither shares one with the other or with this program."""
    assert (served.before.pid, served.states[0].launcher) == (1, 1)
    for kind in KINDS:
        assert len({each[kind] for each in served.seen}) == 3, kind


def test_it_answers_on_its_port_as_from_disk(served):
    """Asked inside, where the port is; on weights that it mapped."""
    assert served.answers[0] == served.disk
    assert len(served.disk) == TOKENS
    assert served.states[0].address == "0.0.0.0:8000"


def test_a_reload_from_inside_maps_again_and_answers_alike(served, tell):
    """By `weightkeeper engine-reload` as `docker exec` runs it; both generations are forked, and neither falls back."""
    assert "the configuration is accepted, the server is being replaced" in served.accepted
    assert served.answers[1] == served.answers[0]
    assert MAPPED_LINE.findall(served.log) == ["zero_copy", "zero_copy"]
    assert "fallback to disk" not in served.log
    for status in served.states:
        assert status.prefork, status.why_plain
    assert served.states[1].restarts == {"reload": 1}
    status = served.before
    assert (status.state, status.loads, status.fallbacks) == ("ready", 1, {})
    assert [lease.mode for lease in status.leases] == ["zero_copy"]
    first, second = served.states
    tell(f"first start {first.start_seconds:.1f} s, the second {second.start_seconds:.1f} s: {second.phases}")


def test_its_end_leaves_the_weights_and_nothing_else(served, tell):
    """`docker stop` sees exit code 0; the lease is over, the keeper holds, and no memory of the engine's is in use."""
    assert served.code == 0, served.log[-6000:]
    assert served.after.held == served.before.held
    level, now = served.used
    if GPU:
        tell(f"{(now - level) / 1e6:.1f} MB in use for {served.after.held.nbytes / 1e6:.1f} MB of weights")
        assert now <= level + served.after.held.nbytes + SLACK_BYTES
