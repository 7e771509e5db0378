"""The bench of a compose project: its engine is lost and comes back in its own container."""

import contextlib
import json
import os
import posixpath
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from weightkeeper import engine_config, savings
from weightkeeper.errors import ConfigError, ServerStartError
from weightkeeper.launcher.messages import EngineStatus
from weightkeeper.launcher.processes import table, with_descendants
from weightkeeper.protocol import Status
from weightkeeper.recovery import engine, gpu, processes
from weightkeeper.recovery.bench import Bench, Settings
from weightkeeper.recovery.launched import shortened
from weightkeeper.recovery.project import ENGINE, SIDECAR, SUPERVISOR, UP_SECONDS, Project

LOOK_SECONDS = 0.05
PORT_INSIDE = "8000"
MAX_WORDS_BYTES = 65536


class ComposedEngine:
    """What `engine.Engine` is for a process, for the engine's container.

    Attributes:
        is_launched: it runs behind our launcher, which tells its state.
    """

    def __init__(self, project: Project, port: int, is_launched: bool):
        self.started = time.monotonic()
        self.is_launched = is_launched
        self._project = project
        self._port = port

    def status(self) -> EngineStatus:
        """Of the launcher; as `Project`, where it does not answer."""
        text = self._project.inside(ENGINE, "weightkeeper", "engine-status", "--json")
        return msgspec.json.decode(text, type=EngineStatus)

    def wait_for_health(self, seconds: float) -> float:
        """When the newest server answered 200, as the launcher saw it where there is one.

        Raises:
            ServerStartError: none did within `seconds` from now.
        """
        deadline = time.monotonic() + seconds
        while True:
            if engine.is_healthy(self._port):
                healthy = time.monotonic()
                if not self.is_launched:
                    return healthy
                with contextlib.suppress(ServerStartError):
                    status = self.status()
                    if status.state == "ready":
                        return min(healthy, monotonic(status.since)) if status.since else healthy
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"/health of the engine's container does not answer after {seconds:.0f} s; {engine.LONGER}"
                )
            time.sleep(LOOK_SECONDS)

    def replaced(self, generation: int, seconds: float) -> float:
        """When the server of that generation was gone, once another one is under way."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(ServerStartError):
                status = self.status()
                if status.generation > generation and status.last_exit is not None:
                    return monotonic(status.last_exit.at)
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"the launcher has not replaced its server within {seconds:.0f} s; {engine.LONGER}"
                )
            time.sleep(LOOK_SECONDS)

    def phases(self, since: float, healthy: float) -> dict[str, float]:
        """As `engine.Engine.phases`."""
        if self.is_launched:
            told = {name: seconds for name, seconds in self.status().phases.items() if name != "stop"}
            rest = healthy - since - sum(told.values())
            return {"container and launcher": max(0.0, rest)} | shortened(told, max(0.0, -rest))
        marks = engine.marks(self._project.lines(ENGINE, since))
        found = [(at, name) for name, at in marks.items() if since <= at <= healthy] + [(healthy, "healthy")]
        starts = [since] + [at for at, _ in found]
        return {name: at - start for (at, name), start in zip(found, starts, strict=False)}

    def details(self, since: float) -> dict[str, float]:
        return engine.details(self._project.lines(ENGINE, since))

    def fell_back(self, since: float) -> bool:
        return any(engine.FELL_BACK.search(line) for _, line in self._project.lines(ENGINE, since))


class ComposedBench(Bench):
    """The containers of a project that is up.

    Attributes:
        config_file: vLLM's config file, on the host.
        restart_docker: command that restarts the Docker engine; empty where that is not wanted.
    """

    def __init__(self, settings: Settings, project: Project, config_file: Path, restart_docker: str):
        super().__init__(settings)
        try:
            self.project = project
            self.config_file = config_file
            self.restart_docker = restart_docker
            self._config_before = config_file.read_bytes()
            self._is_changed = False
            self._pid = self._held = 0
            self.port = int(project.compose("port", ENGINE, PORT_INSIDE).strip().rpartition(":")[2])
            self.url = f"http://127.0.0.1:{self.port}/v1"
            self.engine = ComposedEngine(project, self.port, is_launched="--" in command_of(project))
            self.model_name = self._served_name()
            self._supervised = project.is_running(SUPERVISOR)
            self.keeper_bytes()
        except BaseException:
            super().close()
            raise

    @property
    def savings(self) -> str:
        """As the engine's container has it; `default` where it has none."""
        return variables_of(self.project).get(savings.SWITCH) or savings.DEFAULT

    def end_engine(self) -> None:
        """It is the user's, and stays."""

    def keeper_bytes(self) -> int:
        with contextlib.suppress(ServerStartError):
            status = msgspec.json.decode(self.project.inside(SIDECAR, "weightkeeper", "status", "--json"), type=Status)
            self._held = status.held.nbytes if status.held else 0
        return self._held

    def used_bytes(self) -> int:
        if self.gpus:
            return gpu.used_bytes(self.gpus)
        seen = table()
        if self._pid not in seen:
            with contextlib.suppress(ServerStartError):
                self._pid = self.project.pid(ENGINE)
        own = sum(processes.own_bytes(each.pid) for each in with_descendants([self._pid], seen))
        return own + self._held

    def kill_engine(self) -> float:
        """Put the engine's container back to what the project says, and wait for it."""
        self.recreate(None)
        return time.monotonic()

    def recreate(self, command: list[str] | None) -> float:
        """Replace the engine's container, with vLLM's own engine where a command is given.

        Returns:
            When the old one did not answer any more.
        """
        self._is_changed = command is not None
        launched = "--" in (command if command is not None else command_of(self.project))
        self.engine = ComposedEngine(self.project, self.port, launched)
        variables = {} if command is None else engine.PLAIN
        going = self.project.begin_to_recreate(ENGINE, command, variables, self.settings.out / "project.json")
        return self.until_gone(going, "docker compose up")

    def until_gone(self, going: Any, what: str) -> float:
        """Wait for a program that ends the engine; when /health failed first."""
        gone = None
        try:
            deadline = time.monotonic() + UP_SECONDS
            while gone is None or going.poll() is None:
                if gone is None and not engine.is_healthy(self.port):
                    gone = time.monotonic()
                if going.poll() is not None and gone is None:
                    gone = time.monotonic()  # it was not there before either
                if time.monotonic() > deadline:
                    raise ServerStartError(f"{what} did not end within {UP_SECONDS:.0f} s")
                time.sleep(0.01)
        finally:
            going.kill()
            going.wait()
            words = _words(going)
        if going.returncode:
            raise ServerStartError(f"{what} ended with exit code {going.returncode}: {words.strip()[-1000:]}")
        return gone

    def ensure(self, is_supervised: bool = True) -> None:
        """The containers as the project has them, with or without the supervisor, and the engine healthy."""
        if self._supervised and is_supervised != self.project.is_running(SUPERVISOR):
            self.project.compose("start" if is_supervised else "stop", SUPERVISOR)
        if self._is_changed:
            self.recreate(None)
        self.wait_for_health()

    def edit(self, change: Callable[[bytes], bytes]) -> None:
        """Save vLLM's config file with other content, by rename, as editors do."""
        new = self.config_file.with_name(f".{self.config_file.name}.recovery")
        new.write_bytes(change(self._config_before))
        new.chmod(self.config_file.stat().st_mode)
        new.replace(self.config_file)

    def close(self) -> None:
        """The project is left as it was found."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            stack.callback(self.ensure)
            if self.config_file.read_bytes() != self._config_before:
                stack.callback(self.edit, lambda before: before)

    def _served_name(self) -> str:
        self.wait_for_health()
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=30) as answer:  # noqa: S310  our own server
                return json.load(answer)["data"][0]["id"]
        except (OSError, ValueError, LookupError) as error:
            raise ServerStartError(f"{self.url}/models does not name a model: {error}") from error


def open_bench(directory: Path, settings: Settings, restart_docker: str) -> ComposedBench:
    """The bench of the project in a directory, with the model and the options of its engine.

    Raises:
        ConfigError: it has no engine that reads a config file from a mounted directory.
        ServerStartError: Docker refuses, or the project is not up.
    """
    project = Project(directory)
    mounts = project.resolved.get("services", {}).get(ENGINE, {}).get("volumes", [])
    arguments = command_of(project)
    if "--config" not in arguments:
        raise ConfigError(f"{directory}: the command of the service {ENGINE} has no --config with vLLM's config file")
    config = on_host(arguments[arguments.index("--config") + 1], mounts, directory)
    values = engine_config.read(config)
    model = on_host(engine_config.required(values, "model", str(config)), mounts, directory)
    if not os.access(config, os.W_OK) or not project.is_running(ENGINE):
        raise ConfigError(f"{directory}: the project has to be up, and {config} writable; see `make up`")
    options = {name: value for name, value in values.items() if name not in ("model", "host", "port")}
    settings = replace(settings, model=model, options=options, place="compose")
    return ComposedBench(settings, project, config, restart_docker)


def command_of(project: Project) -> list[str]:
    """Of the engine's service."""
    return [str(word) for word in project.resolved.get("services", {}).get(ENGINE, {}).get("command") or ()]


def variables_of(project: Project) -> dict[str, str]:
    """That the project gives to the engine's service."""
    return project.resolved.get("services", {}).get(ENGINE, {}).get("environment") or {}


def on_host(path: str, mounts: list[dict[str, Any]], directory: Path) -> Path:
    """Where a path of the engine's container lies outside of it."""
    for mount in sorted(mounts, key=lambda mount: -len(mount.get("target", ""))):
        target = mount.get("target", "")
        if mount.get("type") == "bind" and (path == target or path.startswith(target.rstrip("/") + "/")):
            return Path(posixpath.normpath(posixpath.join(mount["source"], posixpath.relpath(path, target))))
    raise ConfigError(f"{directory}: {path} is not mounted from the host into the service {ENGINE}")


def monotonic(epoch: float) -> float:
    """A moment in seconds since the epoch, in seconds of `time.monotonic`."""
    return epoch - time.time() + time.monotonic()


def _words(going: Any) -> str:
    """What is there of a program's stderr. Its end is not waited for: a daemon that it started may have the pipe."""
    with going.stderr:
        os.set_blocking(going.stderr.fileno(), False)
        try:
            return os.read(going.stderr.fileno(), MAX_WORDS_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""
