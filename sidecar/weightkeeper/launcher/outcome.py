"""The outcome of a check in a process of its own: read, limited in time and size, and ended with whoever waits."""

import contextlib
import json
import os
import signal

import anyio

from weightkeeper.errors import ConfigError
from weightkeeper.launcher.reaping import Watched

MAX_BYTES = 64 * 1024

_READ_BYTES = 4096


async def passed(process: Watched, pipe: int, seconds: float) -> None:
    """Wait for the end of a check.

    Args:
        process: the check. It is killed, with its process group, where nobody waits for it any more.
        pipe: on which its outcome comes, {"ok": true} or {"error": "…"}.

    Raises:
        ConfigError: the arguments are refused, or the check came to no outcome.
    """
    os.set_blocking(pipe, False)
    data = bytearray()
    try:
        with anyio.fail_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_collect, pipe, data)
                await process.ended.wait()
                tasks.cancel_scope.cancel()
    except TimeoutError as error:
        raise ConfigError(f"the check of the arguments did not end within {seconds:g} s") from error
    finally:
        if not process.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # it may not lead its group yet
    while _take(pipe, data):
        pass
    if reason := _refusal(bytes(data), process):
        raise ConfigError(reason)


async def _collect(pipe: int, data: bytearray) -> None:
    while True:
        await anyio.wait_readable(pipe)
        if not _take(pipe, data):
            return


def _take(pipe: int, data: bytearray) -> bool:
    """Read once; whether there may be more."""
    try:
        some = os.read(pipe, _READ_BYTES)
    except BlockingIOError:
        return False
    data += some
    return bool(some) and len(data) <= MAX_BYTES


def _refusal(data: bytes, process: Watched) -> str:
    try:
        outcome = json.loads(data)
    except ValueError:
        return f"the check of the arguments broke off: {process.exit}; see the log above"
    return str(outcome["error"]) if "error" in outcome else ""
