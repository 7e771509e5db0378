"""What the agent knows, in SQLite: jobs, steps, tries and idempotency keys. What is here survives any kill.

Every method is one transaction that is on the disk when it returns.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from weightkeeper.errors import ConfigError
from weightkeeper.recovery.answers import Answer
from weightkeeper.recovery.database import open_database

Kind = Literal["started", "resumed", "asked", "answered", "cut", "failed", "effect", "repeat", "finished"]
"""Of an event: an agent began a job, or went on with it; a request was sent; it was answered, cut short, or failed; a
side effect was had, or had been had before; the job is done."""

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (name TEXT PRIMARY KEY, steps INTEGER NOT NULL, tokens INTEGER NOT NULL,
                                 finished_at REAL);
CREATE TABLE IF NOT EXISTS steps (job TEXT NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL,
                                  tries INTEGER NOT NULL DEFAULT 0, text TEXT, token_ids TEXT, finish_reason TEXT,
                                  effected INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (job, number));
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, at REAL NOT NULL, pid INTEGER NOT NULL, job TEXT NOT NULL,
                                   step INTEGER NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


class Event(msgspec.Struct, frozen=True):
    """One moment of a job. `at` is in seconds of `time.monotonic`, which all processes of a machine share."""

    at: float
    pid: int
    step: int
    kind: Kind
    detail: str = ""


class Step(msgspec.Struct, frozen=True):
    """One step of a job as it is now. `key` is for its side effect, and made before anything is asked."""

    number: int
    key: str
    tries: int = 0
    answer: Answer | None = None
    effected: bool = False


class Job(msgspec.Struct, frozen=True):
    """A job as it is now: `steps` are those begun."""

    name: str
    length: int
    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    finished: bool


class State:
    """The agent's file at `path`; it is made where it is missing."""

    def __init__(self, path: Path):
        self.path = path
        self._database = open_database(path, _TABLES)

    def begin(self, job: str, steps: int, tokens: int) -> None:
        """Take up a job, new or begun.

        Raises:
            ConfigError: it was begun with other numbers.
        """
        with self._transaction():
            row = self._database.execute("SELECT steps, tokens FROM jobs WHERE name = ?", (job,)).fetchone()
            if row is None:
                self._database.execute("INSERT INTO jobs (name, steps, tokens) VALUES (?, ?, ?)", (job, steps, tokens))
            elif row != (steps, tokens):
                raise ConfigError(
                    f"{self.path}: the job {job} was begun with {row[0]} steps of {row[1]} tokens, not {steps} of "
                    f"{tokens}; give the same numbers, or another name"
                )
            self._event(job, -1, "started" if row is None else "resumed")

    def step(self, job: str, number: int) -> Step:
        """A step as it is now; a new one gets its key."""
        with self._transaction():
            self._database.execute(
                "INSERT OR IGNORE INTO steps (job, number, key) VALUES (?, ?, ?)", (job, number, secrets.token_hex(16))
            )
            return self._steps(job, " AND number = ?", number)[0]

    def asked(self, job: str, number: int) -> None:
        """A request is about to be sent; it counts as a try from now on."""
        with self._transaction():
            self._database.execute("UPDATE steps SET tries = tries + 1 WHERE job = ? AND number = ?", (job, number))
            self._event(job, number, "asked")

    def answered(self, job: str, number: int, answer: Answer) -> None:
        """The step has its result."""
        with self._transaction():
            self._database.execute(
                "UPDATE steps SET text = ?, token_ids = ?, finish_reason = ? WHERE job = ? AND number = ?",
                (answer.text, msgspec.json.encode(answer.token_ids).decode(), answer.finish_reason, job, number),
            )
            self._event(job, number, "answered")

    def effected(self, job: str, number: int, is_new: bool) -> None:
        """The ledger said that the step's side effect was had, now or before."""
        with self._transaction():
            self._database.execute("UPDATE steps SET effected = 1 WHERE job = ? AND number = ?", (job, number))
            self._event(job, number, "effect" if is_new else "repeat")

    def finish(self, job: str) -> None:
        with self._transaction():
            self._database.execute("UPDATE jobs SET finished_at = ? WHERE name = ?", (time.monotonic(), job))
            self._event(job, -1, "finished")

    def event(self, job: str, number: int, kind: Kind, detail: str = "") -> None:
        """Keep a moment that changes nothing else."""
        with self._transaction():
            self._event(job, number, kind, detail)

    def job(self, name: str) -> Job | None:
        """Everything known of a job; None before it was begun."""
        with self._transaction("DEFERRED"):  # a look, which must not hold up the agent
            row = self._database.execute("SELECT steps, finished_at FROM jobs WHERE name = ?", (name,)).fetchone()
            if row is None:
                return None
            query = "SELECT at, pid, step, kind, detail FROM events WHERE job = ? ORDER BY id"
            events = tuple(Event(*each) for each in self._database.execute(query, (name,)))
            return Job(name, row[0], tuple(self._steps(name)), events, row[1] is not None)

    def close(self) -> None:
        self._database.close()

    def _steps(self, job: str, where: str = "", *values: object) -> list[Step]:
        query = "SELECT number, key, tries, text, token_ids, finish_reason, effected FROM steps WHERE job = ?"
        found = []
        for number, key, tries, text, ids, reason, effected in self._database.execute(
            f"{query}{where} ORDER BY number", (job, *values)
        ):
            answer = None
            if text is not None:
                answer = Answer(text, msgspec.json.decode(ids, type=tuple[int, ...]), reason)
            found.append(Step(number, key, tries, answer, bool(effected)))
        return found

    def _event(self, job: str, number: int, kind: Kind, detail: str = "") -> None:
        self._database.execute(
            "INSERT INTO events (at, pid, job, step, kind, detail) VALUES (?, ?, ?, ?, ?, ?)",
            (time.monotonic(), os.getpid(), job, number, kind, detail),
        )

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._database.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only agent on a state file; the hold ends with the process, however that ends.

    Raises:
        ConfigError: another agent works on it.
    """
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{path}: another agent works on it; wait for its end, or give another directory") from error
    finally:
        os.close(descriptor)
