"""The launcher's control socket: `control.sock` in a directory of the engine's own, below the keeper's."""

import os
from collections.abc import Callable

from weightkeeper.accepting import Acceptor, Connection
from weightkeeper.errors import ConfigError, ProtocolError, SocketInUseError
from weightkeeper.frames import Limits, name_of
from weightkeeper.launcher.messages import CheckRequest, EngineStatus, ReloadRequest, RestartRequest
from weightkeeper.launcher.settings import Settings
from weightkeeper.launcher.wishes import Wanted, Wishes
from weightkeeper.listening import SocketDirectory
from weightkeeper.protocol import MAX_REQUEST_BYTES, Done, StatusRequest
from weightkeeper.quantities import printable
from weightkeeper.sockets import allowed_uids, control_path

REQUESTS = Limits(StatusRequest | ReloadRequest | CheckRequest | RestartRequest, MAX_REQUEST_BYTES, 0)


def directory_of(socket_dir: str, name: str) -> str:
    """Directory of one engine's control socket. A keeper in `socket_dir` looks only at sockets beside its own."""
    return os.path.join(socket_dir, f"engine-{name}")


class Control:
    """The socket, or nothing where there is to be none.

    Raises:
        SocketPathError: its directory cannot be used.
        SocketInUseError: a live launcher has this name.
    """

    def __init__(self, settings: Settings, wishes: Wishes, status: Callable[[], EngineStatus]):
        self._wishes = wishes
        self._status = status
        self._directory: SocketDirectory | None = None
        if settings.socket_dir is None:
            return
        allowed = allowed_uids()
        path = directory_of(settings.socket_dir, settings.name)
        try:
            self._directory = SocketDirectory(path, allowed)
        except SocketInUseError as error:
            raise SocketInUseError(
                f"{path}: a live launcher has the name {settings.name}; give another --name"
            ) from error
        listener = self._directory.listen(control_path(path))
        self._acceptor = Acceptor(listener, self._converse, allowed)

    async def run(self) -> None:
        """Answer for ever."""
        if self._directory is None:
            return
        await self._acceptor.run()

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()

    async def _converse(self, connection: Connection) -> None:
        if not await connection.welcome("control"):
            return
        connection.expect(REQUESTS)
        while (frame := await connection.request()) is not None:
            await connection.channel.send(await self._answer(frame.message))

    async def _answer(self, message: object) -> EngineStatus | Done:
        match message:
            case StatusRequest():
                return self._status()
            case RestartRequest(cause=cause):
                self._wishes.ask_to_restart(printable(cause) or "by hand")
                return Done("the server is being replaced")
            case ReloadRequest(cause=cause, is_last_good=True):
                await self._reloaded(cause, "last good")
                return Done("the last good configuration is to be served again")
            case ReloadRequest(cause=cause):
                await self._reloaded(cause, "serve")
                return Done("the configuration is accepted, the server is being replaced")
            case CheckRequest(cause=cause):
                await self._reloaded(cause, "check")
                return Done("the configuration would be accepted")
            case other:
                raise ProtocolError(f"{name_of(other)} has no place on a launcher's control socket")

    async def _reloaded(self, cause: str, wanted: Wanted) -> None:
        wish = self._wishes.ask_to_reload(printable(cause) or "by hand", wanted)
        await wish.decided.wait()
        if wish.refusal:
            raise ConfigError(wish.refusal)
