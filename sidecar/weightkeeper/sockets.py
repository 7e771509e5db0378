"""Paths, owners and modes of the keeper's sockets, checked on both sides before a byte is believed."""

import os
import re
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass

from weightkeeper.errors import ConfigError, SocketPathError, WrongOwnerError

MAX_PATH_BYTES = 107
"""What fits into sockaddr_un besides the final zero byte, see unix(7)."""

DEFAULT_DIRECTORY = "/run/weightkeeper"
CONTROL = "control"
PUBLISH = "publish"
SUFFIX = ".sock"

ALLOW_UID = "WEIGHTKEEPER_ALLOW_UID"

_DEVICE = re.compile(r"[A-Za-z0-9-]{1,64}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says. `pid` is 0 across PID namespaces."""

    pid: int
    uid: int


def allowed_uids() -> frozenset[int]:
    """Users besides our own that we deal with: WEIGHTKEEPER_ALLOW_UID, numbers with spaces between.

    Raises:
        ConfigError: it has something else in it.
    """
    text = os.environ.get(ALLOW_UID, "")
    try:
        return frozenset(int(each) for each in text.split())
    except ValueError as error:
        raise ConfigError(f"{ALLOW_UID}={text!r}: expected user numbers with spaces between") from error


def control_path(directory: str | os.PathLike[str]) -> str:
    """The control socket's path.

    Raises:
        SocketPathError: the path is too long for a Unix socket.
    """
    return fitting(os.path.join(directory, CONTROL + SUFFIX))


def publish_path(directory: str | os.PathLike[str]) -> str:
    """The path of the socket on which engines hand over weights.

    Raises:
        SocketPathError: the path is too long for a Unix socket.
    """
    return fitting(os.path.join(directory, PUBLISH + SUFFIX))


def engine_path(directory: str | os.PathLike[str], device: str) -> str:
    """The path of one device's engine socket: a GPU UUID, a MIG UUID, or `cpu-RANK`.

    Raises:
        SocketPathError: no name of a device, or the path is too long for a Unix socket.
    """
    if not _DEVICE.fullmatch(device) or device in (CONTROL, PUBLISH):
        raise SocketPathError(
            f"{device!r:.80} is no device name: 1 to 64 letters, digits and dashes, not `{CONTROL}` or `{PUBLISH}`"
        )
    return fitting(os.path.join(directory, device + SUFFIX))


def fitting(path: str) -> str:
    """`path` if a Unix socket can have it.

    Raises:
        SocketPathError: it cannot; the message has the length and the remedy.
    """
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise SocketPathError(
            f"{path}: {length} bytes, a Unix socket's path has at most {MAX_PATH_BYTES}; "
            f"choose a socket directory that is {length - MAX_PATH_BYTES} bytes shorter"
        )
    return path


def prepare_directory(directory: str, allowed_uids: Collection[int] = ()) -> None:
    """Make the directory where it is missing, and ours alone where it is not.

    Args:
        allowed_uids: users besides our own who may connect; with any, the directory lets all users pass through.

    Raises:
        SocketPathError: no directory, a link, another user's, or the system refuses; with the remedy.
    """
    mode = 0o711 if allowed_uids else 0o700
    try:
        os.makedirs(directory, mode=mode, exist_ok=True)
        state = os.lstat(directory)
        if stat.S_ISLNK(state.st_mode):
            raise SocketPathError(f"{directory} is a link to {os.readlink(directory)}; name the directory itself")
        if state.st_uid != os.geteuid():
            raise SocketPathError(foreign_directory(directory, state.st_uid))
        if stat.S_IMODE(state.st_mode) != mode:
            os.chmod(directory, mode)
    except FileExistsError as error:
        raise SocketPathError(f"{directory} is not a directory; remove it or choose another one") from error
    except OSError as error:
        raise SocketPathError(
            f"{directory}: {error.strerror} (we run as uid {os.geteuid()}); "
            "create it for this user or choose another one with --socket-dir"
        ) from error


def foreign_directory(directory: str, owner: int) -> str:
    """What is said of a socket directory that belongs to somebody else."""
    ours = os.geteuid()
    return (
        f"{directory} belongs to uid {owner} and we run as uid {ours}: `chown {ours} {directory}` once, "
        "or remove the volume so that the image's ownership applies to a new one"
    )


def check_owner(path: str, allowed_uids: Collection[int] = ()) -> None:
    """Refuse a socket that somebody other than us or `allowed_uids` can have put there.

    Raises:
        FileNotFoundError: there is no socket, or no directory.
        WrongOwnerError: another user's, or others may write there; with the remedy.
    """
    directory = os.path.dirname(path) or "."
    try:
        _check_state(directory, os.lstat(directory), stat.S_ISDIR, "directory", allowed_uids)
        state = os.lstat(path)
    except PermissionError as error:
        closed, owner = _closed_directory(directory)
        raise WrongOwnerError(foreign_directory(closed, owner)) from error
    _check_state(path, state, stat.S_ISSOCK, "socket", allowed_uids)


def _closed_directory(directory: str) -> tuple[str, int]:
    """The directory on the way to `directory` that does not let us through, and its owner."""
    closed = os.path.abspath(directory)
    while True:
        try:
            return closed, os.stat(closed).st_uid
        except PermissionError:
            closed = os.path.dirname(closed)


def _check_state(path: str, state: os.stat_result, is_kind: object, kind: str, allowed_uids: Collection[int]) -> None:
    if not is_kind(state.st_mode):
        raise WrongOwnerError(f"{path} is not a {kind}; remove it, the keeper makes its own")
    ours = os.geteuid()
    if state.st_uid != ours and state.st_uid not in allowed_uids:
        raise WrongOwnerError(
            f"{path} belongs to uid {state.st_uid} and we run as uid {ours}: run both as one user, "
            f"or allow the other with {ALLOW_UID} on both sides"
        )
    # A keeper that allows other users opens its sockets to all and asks each one's uid; its directory stays its own.
    if state.st_mode & _OTHERS_WRITE and not (kind == "socket" and allowed_uids):
        raise WrongOwnerError(
            f"{path} can be written by other users (mode {stat.S_IMODE(state.st_mode):04o}); chmod go-w"
        )


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end, by SO_PEERCRED; for a client that is who listened on the socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def check_peer(connection: socket.socket, allowed_uids: Collection[int] = ()) -> Peer:
    """The peer, if it is our own user or an allowed one.

    Raises:
        WrongOwnerError: it is another user.
    """
    peer = peer_of(connection)
    ours = os.geteuid()
    if peer.uid != ours and peer.uid not in allowed_uids:
        raise WrongOwnerError(
            f"the other side runs as uid {peer.uid} and we run as uid {ours}: run both as one user, "
            f"or allow the other with {ALLOW_UID} on both sides"
        )
    return peer
