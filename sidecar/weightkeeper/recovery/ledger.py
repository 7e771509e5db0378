"""Side effects, in a file of their own: what the agent's tools have done to the world outside, and cannot be undone.

It stands for a payment, a mail, a ticket. Each call is kept; a call with an idempotency key has its effect once.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weightkeeper.errors import LedgerError
from weightkeeper.recovery.database import open_database

_TABLES = """
CREATE TABLE IF NOT EXISTS effects (id INTEGER PRIMARY KEY, key TEXT UNIQUE, job TEXT NOT NULL, step INTEGER NOT NULL,
                                    body TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS repeats (id INTEGER PRIMARY KEY, key TEXT NOT NULL, at REAL NOT NULL);
"""


class Effect(msgspec.Struct, frozen=True):
    """One thing done. `at` is in seconds of `time.monotonic`; without a key, it is done each time it is asked for."""

    key: str | None
    job: str
    step: int
    body: str
    at: float


class Ledger:
    """The file at `path`; it is made where it is missing. Several processes may use it."""

    def __init__(self, path: Path):
        self._path = path
        self._database = open_database(path, _TABLES)

    def record(self, job: str, step: int, body: str, key: str | None) -> bool:
        """Have an effect; it is on the disk when this returns.

        Returns:
            False where this key had its effect before; then nothing happens but that the call is kept.

        Raises:
            LedgerError: the key was used for another effect.
        """
        now = time.monotonic()
        self._database.execute("BEGIN IMMEDIATE")
        try:
            row = self._database.execute("SELECT job, step, body FROM effects WHERE key = ?", (key,)).fetchone()
            if row is None:
                self._database.execute("INSERT INTO effects (key, job, step, body, at) VALUES (?, ?, ?, ?, ?)",
                                       (key, job, step, body, now))  # fmt: skip
            elif row != (job, step, body):
                raise LedgerError(f"{self._path}: the key {key} belongs to step {row[1]} of {row[0]} with another body")
            else:
                self._database.execute("INSERT INTO repeats (key, at) VALUES (?, ?)", (key, now))
            self._database.execute("COMMIT")
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        return row is None

    def effects(self, job: str) -> Iterator[Effect]:
        """Everything done for a job, in order."""
        query = "SELECT key, job, step, body, at FROM effects WHERE job = ? ORDER BY id"
        for row in self._database.execute(query, (job,)):
            yield Effect(*row)

    def repeats(self) -> int:
        """Calls whose key had its effect before."""
        return self._database.execute("SELECT count(*) FROM repeats").fetchone()[0]

    def close(self) -> None:
        self._database.close()
