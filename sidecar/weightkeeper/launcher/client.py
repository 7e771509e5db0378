"""What a command or the supervisor asks a launcher. Blocking, with a time limit on everything."""

import socket

from weightkeeper.dialing import ask
from weightkeeper.errors import EngineLostError
from weightkeeper.frames import Channel, Limits
from weightkeeper.launcher.control import directory_of
from weightkeeper.launcher.messages import CheckRequest, EngineStatus, FromLauncher, ReloadRequest, RestartRequest
from weightkeeper.protocol import VERSION, Done, Hello, Message, StatusRequest, Welcome
from weightkeeper.sockets import allowed_uids, check_owner, check_peer, control_path

RELOAD_SECONDS = 900.0
"""For a check. Where a variable changed, the imports of a new template come first."""


def status(socket_dir: str, name: str, timeout_s: float = 5.0) -> EngineStatus:
    """Everything that the launcher of this engine knows.

    Raises:
        EngineLostError: no launcher answers.
        WrongOwnerError: the socket is another user's.
        CacheUnusableError: no proper answer in time, by its class.
    """
    return _request(socket_dir, name, StatusRequest(), EngineStatus, timeout_s)


def reload(
    socket_dir: str, name: str, cause: str = "", timeout_s: float = RELOAD_SECONDS, is_last_good: bool = False
) -> str:
    """Have the configuration read again, and the server replaced where it passes.

    Raises:
        ConfigError: it is refused, the server goes on as it is; otherwise as `status`.
    """
    return _request(socket_dir, name, ReloadRequest(cause, is_last_good), Done, timeout_s).message


def check(socket_dir: str, name: str, cause: str = "", timeout_s: float = RELOAD_SECONDS) -> str:
    """Have the configuration read and checked as for a reload, and the server left alone. Raises as `reload`."""
    return _request(socket_dir, name, CheckRequest(cause), Done, timeout_s).message


def restart(socket_dir: str, name: str, cause: str = "", timeout_s: float = 5.0) -> str:
    """Have the server replaced by one of the same configuration. Raises as `status`."""
    return _request(socket_dir, name, RestartRequest(cause), Done, timeout_s).message


def _request(socket_dir: str, name: str, message: Message, expected: type, seconds: float) -> object:
    path = control_path(directory_of(socket_dir, name))
    allowed = allowed_uids()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(connection, Limits(FromLauncher))
    try:
        check_owner(path, allowed)
        connection.settimeout(seconds)
        connection.connect(path)
        check_peer(connection, allowed)
        ask(channel, Hello(VERSION, "control"), Welcome, seconds)
        return ask(channel, message, expected, seconds)
    except OSError as error:
        reason = "there is no such socket" if isinstance(error, FileNotFoundError) else error.strerror or "no answer"
        raise EngineLostError(
            f"{path}: {reason}; is `weightkeeper engine --name {name}` running, with this volume?"
        ) from error
    finally:
        channel.close()
