"""What a launcher and its clients say to each other, in the frames of `weightkeeper.protocol`.

Hello            → Welcome
StatusRequest    → EngineStatus
ReloadRequest    → Done | Refusal    once the configuration has been read and checked; the server is then replaced
CheckRequest     → Done | Refusal    the same, and the server stays
RestartRequest   → Done              the same configuration, a new server
"""

from typing import Literal

import msgspec

from weightkeeper.protocol import Done, Message, Refusal, Welcome

State = Literal["warming", "starting", "ready", "reloading", "draining", "waiting", "broken", "stopped"]
"""Imports run, a server starts, it answers /health; it ends for another one, it ends for good; a delay runs before the
next start, none will be made until somebody asks for it; all is over."""


class ReloadRequest(Message, frozen=True):
    """`cause` is for the log and the history.

    Attributes:
        is_last_good: serve what was healthy last instead of what the file holds now; nothing is read or
            checked, but a template of its variables may have to warm.
    """

    cause: str = ""
    is_last_good: bool = False


class CheckRequest(Message, frozen=True):
    cause: str = ""


class RestartRequest(Message, frozen=True):
    cause: str = ""


class Ended(msgspec.Struct, frozen=True):
    """How a server ended. `at` is seconds since the epoch; `code` and `signal`: one of both, of the server's process.

    Attributes:
        cause: why, in words: `signal 9 (SIGKILL)`, `pid 12 (VLLM::EngineCore) ended`, `reload: SIGHUP`.
        was_asked: whether somebody wanted it.
    """

    generation: int
    pid: int
    at: float
    cause: str
    was_asked: bool
    code: int | None = None
    signal: int | None = None


class EngineStatus(Message, frozen=True):
    """Everything a launcher knows of its engine. Times are seconds since the epoch, but for `phases`.

    Attributes:
        since: when this state began.
        generation: counts servers; 0 before the first.
        pid: of the server; 0 while there is none.
        address: where the server listens, in numbers.
        processes: pid → name, of the server and what it has started.
        restarts: kind of cause (`reload`, `restart`, `crash`, `unhealthy`) → how often.
        cause: why it waits or is broken.
        next_start_at: end of the delay; 0 where none runs.
        phases: name → seconds, of the last start that came to health; they add up to `start_seconds`.
        prefork: whether servers are forked; `why_plain` says why not.
        threads: of the template.
        warden: pid of the process that ends what a killed launcher leaves; 0 where there is none.
        refusal: of the last check, until one passes.
    """

    name: str
    version: str
    state: State
    since: float
    started_at: float
    launcher: int
    generation: int = 0
    pid: int = 0
    processes: dict[int, str] = msgspec.field(default_factory=dict)
    model: str = ""
    address: str = ""
    config: str = ""
    restarts: dict[str, int] = msgspec.field(default_factory=dict)
    last_exit: Ended | None = None
    cause: str = ""
    next_start_at: float = 0.0
    phases: dict[str, float] = msgspec.field(default_factory=dict)
    start_seconds: float = 0.0
    prefork: bool = False
    why_plain: str = ""
    template: int = 0
    threads: int = 0
    warden: int = 0
    refusal: str = ""
    refused_at: float = 0.0


FromLauncher = Welcome | Refusal | Done | EngineStatus
