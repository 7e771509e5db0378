"""Where a server listens, as it is asked for and as it is."""

import socket
from dataclasses import dataclass, replace

from weightkeeper.errors import ConfigError
from weightkeeper.quantities import printable


@dataclass(frozen=True, slots=True)
class Address:
    """`--host` and `--port`, or `--uds`, as vLLM understands them."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or "0.0.0.0"  # noqa: S104
        return self.path or f"{host}:{self.port}"

    @classmethod
    def of(cls, bound: socket.socket) -> "Address":
        """Of a bound TCP socket."""
        name = bound.getsockname()
        return cls(_number(name), name[1])

    @property
    def family(self) -> socket.AddressFamily:
        """As vLLM chooses it: a name is one of IPv4."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def resolved(self) -> "Address":
        """With the number that a host's name stands for. It may take as long as a name server does.

        Raises:
            ConfigError: nobody knows the name.
        """
        if self.path:
            return self
        try:
            found = socket.getaddrinfo(
                self.host or None, self.port, self.family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, ValueError, TypeError) as error:  # the latter of a host that is no name
            raise ConfigError(f"{printable(str(self))}: {reason(error)}; give another --host") from error
        return replace(self, host=_number(found[0][4]))


def reason(error: Exception) -> str:
    """Why an address cannot be had."""
    return (error.strerror if isinstance(error, OSError) else None) or printable(str(error))


def _number(name: tuple) -> str:
    """The host of a socket's name; of a link-local IPv6 address with its interface."""
    return f"{name[0]}%{name[3]}" if len(name) == 4 and name[3] and "%" not in name[0] else name[0]
