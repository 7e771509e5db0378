"""What an engine or a command asks a keeper. Blocking, with a time limit on everything; every cause has its own class.

A `Session` that was granted weights is a lease: it lasts as long as the session is open.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightkeeper.dialing import ask, connect, expected_of, hand_over, request
from weightkeeper.errors import (
    Difference,
    KeeperFailedError,
    LostError,
    MismatchError,
    NoSocketError,
    NotLoadedError,
    ProtocolError,
    RefusedError,
    StillLoadingError,
    WeightkeeperError,
)
from weightkeeper.frames import Channel, close_all
from weightkeeper.patience import Patience
from weightkeeper.protocol import (
    Done,
    Grant,
    LoadRequest,
    MapRequest,
    Mismatch,
    Publish,
    Receipt,
    Receipts,
    ReceiptsRequest,
    ReleaseRequest,
    Report,
    Segments,
    Status,
    StatusRequest,
)
from weightkeeper.quantities import bytes_text
from weightkeeper.sockets import control_path, engine_path, fitting, publish_path


@dataclass(frozen=True, slots=True)
class Granted:
    """Weights that may be mapped. The descriptors, one a segment of `grant.sizes`, are the receiver's to close.

    `at` is when they were granted, in seconds since the epoch.
    """

    grant: Grant
    descriptors: list[int]
    at: float


class Session:
    """An open connection to one device's engine socket.

    Args:
        device: whose it is, for people; empty where nothing is asked for on it.
    """

    def __init__(self, channel: Channel, device: str = ""):
        self._channel = channel
        self._device = device

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receipts(self) -> tuple[Receipt, ...]:
        """What the keeper knows of the checkpoint's files."""
        return ask(self._channel, ReceiptsRequest(), Receipts).files

    def map(self, fingerprint: dict[str, str], mode: str) -> Granted:
        """Ask for the weights; with the answer, the session is a lease.

        Args:
            fingerprint: field → value, of what this engine would load from disk.
            mode: `zero_copy` or `copy`; or `verify`, only to read them, for which no fingerprint is compared.

        Raises:
            MismatchError: the keeper holds other weights; it names each field that differs.
            CacheUnusableError: any other cause, by its class.
        """
        answer = ask(self._channel, MapRequest(fingerprint, mode), Grant | Mismatch)
        granted_at = time.time()
        if isinstance(answer, Mismatch):
            raise MismatchError(list(answer.differences), self._device)
        descriptors: list[int] = []
        try:
            while len(descriptors) < len(answer.sizes):
                frame = self._channel.receive()
                descriptors += frame.descriptors
                segments = expected_of(frame.message, Segments)
                if segments.first != len(descriptors) - len(frame.descriptors) or not frame.descriptors:
                    raise ProtocolError(f"the keeper sent segments from {segments.first}, out of order")
            if len(descriptors) > len(answer.sizes):
                raise ProtocolError(f"the keeper sent {len(descriptors)} segments for {len(answer.sizes)} sizes")
        except BaseException:
            close_all(descriptors)
            raise
        return Granted(answer, descriptors, granted_at)

    def release(self) -> str:
        """Say that this engine has its own copy: its lease ends, and the weights go if nobody else maps them."""
        return ask(self._channel, ReleaseRequest(), Done).message

    def wait_for_end(self) -> WeightkeeperError:
        """Return when the lease is over, however long that takes: the keeper's refusal, or that it is lost."""
        self._channel.wait()
        try:
            expected_of(self._channel.receive().message, ())
        except WeightkeeperError as error:
            return error
        return ProtocolError("the keeper spoke out of turn")

    def shutdown(self) -> None:
        """End the lease from another thread; the one that waits for its end closes."""
        self._channel.shutdown()

    def close(self) -> None:
        """End the lease."""
        self._channel.close()


def open_session(
    socket_dir: str | os.PathLike[str],
    device: str,
    *,
    name: str = "",
    connect_timeout_s: float = 5.0,
    state_timeout_s: float = 600.0,
    wait: Callable[[str], None] | None = None,
    wait_for_keeper: bool = False,
    socket_path: str | None = None,
) -> Session:
    """Connect to the engine socket of `device`, and wait while the keeper is still loading.

    Args:
        socket_dir: the keeper's directory.
        name: of this engine, for people.
        connect_timeout_s: to connect and be greeted, each time.
        state_timeout_s: for the keeper to become ready.
        wait: called with a line about the waiting, at once and then every patience.SAY_SECONDS.
        wait_for_keeper: also wait for a keeper that is not there (yet) or has just died.
        socket_path: the engine socket itself; its directory then counts in place of `socket_dir`.

    Raises:
        CacheUnusableError: the cause, by its class.
        SocketPathError: the path cannot be one of a Unix socket.
    """
    path = fitting(socket_path) if socket_path else engine_path(socket_dir, device)
    control = control_path(os.path.dirname(path))
    patience = Patience(state_timeout_s, wait)
    while True:
        try:
            return Session(connect(path, "engine", name, connect_timeout_s), device)
        except (NoSocketError, RefusedError, LostError) as error:
            cause: WeightkeeperError = error
        try:
            state = request(control, StatusRequest(), Status, connect_timeout_s)
        except (NoSocketError, RefusedError, LostError) as error:
            cause = cause if isinstance(cause, LostError) else error
            if not wait_for_keeper:
                raise cause from error
            patience.use("no keeper answers yet", cause)
        else:
            _check_state(state, device)
            if state.held is None:
                text = f"the keeper is loading: {loading_text(state)}"
                late = f"the keeper is still loading after {state_timeout_s:g} s: {loading_text(state)}"
                patience.use(text, StillLoadingError(f"{late}; raise state_timeout_s or look into its log"))
            else:  # ready since we tried, or full: that is a matter of moments
                patience.shorten(connect_timeout_s)
                patience.use("the keeper is ready, its socket not yet", cause)


def publish(
    socket_dir: str | os.PathLike[str],
    message: Publish,
    descriptors: Sequence[int],
    *,
    name: str = "",
    connect_timeout_s: float = 5.0,
    state_timeout_s: float = 600.0,
) -> Session:
    """Hand one rank's weights over to the keeper; they are offered when all ranks have done so.

    Args:
        socket_dir: the keeper's directory.
        message: what the descriptors are.
        descriptors: one a segment of `message.sizes`; they stay the caller's.
        name: of this engine, for people.
        connect_timeout_s: to connect and be greeted.
        state_timeout_s: for the keeper to verify this rank. The other ranks are not waited for.

    Returns:
        The lease on these weights, for as long as it is open; closed before the last rank has come, nothing is offered.

    Raises:
        AlreadyHeldError: the keeper holds these very weights; they can be mapped.
        StillLoadingError: it is loading by itself.
        CacheUnusableError: any other cause, by its class; RefusedError from a keeper that takes no weights.
    """
    if len(descriptors) != len(message.sizes):
        raise ProtocolError(f"{len(descriptors)} descriptors for {len(message.sizes)} segments of {message.device}")
    try:
        channel = connect(publish_path(socket_dir), "engine", name, connect_timeout_s)
    except NoSocketError as error:
        status(socket_dir, connect_timeout_s)
        raise RefusedError(f"the keeper in {socket_dir} takes no weights from engines; see --no-publish") from error
    try:
        hand_over(channel, message, descriptors, state_timeout_s)
    except BaseException:
        channel.close()
        raise
    return Session(channel)


def loading_text(state: Status) -> str:
    """`reading, 40 % (108.0 MB of 269.1 MB)`, of a load that runs."""
    loading = state.loading
    if loading is None:
        return "starting"
    if not loading.total_bytes:
        return loading.stage
    done, total = bytes_text(loading.done_bytes), bytes_text(loading.total_bytes)
    return f"{loading.stage}, {loading.done_bytes * 100 // loading.total_bytes} % ({done} of {total})"


def status(socket_dir: str | os.PathLike[str], timeout_s: float = 5.0) -> Status:
    """Everything the keeper knows of itself.

    Raises:
        CacheUnusableError: it does not answer; the cause by its class.
    """
    return request(control_path(socket_dir), StatusRequest(), Status, timeout_s)


def load(socket_dir: str | os.PathLike[str], timeout_s: float = 5.0) -> str:
    """Have the keeper load what its configuration names now; it goes on in the background."""
    return request(control_path(socket_dir), LoadRequest(), Done, timeout_s).message


def release(socket_dir: str | os.PathLike[str], force: bool = False, timeout_s: float = 5.0) -> str:
    """Have the keeper let its weights go.

    Raises:
        ReleaseRefusedError: engines map them and `force` is not set.
    """
    return request(control_path(socket_dir), ReleaseRequest(force), Done, timeout_s).message


def report(socket_dir: str | os.PathLike[str], message: Report, timeout_s: float = 5.0) -> None:
    """Tell the keeper what became of an engine's start."""
    request(control_path(socket_dir), message, Done, timeout_s)


def _check_state(state: Status, device: str) -> None:
    """Refuse what no waiting will change."""
    if state.held is not None:
        if device not in state.held.devices:
            raise MismatchError([Difference("device", ", ".join(state.held.devices), device)], device)
    elif state.state == "failed":
        raise KeeperFailedError(f"the keeper's last load failed: {state.failure}")
    elif state.state != "loading":
        why = "they were released" if state.state == "released" else "none was ever loaded"
        raise NotLoadedError(f"the keeper holds no weights, {why}; `weightkeeper load` brings them in")
