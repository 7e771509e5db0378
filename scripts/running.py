"""The running project as seen from the host: its containers, its keeper's answers, its server over HTTP."""

# ruff: noqa: S310  the only address asked is that of our own server
import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

COMPOSE_DIR = Path(os.environ.get("WEIGHTKEEPER_COMPOSE_DIR") or Path(__file__).resolve().parent.parent / "compose")
SETTINGS = (
    "MODEL", "MODEL_BLOBS", "PORT", "GPU", "BASE_IMAGE", "COMPOSE_PROJECT_NAME", "COMPOSE_FILE", "WEIGHTKEEPER_UID",
    "WEIGHTKEEPER_GID", "DOCKER_SOCKET", "DOCKER_GID", "PROJECT_DIR",
)  # fmt: skip
"""Read from compose/.env alone, where the supervisor reads them too."""

COMMAND_SECONDS = 60.0

START_SUPERVISOR = "start it with `make up`, or with `docker compose up -d supervisor` in compose/"


class NotRunningError(Exception):
    """A container or the server in it cannot be reached; the message says which."""


def run(main: Callable[[], None]) -> None:
    """A script as a program: what is not running in one line, and no traceback for Ctrl-C or a reader that has gone."""
    try:
        main()
        sys.stdout.flush()
    except NotRunningError as error:
        sys.exit(f"weightkeeper: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
        sys.exit(1)


def setting(name: str, default: str = "") -> str:
    """A value of compose/.env."""
    file = COMPOSE_DIR / ".env"
    found = re.findall(rf"^{name}='?([^'\n]*)'?$", file.read_text(), re.M) if file.exists() else []
    return found[-1] if found else default


def compose(*arguments: str, timeout: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    """`docker compose ARGUMENTS` on the project, with its output as text. Raises as `docker`."""
    return docker("compose", *arguments, timeout=timeout)


def docker(*arguments: str, timeout: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    """`docker ARGUMENTS` in the project's directory.

    Raises:
        NotRunningError: there is no such program or directory, or it did not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    try:
        return subprocess.run(
            ["docker", *arguments], cwd=COMPOSE_DIR, env=environment, timeout=timeout,
            capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotRunningError(f"`docker {' '.join(arguments)}` did not end in {timeout:g} s") from error
    except OSError as error:
        raise NotRunningError(
            f"docker cannot be run in {COMPOSE_DIR}: {error.strerror} ({error.filename}); "
            "install Docker with its compose plugin, and run this from the project's checkout"
        ) from error


def ask(service: str, *command: str, timeout: float = COMMAND_SECONDS) -> dict | list:
    """The JSON that a command prints inside a service's container.

    Raises:
        NotRunningError: the container does not run, or the command failed; the message has its words. So it has
            where an answer is no JSON.
    """
    done = compose("exec", "-T", service, *command, timeout=timeout)
    if done.returncode:
        raise NotRunningError(f"{service}: {(done.stderr or done.stdout).strip() or 'no answer'}")
    return decoded(done.stdout, f"{service}: `{' '.join(command)}`")


def decoded(text: str, source: str) -> dict | list:
    """JSON that `source` printed.

    Raises:
        NotRunningError: it is none.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise NotRunningError(f"{source} printed no JSON ({error}): {text[:200].strip() or 'nothing'}") from error


def keeper() -> dict:
    """The keeper's status, as `weightkeeper status --json` prints it."""
    return ask("sidecar", "weightkeeper", "status", "--json")


def launcher() -> dict:
    """What the engine's launcher says of its server; an empty mapping where none answers."""
    try:
        return ask("engine", "weightkeeper", "engine-status", "--json")
    except NotRunningError:
        return {}


def plan() -> list[dict]:
    """What differs between the project's files and what is applied, as `weightkeeper plan --json` prints it.

    Raises:
        NotRunningError: the supervisor does not run, or cannot say.
    """
    return list(ask("supervisor", "weightkeeper", "plan", "--json"))


def history(count: int) -> list[dict]:
    """The newest records of the supervisor's history, the latest one last.

    Raises:
        NotRunningError: the supervisor does not run.
    """
    done = compose("exec", "-T", "supervisor", "weightkeeper", "history", "--json", "-n", str(count))
    if done.returncode:
        raise NotRunningError(f"supervisor: {(done.stderr or done.stdout).strip() or 'no answer'}")
    return [dict(decoded(line, "supervisor: `weightkeeper history`")) for line in done.stdout.strip().splitlines()]


def supervised(project: str) -> list[str]:
    """Services of a project whose containers carry the supervisor's label."""
    labels = [f"label=com.docker.compose.project={project}", "label=weightkeeper.supervise=true"]
    options = [part for label in labels for part in ("--filter", label)]
    listed = docker("ps", "--all", *options, "--format", '{{.Label "com.docker.compose.service"}}')
    return sorted(set(listed.stdout.split()))


def container(service: str) -> dict:
    """What `docker inspect` says of the service's container; an empty mapping where there is none.

    Raises:
        NotRunningError: Docker does not answer.
    """
    listed = compose("ps", "-aq", service)
    if listed.returncode:
        raise NotRunningError(f"{service}: {(listed.stderr or listed.stdout).strip() or 'docker compose failed'}")
    found = listed.stdout.split()
    if not found:
        return {}
    inspected = docker("inspect", found[0]).stdout
    return next(iter(decoded(inspected or "[]", "`docker inspect`")), {})


def state(described: dict) -> str:
    """In a word: absent, created, running, restarting, exited; running is told as its health where it has one."""
    if not described:
        return "absent"
    status = described["State"]["Status"]
    return described["State"].get("Health", {}).get("Status", status) if status == "running" else status


def server() -> str:
    """Address of the server, from the host."""
    return f"http://127.0.0.1:{setting('PORT', '8000')}"


def is_up() -> bool:
    """Whether the server answers /health with 200."""
    try:
        with urllib.request.urlopen(f"{server()}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def chat(question: str, max_tokens: int = 64) -> str:
    """A greedy answer of the served model.

    Raises:
        NotRunningError: the server refused, cannot be reached, or is no vLLM.
    """
    try:
        with urllib.request.urlopen(f"{server()}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        message = {"role": "user", "content": question}
        body = {"model": model, "temperature": 0, "max_tokens": max_tokens, "messages": [message]}
        request = urllib.request.Request(
            f"{server()}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["message"]["content"].strip()
    except urllib.error.HTTPError as error:
        raise NotRunningError(
            f"{error.url} answers {error.code}: {error.read(2000).decode(errors='replace')}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise NotRunningError(f"{server()} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotRunningError(f"{server()} does not answer as vLLM does; does another program use PORT?") from error


def wait_until_up(seconds: float) -> None:
    """Wait for /health.

    Raises:
        NotRunningError: not within that time.
    """
    deadline = time.monotonic() + seconds
    while not is_up():
        if time.monotonic() > deadline:
            raise NotRunningError(f"{server()}/health did not answer within {seconds:.0f} s")
        time.sleep(0.05)


def since(moment: str) -> float:
    """Seconds from a time in ISO 8601 and UTC, as Docker and the history write it, until now; never below 0."""
    whole = re.sub(r"(\.\d{1,6})\d*|Z$", r"\1", moment.removesuffix("Z"))
    return max(0.0, (datetime.now(timezone.utc) - datetime.fromisoformat(f"{whole}+00:00")).total_seconds())


def duration(seconds: float) -> str:
    """In the largest unit that fits: 12 s, 3 min, 5 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def gigabytes(nbytes: float) -> str:
    """Decimal, as checkpoints are quoted."""
    return f"{nbytes / 1e9:.2f} GB"
