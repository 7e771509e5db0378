"""One start of a vLLM server in a session of its own: its log with times, its first answer, its end."""

# ruff: noqa: S310  the only address asked is that of our own server
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from weightkeeper.recovery.engine import DETAILS, FELL_BACK, MARKS

PROMPT = "The capital of France is"
TOKENS = 32
POLL_SECONDS = 0.01
END_SECONDS = 60.0


class StartError(Exception):
    """The server ended or did not answer in time; the message has the end of its log."""


class ServerRun:
    """A server that has just been started.

    Args:
        config: vLLM's config file.
        log: file for everything that it prints.
        environment: variables besides our own.
        command: another one than `vllm serve`, which listens on `port`.
    """

    def __init__(
        self,
        config: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        command: list[str] | None = None,
        port: int | None = None,
    ):
        self.port = port or free_port()
        self.log = log
        self.lines: list[tuple[float, str]] = []
        if command is None:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--config", str(config)]
            command += ["--host", "127.0.0.1", "--port", str(self.port)]
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
                at = time.monotonic() - self.started
                self.lines.append((at, line))
                log.write(f"{at:8.3f} {line}")
                log.flush()

    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started

    def wait_for_health(self, limit: float) -> float:
        """Seconds from the start to the first 200 from /health.

        Raises:
            StartError: it ended, or the limit is over.
        """
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url("health"), timeout=5) as answer:
                if answer.status == 200:
                    return self.seconds()
            if self.process.poll() is not None:
                raise StartError(f"the server ended with exit code {self.process.returncode}:\n{self.tail()}")
            if self.seconds() > limit:
                raise StartError(f"/health does not answer after {limit:.0f} s:\n{self.tail()}")
            time.sleep(POLL_SECONDS)

    def complete(self, limit: float) -> list[int]:
        """Token ids of a greedy completion.

        Raises:
            StartError: the server refused, or did not answer in time.
        """
        body = {
            "model": "local", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            self._url("v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, limit - self.seconds())) as answer:
                return json.load(answer)["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            words = error.read(2000).decode(errors="replace")
            raise StartError(f"the completion was refused with {error.code}: {words}\n{self.tail()}") from error
        except OSError as error:
            raise StartError(f"no completion: {error}\n{self.tail()}") from error

    def phases(self, health: float, answered: float) -> dict[str, float]:
        """Seconds between the marks, in order; they add up to `answered`. A mark that was not seen has no phase."""
        found: list[tuple[str, float]] = []
        for name, pattern in MARKS.items():
            seen = next((at for at, line in self.lines if re.search(pattern, line)), None)
            if seen is not None and seen >= (found[-1][1] if found else 0.0):
                found.append((name, seen))
        found += [("healthy", health), ("answered", answered)]
        starts = [0.0] + [at for _, at in found]
        return {name: round(at - start, 3) for (name, at), start in zip(found, starts, strict=False)}

    def details(self) -> dict[str, float]:
        """What the log says of itself, by DETAILS."""
        found: dict[str, float] = {}
        for name, pattern in DETAILS.items():
            matches = [match for _, line in self.lines if (match := re.search(pattern, line))]
            if matches:
                found[name] = round(sum(float(match[1]) for match in matches), 3)
        return found

    def fell_back(self) -> bool:
        """Whether a loader said that it went to disk."""
        return any(FELL_BACK.search(line) for _, line in self.lines)

    def tail(self, count: int = 25) -> str:
        return "".join(line for _, line in self.lines[-count:])

    def kill(self) -> float:
        """SIGKILL to everything it started; seconds until the last of it is gone."""
        seconds = kill_session(self.process.pid)
        self.process.wait()
        self._reader.join(5)  # it ends with the last process that has the pipe
        return seconds

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def kill_session(leader: int) -> float:
    """SIGKILL to the session that `leader` began and to all that its processes started; seconds until they are gone.

    Raises:
        StartError: some of them do not end.
    """
    begun = time.monotonic()
    known: set[int] = set()
    while True:
        table = processes()
        known |= family(leader, table)
        if not (living := known & table.keys()):
            return time.monotonic() - begun
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() - begun > END_SECONDS:
            raise StartError(f"processes {sorted(living)} do not end on SIGKILL")
        time.sleep(0.005)


def family(leader: int, table: dict[int, tuple[int, int]] | None = None) -> set[int]:
    """Live processes of the session that `leader` began, and what they started in sessions of their own."""
    table = processes() if table is None else table
    found = {pid for pid, (_, session) in table.items() if session == leader}
    new = found
    while new := {pid for pid, (parent, _) in table.items() if parent in new} - found:
        found |= new
    return found


def processes() -> dict[int, tuple[int, int]]:
    """Every live process → its parent and its session. Zombies are not counted."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            # proc_pid_stat(5): after the command, which may contain blanks: state, parent, group, session
            state, parent, _, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(name)] = int(parent), int(session)
    return found
