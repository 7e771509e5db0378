"""Compose projects with stand-in engines, a real keeper with a stand-in loader, and a supervisor, for docker tests."""

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 120.0
"""Seconds for anything that has to happen; on a quiet machine it takes one to five."""

HERE = Path(__file__).parent
IMAGE = f"weightkeeper-standin:{os.getpid()}"
SOCKET = "/var/run/docker.sock"

OURS: set[str] = set()
"""Names of this process's projects that may have containers: a restart of the Docker engine is ours to do to them."""

COMPOSE = """\
name: {name}
x-stand-in: &stand-in
  image: {image}
  init: true
  restart: unless-stopped
  stop_grace_period: 5s
  # instead of the one of the base, which asks for Docker
  healthcheck: {{disable: true}}
x-engine: &engine
  <<: *stand-in
  healthcheck:
    test: [CMD, bash, -c, ": </dev/tcp/127.0.0.1/8000"]
    interval: 0.5s
    timeout: 3s
    retries: 3
    start_period: 60s
  volumes: ["./config:/config:ro", "./model:/model:ro", "sockets:/run/weightkeeper"]
  labels:
    weightkeeper.supervise: "true"
    weightkeeper.weights: {policy}
services:
  engine:
    <<: *engine
    command: {command}
    environment:
      LEVEL: ${{LEVEL:-one}}
    env_file: engine.env
  sidecar:
    <<: *stand-in
    command: [weightkeeper, serve, --socket-dir, /run/weightkeeper, --config, /config/engine.yaml,
              --loader, python3 /standin/publishing_loader.py]
    environment:
      SIDE: one
    volumes: ["./config:/config:ro", "./model:/model:ro", "sockets:/run/weightkeeper"]
  unlabelled:
    <<: *stand-in
    command: [python3, /standin/standin.py, --config, /config/engine.yaml]
    volumes: ["./config:/config:ro"]
volumes:
  sockets:
"""

LAUNCHED = (
    "[weightkeeper, engine, --restart-delay, '0.05', --restart-delay-max, '0.1', --stop-grace, '3',"
    " --, --config, /config/engine.yaml]"
)
PLAIN = "[python3, /standin/standin.py, --config, /config/engine.yaml]"

ENGINE = "# an engine\nmodel: /model\nmax-model-len: 2048\n"


def run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def until(look: Callable[[], Any], what: Callable[[], str] | str, seconds: float = DEADLINE) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        text = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {text}"
        time.sleep(0.05)
    return found


def foreign() -> list[str]:
    """Names of the running containers that are not of this process's projects."""
    shown = run("docker", "ps", "--format", '{{.Label "com.docker.compose.project"}} {{.Names}}')
    return [name for project, _, name in (line.partition(" ") for line in shown.splitlines()) if project not in OURS]


def docker_engine(verb: str) -> None:
    """Start or stop the Docker engine of this machine, with every container."""
    run(HERE.parents[1] / "scripts" / "docker-engine", verb)


def build_image() -> None:
    """The stand-ins with this checkout's package, on the supervisor's image."""
    bases = [os.environ.get("STANDIN_BASE_IMAGE", ""), "weightkeeper-supervisor:local"]
    there = [base for base in bases if base and run("docker", "images", "--quiet", base)]
    assert there, f"none of the images {bases} is here; `make images` makes one"
    with tempfile.TemporaryDirectory() as context:
        for file in (
            HERE / "standin" / "standin.py",
            HERE.parent / "publishing_loader.py",
            HERE / "standin/Dockerfile",
        ):
            shutil.copy(file, context)
        package = os.environ.get("STANDIN_PACKAGE") or HERE.parents[1] / "sidecar" / "weightkeeper"
        shutil.copytree(package, Path(context, "weightkeeper"), ignore=shutil.ignore_patterns("__pycache__"))
        run("chmod", "-R", "a+rX", context)
        run("docker", "build", "--quiet", "--build-arg", f"BASE_IMAGE={there[0]}", "--tag", IMAGE, context)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    new = path.with_name(".new")
    new.write_text(text)
    new.replace(path)


class Stand:
    """One compose project with its supervisor.

    Attributes:
        directory: of the project, where its files are edited.
        seen: where supervisor and containers have it: the same, or a mount of it.
        engine_yaml: the file that the engine reads.
        compose_yaml: the project's own.
        log: the supervisor's standard error.
        action: what an edit of the engine's file asks for.
    """

    def __init__(
        self, directory: Path, command: str = LAUNCHED, policy: str = "refuse", seen: Path | None = None
    ) -> None:
        self.directory = directory
        self.seen = seen or directory
        self.name = f"wkstand-{uuid.uuid4().hex[:8]}"
        OURS.add(self.name)
        self.engine_yaml = directory / "config" / "engine.yaml"
        self.compose_yaml = directory / "compose.yaml"
        self.action = "restart" if command == PLAIN else "reload"
        self.state = directory.parent / "state"
        for sub in ("config", "model"):
            (directory / sub).mkdir(parents=True)
        self.engine_yaml.write_text(ENGINE)
        self.compose_yaml.write_text(COMPOSE.format(name=self.name, image=IMAGE, command=command, policy=policy))
        (directory / "engine.env").write_text("A=1\nB=2\n")
        self.log = directory.parent / "supervisor.log"
        self.supervisor: subprocess.Popen[bytes] | None = None
        self._log_begins = self._history_begins = 0
        self._texts: dict[Path, bytes] = {}
        self._marks = itertools.count(1)
        self.keep()

    def keep(self) -> None:
        """Take the files as they are now for what `reset` goes back to."""
        self._texts = {file: file.read_bytes() for file in self._files()}

    def _files(self) -> list[Path]:
        """Everything of the project that a test may change."""
        return [file for file in self.directory.rglob("*") if file.is_file() or file.is_symlink()]

    def reset(self) -> None:
        """Every file as it was at first, and the supervisor done with that; what it said and did until now is over."""
        for file in self._files():
            if file not in self._texts:
                file.unlink()
        for file, text in self._texts.items():
            if file.is_symlink() or not file.exists():
                file.unlink(missing_ok=True)
            file.chmod(0o644) if file.exists() else None
            file.write_bytes(text)
        while not self.mark()[-1].startswith("nothing to do"):
            pass
        self._log_begins = self.log.stat().st_size
        self._history_begins = len(self.records())

    def mark(self) -> list[str]:
        """Change a comment, and wait until the supervisor has answered; everything that it said until then."""
        before = self.messages()
        with self.engine_yaml.open("a") as file:
            file.write(f"# mark {next(self._marks)}\n")
        until(
            lambda: (
                len(self.messages()) > len(before)
                and not self.messages()[-1].startswith(("reload", "restart", "recreate", "load", "roll back"))
            ),
            lambda: f"an answer to a mark after\n{self.log.read_text()}",
        )
        return self.messages()

    def up(self, **environment: str) -> None:
        command = ["docker", "compose", "--project-directory", self.seen, "up", "--detach"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == 0, done.stderr
        until(lambda: self.inspect()["State"]["Health"]["Status"] == "healthy", "the engine is healthy")

    def down(self) -> None:
        run("docker", "compose", "--project-name", self.name, "down", "--volumes", "--timeout", "1")
        OURS.discard(self.name)

    def supervise(self, *options: str, **environment: str) -> None:
        self.begin(*options, **environment)
        self.expect(f"supervising {self.name} in {self.seen}: engine ({self.seen / 'config/engine.yaml'})")

    def begin(self, *options: str, **environment: str) -> None:
        """As `supervise`, without waiting for it to be at work; what one before said is over."""
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-m", "weightkeeper.cli", "supervise", *self._options(), *options],
                stderr=log,
                env=os.environ | environment,
            )

    def end(self) -> int:
        """End the supervisor as `docker stop` does; its exit code."""
        self.supervisor.send_signal(signal.SIGTERM)
        return self.supervisor.wait(timeout=DEADLINE)

    def close(self) -> None:
        if self.supervisor and self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()

    def weightkeeper(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = self._options()[2:] if verb == "history" else self._options()
        command = [sys.executable, "-m", "weightkeeper.cli", verb, *arguments, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)

    def done(self) -> list[tuple[str, str]]:
        """Action and result of each record since `reset`."""
        return [(one["action"], one["result"]) for one in self.history()]

    def _options(self) -> list[str]:
        return ["--project-directory", str(self.seen), "--state-dir", str(self.state)]

    def messages(self) -> list[str]:
        """What the supervisor logged after it had begun last, or since `reset`, with all seconds as `S`."""
        text = self.log.read_bytes()[self._log_begins :].decode()
        begun = (text.rpartition("supervising ")[2] if "supervising " in text else f"\n{text}").splitlines()[1:]
        return [re.sub(r"\b\d+\.\d s\b", "S", line.split(": ", 1)[1]) for line in begun]

    def expect(self, text: str) -> None:
        """Wait for a line of the log that begins like this."""

        def look() -> bool:
            assert self.supervisor.poll() is None, self.log.read_text()
            lines = self.log.read_bytes()[self._log_begins :].decode().splitlines()
            return any(line.split(": ", 1)[-1].startswith(text) for line in lines)

        until(look, lambda: f"{text!r} in\n{self.log.read_text()}")

    def only(self, *messages: str) -> None:
        """Nothing but these lines was logged, and nothing more comes: a last edit without effect is answered next."""
        until(lambda: len(self.messages()) >= len(messages), lambda: f"{messages} in\n{self.log.read_text()}")
        with self.engine_yaml.open("a") as file:
            file.write("# mark\n")
        self.expect("nothing to do: engine.yaml changed, no value did")
        assert self.messages() == [*messages, "nothing to do: engine.yaml changed, no value did"]

    def inspect(self, service: str = "engine") -> dict[str, Any]:
        return json.loads(run("docker", "inspect", f"{self.name}-{service}-1"))[0]

    def start_of(self, service: str = "engine") -> tuple[str, str]:
        """Container id and start time."""
        description = self.inspect(service)
        return description["Id"], description["State"]["StartedAt"]

    def history(self) -> list[dict[str, Any]]:
        """The records since `reset`."""
        return self.records()[self._history_begins :]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.weightkeeper("history", "--json", "-n", "100000").stdout.splitlines()]

    def engine(self, service: str = "engine") -> dict[str, Any]:
        """The launcher's status."""
        return json.loads(run("docker", "exec", f"{self.name}-{service}-1", "weightkeeper", "engine-status", "--json"))

    def keeper(self) -> dict[str, Any]:
        """The keeper's status."""
        return json.loads(run("docker", "exec", f"{self.name}-sidecar-1", "weightkeeper", "status", "--json"))

    def options(self, service: str = "engine") -> dict[str, Any]:
        """What the running engine has read, and its `pid` in the container, asked at the container's own address."""
        [network] = self.inspect(service)["NetworkSettings"]["Networks"].values()
        with urllib.request.urlopen(f"http://{network['IPAddress']}:8000/health", timeout=DEADLINE) as answer:
            return ast.literal_eval(answer.read().decode())
