"""The dialogue between a keeper and everybody who talks to it, as data.

Every frame is `!IH` (bytes of JSON, number of file descriptors), then the JSON of one message below. Descriptors ride
beside the frame's header (SCM_RIGHTS). Each side sends `Hello`/`Welcome` first; any fault is answered by `Refusal`
and ends the connection.

    control socket (`control.sock`, there from the keeper's start)
        Hello            → Welcome
        StatusRequest    → Status
        LoadRequest      → Done           loading goes on in the background; watch Status
        ReleaseRequest   → Done           refused while engines map the weights, unless forced
        Report           → Done           an engine tells what became of its start
    engine socket (`DEVICE.sock`, there only while the whole model is held)
        Hello            → Welcome
        ReceiptsRequest  → Receipts       what the keeper knows of the checkpoint's files
        MapRequest       → Grant, then Segments… until all descriptors are over | Mismatch
                           the open connection is now a lease; it ends at EOF
        ReleaseRequest   → Done           copy mode: this engine's lease ends, the weights go if nobody else maps them
                           not from a lease that only verifies, which counts as no engine anywhere
    publish socket (`publish.sock`, there from the keeper's start unless it takes no weights from engines)
        Hello            → Welcome        the role is `engine`
        Publish, then Segments…  → Done   once for each rank, each on a connection of its own; this rank is verified
                           when all ranks are there, the model is offered and the open connection is this engine's
                           lease on its device; a connection that ends before that takes its rank with it
                           An engine that outlived a keeper offers what it has mapped to the next one in the same way;
                           `mapped_at` says so. An offer never takes the place of what a keeper loaded itself. Where
                           it is the very memory that is held already, the connection is a lease at once.
    loader channel (a socket pair made by the keeper, inherited by its child)
        Hello            → Welcome
        Progress           any number, unanswered
        Publish, then Segments…  → Done   once for each rank; the model is ready when all its ranks are there
        Failed           → Done           the cause in words, instead of Publish
"""

from typing import Literal

import msgspec

from weightkeeper.errors import Difference
from weightkeeper.layout import Layout
from weightkeeper.memory import MemoryKind

VERSION = 1

MAX_REQUEST_BYTES = 256 * 1024
"""A message to a keeper's socket. A map request with 200 files is some 30 KiB."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""A message from a keeper, on the loader channel or on the publish socket. A layout of 5,000 tensors is about 1 MiB."""

MAX_DESCRIPTORS = 64
"""In one frame. The kernel's own limit is 253."""

MAX_SEGMENTS = 4096
"""In one arena; at 1 GiB a segment that is 4 TiB a device."""

FRAME_SECONDS = 10.0
"""From the first to the last byte of one frame, and from connecting to the first message."""

WAITING = "waiting for engines that hold the weights"
"""Stage of a keeper that gives engines, which outlived the one before, time to offer what they map."""

State = Literal["empty", "loading", "ready", "failed", "released"]
"""Of a keeper: nothing asked yet, a loader runs, weights are held, the last load failed, given back on request."""


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class Hello(Message, frozen=True):
    version: int
    role: Literal["control", "engine", "loader"]
    name: str = ""
    """For people: which engine this is. Shown in `status`; nothing is decided by it."""


class Welcome(Message, frozen=True):
    version: int


class Refusal(Message, frozen=True):
    """`code` is the code of an error class; `message` is for people."""

    code: str
    message: str


class Done(Message, frozen=True):
    message: str = ""


class StatusRequest(Message, frozen=True):
    pass


class LoadRequest(Message, frozen=True):
    """Load what the configuration names now, and replace what is held when that is ready."""


class ReleaseRequest(Message, frozen=True):
    force: bool = False


class Report(Message, frozen=True):
    """What became of an engine's start.

    Attributes:
        event: `mapped`, `fallback`, or `build_failed` (the next request is refused once, so that it goes to disk).
        code: of the error, for `fallback` and `build_failed`.
        name: of the engine, as in Hello.
        nbytes: bytes mapped or copied.
        milliseconds: from connecting to the last tensor bound.
        phases: name → seconds, where the engine's start so far went.
    """

    event: Literal["mapped", "fallback", "build_failed"]
    name: str = ""
    code: str = ""
    message: str = ""
    mode: str = ""
    nbytes: int = 0
    milliseconds: float = 0.0
    phases: dict[str, float] = {}


class Receipt(msgspec.Struct, frozen=True):
    """What a file was when its content was hashed. All times in nanoseconds.

    Attributes:
        name: path inside the checkpoint.
        blake3: hex digest of the content.
        trusted: False where the file's change time was too young for a later equal stat to prove anything.
    """

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    blake3: str
    trusted: bool = True


class ReceiptsRequest(Message, frozen=True):
    pass


class Receipts(Message, frozen=True):
    files: tuple[Receipt, ...]


class MapRequest(Message, frozen=True):
    """With the mode `verify` the weights are only read, whatever they are: the fingerprint is not compared."""

    fingerprint: dict[str, str]
    mode: Literal["zero_copy", "copy", "verify"]


class Mismatch(Message, frozen=True):
    differences: tuple[Difference, ...]


class Grant(Message, frozen=True):
    """`sizes` are bytes of the segments whose descriptors follow in Segments frames."""

    generation: int
    fingerprint: dict[str, str]
    kind: MemoryKind
    sizes: tuple[int, ...]
    layout: Layout


class Segments(Message, frozen=True):
    """Descriptors of segments `first`, `first + 1`, …; as many as ride beside this frame."""

    first: int


class Progress(Message, frozen=True):
    """`stage` is a word for people: `hashing`, `starting vLLM`, `reading`, `packing`."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


class Publish(Message, frozen=True):
    """One rank's weights. The descriptors of `sizes` follow in Segments frames.

    Attributes:
        device: name of the engine socket: a GPU UUID, or `cpu-RANK`.
        rank: of this part, 0 ≤ rank < world_size.
        model: for people: the path or name of the model.
        mapped_at: of an offer: when this engine mapped it, in seconds since the epoch; of two generations that engines
            offer, the one that was mapped last is the newer one. 0 for weights that the engine has just loaded.
    """

    device: str
    rank: int
    world_size: int
    model: str
    fingerprint: dict[str, str]
    receipts: tuple[Receipt, ...]
    kind: MemoryKind
    sizes: tuple[int, ...]
    layout: Layout
    mapped_at: float = 0.0


class Failed(Message, frozen=True):
    code: str
    message: str


class Lease(msgspec.Struct, frozen=True):
    """One process that maps weights. `since` is seconds since the epoch; `pid` is 0 across PID namespaces."""

    name: str
    device: str
    mode: str
    uid: int
    pid: int
    since: float
    generation: int

    @property
    def is_engine(self) -> bool:
        """Whether somebody computes on these weights; not so where they are only verified."""
        return self.mode != "verify"


class Loading(msgspec.Struct, frozen=True):
    stage: str
    done_bytes: int
    total_bytes: int
    seconds: float


class Held(msgspec.Struct, frozen=True):
    """One generation of weights that the keeper holds.

    Attributes:
        fingerprint: hex digest over all fields, for people to compare.
        nbytes: on all devices together.
        devices: device → bytes.
        tensors: distinct tensors on all devices.
        load_seconds: from the loader's start, or the first rank that engines published, to the last rank.
        adopted_from: names of the engines that offered it, having mapped it from a keeper before; empty otherwise.
    """

    generation: int
    model: str
    fingerprint: str
    nbytes: int
    devices: dict[str, int]
    tensors: int
    kind: MemoryKind
    load_seconds: float
    loaded_at: float
    adopted_from: str = ""


class Status(Message, frozen=True):
    """Everything a keeper knows of itself. Times are seconds since the epoch.

    Attributes:
        failure: cause of the last failed load, empty when the last one succeeded.
        releasing: generations no longer offered whose leases have not ended yet.
        loads: finished loads since the keeper's start.
        fallbacks: code → how many engine starts reported it.
        last_report: of the engine that started last.
        own_bytes: resident memory of the keeper itself.
    """

    state: State
    version: str
    pid: int
    started_at: float
    config: str
    own_bytes: int
    held: Held | None = None
    releasing: tuple[Held, ...] = ()
    leases: tuple[Lease, ...] = ()
    loading: Loading | None = None
    failure: str = ""
    loads: int = 0
    fallbacks: dict[str, int] = {}
    last_report: Report | None = None
    last_report_at: float = 0.0


ToKeeper = (
    Hello | StatusRequest | LoadRequest | ReleaseRequest | Report | ReceiptsRequest | MapRequest
    | Progress | Publish | Segments | Failed
)  # fmt: skip
FromKeeper = Welcome | Refusal | Done | Status | Receipts | Mismatch | Grant | Segments
