"""Projects whose files a benchmark edits under a supervisor: one of its own with stand-ins, or a running one."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import running

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "docker"))

Line = tuple[float, str]
"""Of a supervisor's log: when, in seconds since 1970, and what."""


@dataclass(frozen=True)
class Target:
    """A project under supervision.

    Attributes:
        engine_yaml: where it is edited.
        compose_yaml: where it is edited; None where it is not ours to edit.
        spoken: everything that its supervisor has logged since the benchmark began, each line with its time.
        option: of vLLM, that goes back and forth.
        values: its two values.
    """

    engine_yaml: Path
    compose_yaml: Path | None
    spoken: Callable[[], list[Line]]
    option: str
    values: tuple[str, str]


@contextlib.contextmanager
def own_project(is_silent: bool, options: list[str]) -> Iterator[Target]:
    """A project with stand-ins under supervision; gone afterwards."""
    from silent_mount import CannotMountError, mounted
    from stand import IMAGE, Stand, build_image
    from stand import run as run_command

    directory = Path(tempfile.mkdtemp(prefix="bench-edit-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        build_image()
        stack.callback(run_command, "docker", "rmi", "--force", IMAGE)
        one = Stand(directory / "server" / "project", seen=directory / "mount" if is_silent else None)
        if is_silent:
            try:
                stack.enter_context(mounted(one.directory, one.seen))
            except CannotMountError as error:
                raise SystemExit(f"bench_edit: {error}") from error
        stack.callback(one.down)
        stack.callback(one.close)
        one.up()
        one.supervise(*options)
        begins = one.log.stat().st_size
        yield Target(
            one.engine_yaml, one.compose_yaml, lambda: written(one.log, begins), "max-model-len", ("1024", "4096")
        )


def written(log: Path, begins: int) -> list[Line]:
    """The lines of a supervisor's standard error, after so many bytes."""
    lines = log.read_bytes()[begins:].decode().splitlines(keepends=True)
    return [parsed(line) for line in lines if line.endswith("\n")]


def parsed(line: str) -> Line:
    """`2026-01-31 12:00:00,123 INFO module: message`."""
    head, _, message = line.rstrip("\n").partition(": ")
    return datetime.strptime(head[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), message


def running_project(directory: Path, option: str) -> Target:
    """A project that is up, with a supervisor in a container."""
    running.COMPOSE_DIR = directory
    name, _, values = option.partition("=")
    first, _, second = values.partition(",")
    engine_yaml = directory / "engine.yaml"
    if not (first and second and engine_yaml.is_file()):
        raise SystemExit(f"bench_edit: {engine_yaml} has to be there, and --option NAME=VALUE,OTHER")
    since = datetime.now().astimezone().isoformat()

    def spoken() -> list[Line]:
        shown = running.compose("logs", "--no-log-prefix", "--no-color", "--timestamps", "--since", since, "supervisor")
        if shown.returncode:
            raise SystemExit(f"bench_edit: {shown.stderr.strip()}")
        parts = [line.partition(" ") for line in shown.stdout.splitlines()]
        return [(moment(stamp), text.partition(": ")[2]) for stamp, _, text in parts]

    return Target(engine_yaml, None, spoken, name, (first, second))


def moment(stamp: str) -> float:
    """Docker's time, which has nine digits behind the point."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
