"""An engine under measurement: started in a session of its own, its log kept with times, its end made sure of."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from weightkeeper import savings
from weightkeeper.errors import ServerStartError
from weightkeeper.launcher.processes import Process
from weightkeeper.recovery import processes

POLL_SECONDS = 0.01
STOP_SECONDS = 15.0
TAIL_LINES = 25

LONGER = "--limit SECONDS gives it longer"

MARKS = {
    "server imported": r"non-default args",
    "engine core imported": r"Initializing a V1 LLM engine",
    "device ready": r"Starting to load model|Loading model from scratch",
    "weights there": r"Model loading took|\bloading took .* seconds",
    "engine ready": r"init engine \(profile, create kv cache, warmup model\) took",
    "server starts": r"Starting vLLM server on",
}
"""Name of a phase → the line of vLLM's log that ends it. It began with the end of the one before."""

DETAILS = {
    "weights": r"Model loading took .* and ([\d.]+) seconds",
    "reading": r"Loading weights took ([\d.]+) seconds",
    "dynamo": r"Dynamo bytecode transform time: ([\d.]+) s",
    "compiled graphs": r"Directly load the compiled graph\(s\).* took ([\d.]+) s",
    "compilation": r"torch\.compile (?:and initial profiling/warmup run together )?took ([\d.]+) s",
    "warm-up": r"Initial profiling/warmup run took ([\d.]+) s",
    "graph capture": r"Graph capturing finished in ([\d.]+) secs",
    "init engine": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
    "map and bind (ms)": r"weightkeeper: \w+, mapped \d+ bytes and copied \d+ in ([\d.]+) ms",
}
"""Numbers that vLLM and our loader tell themselves; several lines of one name add up."""

PLAIN = {"WEIGHTKEEPER_TAKE_IPC_CACHE": "", savings.SWITCH: "none"}
"""Variables of vLLM's own engines and of its daemon: our plugin is installed beside them, and changes nothing then."""

FELL_BACK = re.compile(r"fall(?:ing)? ?back to disk", re.I)

ENGINE_CORE = re.compile(r"EngineCor")
"""In the name of a process, which the kernel cuts at 15 characters."""


class Engine:
    """A program that answers on a port.

    Attributes:
        started: in seconds of `time.monotonic`, as all times here.

    Args:
        command: its argument list.
        port: on which it will answer.
        log: file for everything that it prints.
        environment: variables besides our own.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: dict[str, str] | None = None):
        self.port = port
        self.log = log
        self._lines: list[tuple[float, str]] = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.log.open("w") as log, self.process.stdout as stream:
            for line in stream:
                at = time.monotonic()
                self._lines.append((at, line))
                log.write(f"{at - self.started:8.3f} {line}")
                log.flush()

    def wait_for_health(self, seconds: float) -> float:
        """When /health answered 200.

        Raises:
            ServerStartError: it ended, or did not within `seconds` from now.
        """
        deadline = time.monotonic() + seconds
        while not is_healthy(self.port):
            if self.process.poll() is not None:
                raise ServerStartError(f"the engine ended with exit code {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"/health does not answer after {seconds:.0f} s; {LONGER}:\n{self.tail()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def phases(self, since: float, healthy: float) -> dict[str, float]:
        """Name → seconds between `since` and `healthy`; they add up."""
        found = [(at, name) for name, at in marks(self.lines(since)).items() if at <= healthy] + [(healthy, "healthy")]
        starts = [since] + [at for at, _ in found]
        return {name: at - start for (at, name), start in zip(found, starts, strict=False)}

    def details(self, since: float) -> dict[str, float]:
        """What the log tells since then, by DETAILS."""
        return details(self.lines(since))

    def fell_back(self, since: float) -> bool:
        """Whether a loader said since then that it went to disk."""
        return any(FELL_BACK.search(line) for _, line in self.lines(since))

    def lines(self, since: float = 0.0) -> list[tuple[float, str]]:
        """Moment and text of each line of its log."""
        return [(at, line) for at, line in list(self._lines) if at >= since]

    def tail(self) -> str:
        return "".join(line for _, line in list(self._lines)[-TAIL_LINES:])

    def family(self) -> dict[int, Process]:
        return processes.family(self.process.pid)

    def engine_core(self) -> int:
        """pid of vLLM's engine core.

        Raises:
            ServerStartError: there is none.
        """
        for pid, each in self.family().items():
            if ENGINE_CORE.search(each.name):
                return pid
        names = ", ".join(map(str, self.family().values())) or "no process"
        raise ServerStartError(f"no engine core among {names}; does VLLM_ENABLE_V1_MULTIPROCESSING switch it off?")

    def kill(self) -> None:
        """SIGKILL to everything that it started; returns when all of it is gone."""
        processes.kill_family(self.process.pid)
        self.process.wait()
        self._reader.join(5)  # it ends with the last process that has the pipe

    def close(self) -> None:
        """Ask it to end, and make sure."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self.kill()


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def marks(lines: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Name of each phase → moment of its end; one that no line tells goes to the phase behind it."""
    found: dict[str, float] = {}
    last = 0.0
    for name, pattern in MARKS.items():
        seen = next((at for at, line in lines if re.search(pattern, line)), None)
        if seen is not None and seen >= last:
            found[name] = last = seen
    return found


def details(lines: Sequence[tuple[float, str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, pattern in DETAILS.items():
        matches = [match for _, line in lines if (match := re.search(pattern, line))]
        if matches:
            found[name] = round(sum(float(match[1]) for match in matches), 3)
    return found
