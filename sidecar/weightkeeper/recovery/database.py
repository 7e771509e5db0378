"""SQLite files that survive any kill: what is committed is on the disk (write-ahead log, `synchronous=FULL`)."""

import sqlite3
from pathlib import Path

from weightkeeper.errors import ConfigError

LOCK_SECONDS = 30.0
"""For another process to end its transaction."""


def open_database(path: Path, tables: str) -> sqlite3.Connection:
    """The file at `path` with these tables; it is made where it is missing.

    Raises:
        ConfigError: it cannot be opened or written, or is damaged.
    """
    try:
        database = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.executescript(tables)
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; give a directory that can be written, or one without this file") from error
    return database
