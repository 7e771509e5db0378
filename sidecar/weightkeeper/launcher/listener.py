"""The listening socket. The launcher owns it for its whole life, so that clients wait during a restart."""

import contextlib
import logging
import os
from collections.abc import Collection

from weightkeeper.launcher import binding
from weightkeeper.launcher.address import Address
from weightkeeper.sockets import fitting

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound

logger = logging.getLogger(__name__)


class Listener:
    """A listening socket at an address.

    Args:
        others: of ours. Some may have the same port for another host, and keep it.

    Attributes:
        address: as it was asked for.
        at: as it really is, with the port that the kernel chose for port 0.
        reach: how the launcher's own health check gets there: (host, port), or a path.

    Raises:
        ConfigError: the address cannot be had; the message says who has it, where that can be seen.
    """

    def __init__(self, address: Address, others: Collection["Listener"] = ()):
        self.address = self.at = address
        self.reach: str | tuple[str, int]
        if address.path:
            self.socket = binding.at_path(fitting(address.path))
            self.reach = os.path.abspath(address.path)
            self._file = binding.file(address.path)
        else:
            self.socket = binding.at_port(address, [each.socket for each in others if each.has_port(address.port)])
            self.at = Address.of(self.socket)
            self.reach = _LOOPBACK.get(self.at.host, self.at.host), self.at.port
        logger.info("listening at %s", self.at)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def is_at(self, address: Address) -> bool:
        """Whether it is what a new listener at this address would be."""
        if self.at.path:
            return bool(address.path) and binding.file(address.path) == self._file
        return address in (self.address, self.at)

    def has_port(self, port: int) -> bool:
        """Whether it listens at this TCP port, for whichever host."""
        return self.is_open and not self.at.path and self.at.port == port

    def renew(self) -> None:
        """Bind anew where somebody has removed or replaced the socket's file: nobody could reach the next server.

        Raises:
            ConfigError: as when it was made; the old socket stays.
        """
        if not self.at.path or self._is_there():
            return
        old, self.socket = self.socket, binding.at_path(self.at.path)
        old.close()
        self._file = binding.file(self.at.path)
        logger.warning("--uds %s: the socket's file was gone; it is bound anew", self.at.path)

    def close(self) -> None:
        self.socket.close()
        if self.at.path and self._is_there():
            with contextlib.suppress(OSError):
                os.unlink(str(self.reach))

    def _is_there(self) -> bool:
        return self._file == binding.file(str(self.reach)) != (0, 0)
