"""What vLLM says in its log while it starts, as marks of which phase is over. The texts are those of 0.30 to 0.33."""

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightkeeper import phases


@dataclass(frozen=True, slots=True)
class Message:
    """A message that says where the process that logs it is.

    Attributes:
        text: how the message's format string begins; a `%s` before it does not matter.
        ended: the phase that is over with it.
        before: of a message that says how long that phase took, as its first decimal number: the phase before it.
    """

    text: str
    ended: str
    before: str | None = None


MESSAGES = (
    Message("Initializing a V1 LLM engine", "engine core"),
    Message("Starting to load model", "device"),
    Message("Loading model from scratch", "device"),
    Message("Loading weights took", "load"),
    Message("Model loading took", "load"),
    Message("Dynamo bytecode transform time", "compile", before="profiling"),
    Message("torch.compile took", "compile", before="profiling"),
    Message("torch.compile and initial profiling/warmup ", "compile", before="profiling"),
    Message("Profiling CUDA graph memory", "profiling"),
    Message("Estimated CUDA graph memory", "graph profiling"),
    Message("Available KV cache memory", "profiling"),
    Message("Initial free memory ", "profiling"),
    Message("Explicitly set (", "profiling"),
    Message("Auto set (", "profiling"),
    Message("%s KV cache size: ", "KV cache"),
    Message("JIT kernel warmup finished in", "warm-up"),
    Message("Graph capturing finished in", "graph capture", before="warm-up"),
    Message("init engine (profile, create kv cache, warmup model) took", "warm-up"),
    Message("Supported tasks: ", "engine core"),
    Message("Application startup complete", "server"),
)
"""The last two are the server's own; the others come from its engine core and workers."""

NAMES = {"MainProcess": "server", "EngineCore": "engine core"}
"""multiprocessing's name of a process → ours; a worker is `VllmWorker-RANK`."""

_installed = False


def install() -> None:
    """Make marks of this process's log from now on, and of those of its forks.

    It sits where records are made and not among the handlers: vLLM configures logging again in each process, which
    takes foreign handlers away.
    """
    global _installed
    if not _installed:
        _installed = True
        logging.setLogRecordFactory(_marking(logging.getLogRecordFactory()))


def _marking(made: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def record(*args: Any, **named: Any) -> logging.LogRecord:
        new = made(*args, **named)
        if phases.CHANNEL in os.environ:
            with contextlib.suppress(Exception):  # a message of another form must reach the log all the same
                read(new)
        return new

    return record


def read(record: logging.LogRecord) -> None:
    """Make the marks of one log record, if it is one of `MESSAGES`."""
    if not isinstance(record.msg, str) or not record.name.startswith(("vllm", "uvicorn")):
        return
    message = next((each for each in MESSAGES if record.msg.startswith((each.text, f"%s{each.text}"))), None)
    if message is None:
        return
    now = time.monotonic()
    if message.before is not None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        seconds = next((argument for argument in arguments if isinstance(argument, float)), 0.0)
        phases.mark(process_name(), message.before, now - seconds)
    phases.mark(process_name(), message.ended, now)


def process_name() -> str:
    """Which of a server's processes this is: `server`, `engine core`, `worker 0`."""
    name = multiprocessing.current_process().name
    return NAMES.get(name) or name.replace("VllmWorker-", "worker ")
