"""The weights that a keeper holds: descriptors of verified segments, and the answer that hands them out, ready made.

Nothing here maps memory. A layout is checked once, encoded into its Grant and dropped, so that holding a model costs
the keeper the size of that answer.
"""

import time
from collections.abc import Sequence

from weightkeeper import fingerprint, memory
from weightkeeper.errors import ProtocolError
from weightkeeper.frames import close_all, encode
from weightkeeper.layout import Layout, Tensor
from weightkeeper.protocol import MAX_SEGMENTS, Grant, Held, Publish, Receipts
from weightkeeper.sockets import engine_path

MAX_RANKS = 1024
MAX_DIMENSIONS = 64
MAX_COUNT = (1 << 63) - 1
"""Numbers of bytes and elements stay inside 64 bits, as they are in every program that maps them."""

MAX_SECONDS = float(1 << 40)
"""Since the epoch, for a time that somebody tells."""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip
"""torch's dtypes without their prefix → bytes of one element."""


class Part:
    """One rank's weights. It owns its descriptors.

    Attributes:
        grant: the answer to an engine that may map it; empty until the part belongs to a generation.

    Raises:
        ProtocolError: the message contradicts itself.
        MemoryKindError: its kind of memory cannot be held.
    """

    def __init__(self, publish: Publish):
        check_publish(publish)
        self.device = publish.device
        self.rank = publish.rank
        self.world_size = publish.world_size
        self.model = publish.model
        self.kind = publish.kind
        self.sizes = publish.sizes
        self.tensors = len(publish.layout.tensors)
        self.fingerprint = publish.fingerprint
        self.mapped_at = publish.mapped_at
        self.descriptors: list[int] = []
        self._check = memory.checker_of(publish.kind)
        self.receipts = encode(Receipts(publish.receipts))
        self.grant = b""
        self._layout: Layout | None = publish.layout

    @property
    def is_complete(self) -> bool:
        return len(self.descriptors) == len(self.sizes)

    def add(self, first: int, descriptors: Sequence[int]) -> None:
        """Take over segments; on an error they are closed.

        Raises:
            ProtocolError: not the next segments, or too many.
            MemoryKindError: one is not a sealed segment of its size.
        """
        try:
            if first != len(self.descriptors) or not 0 < len(descriptors) <= len(self.sizes) - first:
                raise ProtocolError(
                    f"{len(descriptors)} segment(s) from number {first} on {self.device}; "
                    f"{len(self.descriptors)} of {len(self.sizes)} are here"
                )
            for descriptor, nbytes in zip(descriptors, self.sizes[first:], strict=False):
                self._check(descriptor, nbytes)
        except BaseException:
            close_all(descriptors)
            raise
        self.descriptors += descriptors

    def settle(self, generation: int) -> None:
        """Make the Grant; a part belongs to one generation for good."""
        if self._layout is not None:
            self.grant = encode(Grant(generation, self.fingerprint, self.kind, self.sizes, self._layout))
            self._layout = None

    def close(self) -> None:
        """Let the descriptors go, and the answers, which an engine's lease would keep otherwise."""
        close_all(self.descriptors)
        self.descriptors = []
        self.grant = self.receipts = b""


class Generation:
    """All ranks of one load.

    Attributes:
        number: grows by one a load.
        parts: device → what is held there.
        held: what `status` shows, once it is finished.
        options: digests of the config file's options that shaped it; None where there was no file.
        mapped_at: of what engines offered: when one of them mapped it last; 0 for all else.
    """

    held: Held

    def __init__(self, number: int):
        self.number = number
        self.parts: dict[str, Part] = {}
        self.options: dict[str, str] | None = None
        self.mapped_at = 0.0
        self._started = time.monotonic()

    @property
    def is_complete(self) -> bool:
        parts = list(self.parts.values())
        return bool(parts) and len(parts) == parts[0].world_size and all(part.is_complete for part in parts)

    def begin(self, publish: Publish) -> Part:
        """A new rank's part, empty yet.

        Raises:
            ProtocolError: it contradicts itself or the ranks before it.
            MemoryKindError: its kind of memory cannot be held.
        """
        part = Part(publish)
        self.add(part)
        return part

    def add(self, part: Part) -> None:
        """Let a part belong to this generation.

        Raises:
            ProtocolError: it contradicts the ranks before it.
        """
        for other in self.parts.values():
            if other.device == part.device or other.rank == part.rank:
                raise ProtocolError(f"rank {part.rank} on {part.device} is published twice")
            if (other.world_size, other.model, other.kind) != (part.world_size, part.model, part.kind):
                raise ProtocolError(f"rank {part.rank} does not belong to the same model as rank {other.rank}")
        part.settle(self.number)
        self.parts[part.device] = part

    def finish(self, adopted_from: str = "") -> None:
        """Called when the last rank is there: what `held` gives is settled now."""
        parts = sorted(self.parts.values(), key=lambda part: part.rank)
        devices = {part.device: sum(part.sizes) for part in parts}
        digests = {str(part.rank): fingerprint.digest(part.fingerprint) for part in parts}
        self.held = Held(
            generation=self.number,
            model=parts[0].model,
            fingerprint=digests["0"] if len(parts) == 1 else fingerprint.digest(digests),
            nbytes=sum(devices.values()),
            devices=devices,
            tensors=sum(part.tensors for part in parts),
            kind=parts[0].kind,
            load_seconds=time.monotonic() - self._started,
            loaded_at=time.time(),
            adopted_from=adopted_from,
        )
        self.mapped_at = max(part.mapped_at for part in parts)

    def close(self) -> None:
        """Let the descriptors go. Memory lives on where it is mapped."""
        for part in self.parts.values():
            part.close()


def check_publish(publish: Publish) -> None:
    """Refuse a message whose numbers or layout cannot be right.

    Raises:
        ProtocolError: with the tensor or field at fault.
    """
    engine_path("/", publish.device)
    if not 0 < publish.world_size <= MAX_RANKS or not 0 <= publish.rank < publish.world_size:
        raise ProtocolError(f"rank {publish.rank} of {publish.world_size} cannot be")
    if not 0 < len(publish.sizes) <= MAX_SEGMENTS:
        raise ProtocolError(f"{len(publish.sizes)} segments on {publish.device}; 1 to {MAX_SEGMENTS} are allowed")
    if min(publish.sizes) <= 0 or sum(publish.sizes) > MAX_COUNT:
        raise ProtocolError(f"the segments on {publish.device} have impossible sizes")
    if not 0 <= publish.mapped_at <= MAX_SECONDS:
        raise ProtocolError(f"{publish.device} was mapped at {publish.mapped_at}, which cannot be")
    check_layout(publish.layout, sum(publish.sizes))


def check_layout(layout: Layout, room: int) -> None:
    """Refuse a layout of which anything lies outside the arena's `room` bytes.

    Raises:
        ProtocolError: with the tensor at fault.
    """
    if not 0 <= layout.nbytes <= room:
        raise ProtocolError(f"a layout of {layout.nbytes} bytes in segments of {room} bytes together")
    paths = set()
    for tensor in layout.tensors:
        if tensor.path in paths:
            raise ProtocolError(f"tensor {tensor.path!r:.200} is there twice")
        paths.add(tensor.path)
        if not 0 <= tensor.offset <= _end(tensor) <= layout.nbytes:
            raise ProtocolError(f"tensor {tensor.path!r:.200} lies outside the arena's {layout.nbytes} bytes")
    for digest in layout.digests:
        if not 0 <= digest.offset <= digest.offset + digest.nbytes <= layout.nbytes:
            raise ProtocolError(f"the digest of {digest.path!r:.200} is over bytes outside the arena")
    for alias, path in layout.aliases.items():
        if alias in paths or path not in paths:
            raise ProtocolError(f"alias {alias!r:.200} of {path!r:.200} does not fit the tensors")


def _end(tensor: Tensor) -> int:
    """The byte after the tensor's last one."""
    dimensions = len(tensor.shape)
    if tensor.dtype not in ITEM_BYTES:
        raise ProtocolError(f"tensor {tensor.path!r:.200} has the unknown dtype {tensor.dtype!r:.40}")
    if dimensions != len(tensor.stride) or dimensions > MAX_DIMENSIONS:
        raise ProtocolError(f"tensor {tensor.path!r:.200} has {dimensions} sizes and {len(tensor.stride)} strides")
    if any(not 0 <= number <= MAX_COUNT for number in (*tensor.shape, *tensor.stride)):
        raise ProtocolError(f"tensor {tensor.path!r:.200} has an impossible size or stride")
    if 0 in tensor.shape:
        return tensor.offset
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset + (last + 1) * ITEM_BYTES[tensor.dtype]
