"""Files that a user names: read whole, within a limit, without waiting, and only where they are regular files."""

import os
import stat

from weightkeeper.errors import ConfigError


def regular(path: str, limit: int, purpose: str, oversize: str) -> bytes:
    """The content of a regular file. A FIFO or a device, which could block for ever, is refused.

    Args:
        limit: bytes that it may have.
        purpose: end of the message where it cannot be read.
        oversize: end of the message where it is over the limit.

    Raises:
        ConfigError: it cannot be read, is none of that kind, or is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: no regular file; {purpose}")
            with open(descriptor, "rb", closefd=False) as stream:
                content = stream.read(limit + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}; {purpose}") from error
    if len(content) > limit:
        raise ConfigError(f"{path}: over {limit} bytes; {oversize}")
    return content
