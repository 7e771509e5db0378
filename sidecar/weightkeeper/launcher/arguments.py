"""The little that the launcher reads of the server's arguments: the config file, and where the server listens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError
from weightkeeper.launcher import reading
from weightkeeper.launcher.address import Address
from weightkeeper.launcher.health import Tls

DEFAULT_PORT = 8000

_PURPOSE = "the engine's options belong in this file"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that a server is started with, read once. Two are equal where a server would see no difference.

    Attributes:
        arguments: what follows `vllm serve`, as given.
        environment: of the server.
        config: the config file as the arguments name it, or "".
        content: of the config file.
        address: where the server listens.
        model: for people; "" where it is not said.
        shutdown_timeout: seconds that vLLM gives its requests when it is told to end.
        tls: whether the server speaks TLS, and with `mutual` only to clients that have a certificate.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    config: str
    content: bytes
    address: Address
    model: str
    shutdown_timeout: float
    tls: Tls

    def write(self, directory: Path) -> list[str]:
        """Put a copy of the config file into `directory`; the arguments that name the copy.

        A later edit of the file itself then takes effect at a reload, where it is checked, and not after a crash.

        Raises:
            ConfigError: the copy cannot be written.
        """
        if not self.config:
            return list(self.arguments)
        copy = directory / Path(self.config).name
        try:
            directory.mkdir(mode=0o700)
            copy.write_bytes(self.content)
        except OSError as error:
            raise ConfigError(
                f"{copy}: {error.strerror}; the launcher keeps a copy of its config file there"
            ) from error
        position = _config_position(self.arguments)
        words = 2 if self.arguments[position] == "--config" else 1
        return [*self.arguments[:position], "--config", str(copy), *self.arguments[position + words :]]


def read(arguments: tuple[str, ...], environment: Mapping[str, str]) -> Configuration:
    """Read the arguments and the config file that they name.

    Raises:
        ConfigError: the file cannot be read, or a value is none that the launcher can use.
    """
    position = _config_position(arguments)
    path, content, values = "", b"", {}
    if position is not None:
        path = _config_path(arguments, position)
        content = reading.regular(path, engine_config.MAX_CONFIG_BYTES, _PURPOSE, "is this the engine's config file?")
        values = engine_config.parse(content, path)

    def option(name: str) -> str:
        return _given(arguments, name) or _text(values.get(name))

    return Configuration(
        arguments=arguments,
        environment=dict(environment),
        config=path,
        content=content,
        address=Address(option("host"), _port(option("port")), option("uds")),
        model=_positional(arguments) or option("model"),
        shutdown_timeout=_seconds(option("shutdown-timeout")),
        tls=_tls(option("ssl-certfile") or option("ssl-keyfile"), option("ssl-cert-reqs")),
    )


def is_unread(arguments: tuple[str, ...]) -> bool:
    """Whether the config file is spelled `--config=FILE`, which vLLM itself accepts and does not read."""
    position = _config_position(arguments)
    return position is not None and arguments[position] != "--config"


def _config_position(arguments: tuple[str, ...]) -> int | None:
    found = [i for i, word in enumerate(arguments) if word == "--config" or word.startswith("--config=")]
    if len(found) > 1:
        raise ConfigError("--config is given more than once; vLLM reads one file")
    return found[0] if found else None


def _config_path(arguments: tuple[str, ...], position: int) -> str:
    word = arguments[position]
    path = word.partition("=")[2] if word != "--config" else "".join(arguments[position + 1 : position + 2])
    if not path:
        raise ConfigError("--config has no file behind it")
    return path


def _given(arguments: tuple[str, ...], name: str) -> str:
    """The value of an option; as in argparse the last one counts. "" where there is none."""
    value = ""
    for position, word in enumerate(arguments):
        option, has_value, behind = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            value = behind if has_value else "".join(arguments[position + 1 : position + 2])
    return value


def _positional(arguments: tuple[str, ...]) -> str:
    return arguments[0] if arguments and not arguments[0].startswith("-") else ""


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        return ""
    try:
        return str(value)
    except ValueError as error:  # of a number, by Python's own limit
        raise ConfigError(f"a number in the config file: {error}") from error


def _port(text: str) -> int:
    try:
        port = int(text or DEFAULT_PORT)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {text}: expected a number from 0 to 65535")
    return port


def _tls(certificate: str, required: str) -> Tls:
    if not certificate:
        return "none"
    return "server" if required in ("", "0") else "mutual"  # ssl.CERT_NONE is 0


def _seconds(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError as error:
        raise ConfigError(f"--shutdown-timeout {text}: expected seconds") from error
