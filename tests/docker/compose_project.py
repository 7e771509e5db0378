"""A compose project of the tests' own: a copy of compose/ under its own name and port, driven by the real scripts."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"
MAPPED = re.compile(r"weightkeeper: zero_copy, mapped (\d+) bytes")
FALLBACK = re.compile(r"weightkeeper: fallback to disk, code=(\w+): (.*)")
START_SECONDS = 240.0
"""For an engine start on two busy cores; a quiet one takes 25 s."""


def docker(*arguments: str, check: bool = True) -> str:
    """Standard output of a docker command."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def inspect(container: str) -> dict[str, Any]:
    return json.loads(docker("inspect", container))[0]


def until(what: str, look: Callable[[], Any], seconds: float = START_SECONDS) -> Any:
    """The first true value of `look()`; a test fails with `what` where none comes in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Project:
    """One project directory with its containers.

    Attributes:
        directory: the copy of compose/.
        model: the checkpoint that it serves, a copy too.
    """

    def __init__(self, directory: Path, model: Path, name: str):
        shutil.copytree(ROOT / "compose", directory, ignore=shutil.ignore_patterns(".env"))
        directory.chmod(0o755)
        self.directory = directory
        self.model = model
        self.name = name
        self.port = free_port()
        self.environment = {
            "MODEL": str(model),
            "PORT": str(self.port),
            "COMPOSE_PROJECT_NAME": name,
            "COMPOSE_FILE": "compose.yaml",
        }

    @property
    def engine_yaml(self) -> Path:
        return self.directory / "engine.yaml"

    def script(self, verb: str, *arguments: str) -> str:
        """What scripts/VERB prints; it has to succeed."""
        done = subprocess.run(
            [str(ROOT / "scripts" / verb), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env=os.environ | self.environment | {"WEIGHTKEEPER_COMPOSE_DIR": str(self.directory)}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"scripts/{verb}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Plain `docker compose`, as a user calls it in the directory, with nothing but its .env."""
        done = subprocess.run(
            ["docker", "compose", *arguments], cwd=self.directory, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"docker compose {' '.join(arguments)}:\n{done.stderr}"
        return done.stdout

    def container(self, service: str) -> dict[str, Any]:
        """What Docker says of the service's container."""
        return inspect(f"{self.name}-{service}-1")

    def identity(self, service: str) -> tuple[str, str]:
        """Changes when the container is replaced or restarted."""
        described = self.container(service)
        return described["Id"], described["State"]["StartedAt"]

    def health(self, service: str) -> str:
        described = self.container(service)["State"]
        return described["Health"]["Status"] if described["Running"] else described["Status"]

    def launcher(self) -> dict[str, Any]:
        """The launcher's status; it has to answer."""
        return json.loads(self.compose("exec", "-T", "engine", "weightkeeper", "engine-status", "--json"))

    def server(self) -> tuple[str, str, int]:
        """Changes when the engine's container is replaced or restarted, and when the launcher replaces its server."""
        return *self.identity("engine"), self.launcher()["generation"]

    def engine_log(self) -> str:
        """What the launcher's present server has said, and the launcher since it started it."""
        log = self.log("engine")
        begin = f"generation {self.launcher()['generation']}: pid "
        assert log.count(begin) == 1, log
        return log[log.index(begin) :]

    def log(self, service: str) -> str:
        """What the service has said since its container was last started."""
        described = self.container(service)
        done = subprocess.run(
            ["docker", "logs", "--since", described["State"]["StartedAt"], described["Id"]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def status(self) -> dict[str, Any]:
        """The keeper's status."""
        return json.loads(self.compose("exec", "-T", "sidecar", "weightkeeper", "status", "--json"))

    def keeper_state(self) -> str:
        """As `status`, in a word; `unreachable` where nobody answers."""
        with contextlib.suppress(AssertionError, ValueError):
            return self.status()["state"]
        return "unreachable"

    def history(self) -> list[dict[str, Any]]:
        """What the supervisor wrote down, oldest first."""
        shown = self.compose("exec", "-T", "supervisor", "weightkeeper", "history", "--json")
        return (
            json.loads(shown) if shown.lstrip().startswith("[") else [json.loads(line) for line in shown.splitlines()]
        )

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def answer(self, question: str = QUESTION) -> str:
        """A greedy chat answer over the published port."""
        body = {
            "model": "local",
            "temperature": 0,
            "max_tokens": 16,
            "messages": [{"role": "user", "content": question}],
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["message"]["content"].strip()

    def is_new(self, before: tuple[str, str, int]) -> bool:
        """Whether another server than `before` answers."""
        with contextlib.suppress(AssertionError, ValueError):
            return self.server() != before and self.launcher()["state"] == "ready"
        return False

    def wait_for_new_engine(self, before: tuple[str, str, int]) -> None:
        """Until a server that was started after `before` answers."""
        until("the engine has another server, which answers", lambda: self.is_new(before))

    def mapped_bytes(self) -> int:
        """How many bytes the running engine said that it maps; its start has to have mapped them."""
        log = self.engine_log()
        said = MAPPED.findall(log)
        assert len(said) == 1, f"the engine's log has {len(said)} lines about mapping:\n{log}"
        assert not FALLBACK.search(log)
        return int(said[0])

    def signal(self, service: str, program: str, number: int) -> None:
        """Send a signal to the process of a service whose command line holds `program`, from the host."""
        pids = docker("top", f"{self.name}-{service}-1", "-eo", "pid,args").splitlines()[1:]
        chosen = [int(line.split()[0]) for line in pids if program in line and "docker-init" not in line]
        assert len(chosen) == 1, f"{program} in {service}: {pids}"
        os.kill(chosen[0], number)

    def kill_in_engine(self, name: str) -> None:
        """SIGKILL to the server, or to the process below it whose name, of 15 letters, holds `name`."""
        status = self.launcher()
        others = [pid for pid, title in status["processes"].items() if name in title and int(pid) != status["pid"]]
        (pid,) = [status["pid"]] if name == "server" else others
        docker("exec", f"{self.name}-engine-1", "sh", "-c", f"kill -9 {pid}")


def swap_cities(model: Path) -> None:
    """A fine-tune in place: same names, shapes and headers, other bytes; Paris and London change places.

    Swaps the two words' rows of the embedding, which is the head too. A second call restores the file.
    """
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    index = json.loads((model / "model.safetensors.index.json").read_text())
    name = "model.embed_tokens.weight"
    with (model / index["weight_map"][name]).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(length))[name]
        row = info["shape"][1] * 2  # bfloat16
        first, second = (
            8 + length + info["data_offsets"][0] + vocabulary[word] * row for word in ("ĠParis", "ĠLondon")
        )
        rows = []
        for offset in (first, second):
            file.seek(offset)
            rows.append(file.read(row))
        for offset, content in zip((second, first), rows, strict=True):
            file.seek(offset)
            file.write(content)


@contextlib.contextmanager
def stopped_at_end(project: Project) -> Iterator[Project]:
    """The project, and nothing of it left on the machine afterwards."""
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
