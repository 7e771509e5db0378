"""Everything that descends from one server: found, watched, and ended before the next one starts."""

import contextlib
import logging
import math
import os
import select
import signal
import time
from dataclasses import dataclass

import anyio

from weightkeeper.launcher import processes, stamp
from weightkeeper.launcher.processes import Process
from weightkeeper.launcher.reaping import Exit, Reaper

LOOK_SECONDS = 0.5
"""Between two looks for new processes. The end of a known one is seen at once."""

ESTABLISHED_SECONDS = 1.0
"""A fork of the server that was seen for so long is one of its parts, and no helper on its way to another program."""

SAY_SECONDS = 10.0
END_SECONDS = 60.0
"""After which what cannot be killed is left behind; a process in the GPU driver can take long."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    process: Process
    pidfd: int
    forked_since: float = math.inf
    forked_until: float = 0.0
    seen_at: float = 0.0


class Tree:
    """The processes of the server `pid`, also those that outlive it.

    A process belongs to it that has its number, or was seen below it, or below one that was, or that has its session.

    Args:
        number: that the server has given to all that it started, see `stamp`.
    """

    def __init__(self, pid: int, number: int, reaper: Reaper):
        self._server = pid
        self._number = number
        self._others: set[tuple[int, int]] = set()
        self._stack = 0
        self._reaper = reaper
        self._members: dict[tuple[int, int], _Member] = {}
        self._by_pidfd: dict[int, _Member] = {}
        self._ended: set[tuple[int, int]] = set()
        self._marked: set[int] = set()
        self._is_blind = False
        self._ends = select.epoll()
        self.look()

    @property
    def names(self) -> dict[int, str]:
        """pid → name, of those that live."""
        return {each.pid: each.name for each in self.look()}

    def mark(self, pid: int) -> None:
        """Its processes announced themselves: the server does not work without this one."""
        if pid not in self._marked and pid != self._server:
            self._marked.add(pid)
            self.look()  # it may not live until the next one

    def look(self) -> list[Process]:
        """Find new members; those that live. Where there is no room to look, those that are known."""
        try:
            table = processes.table()
            stamped = self._stamped(table)
        except OSError as error:
            if not self._is_blind:
                logger.error("the server's processes cannot be seen: %s", error.strerror)
            self._is_blind = True
            return self._known()
        self._is_blind = False
        known = {key[0] for key in self._members if key[0] in table and table[key[0]].key == key}
        session = {each.pid for each in table.values() if each.session == self._server}
        found = processes.with_descendants(known | session | stamped | {self._server}, table)
        self._ended &= {each.key for each in found}
        for each in found:
            if each.key in self._ended:
                continue  # a zombie that its parent leaves, whose end would be seen again at once
            member = self._members.get(each.key) or self._admit(each)
            if member is not None:
                self._see(member, each)
        return [each for each in found if each.is_alive]

    async def death(self) -> tuple[Process, Exit | None]:
        """Wait for the end of a process without which the server cannot work.

        How it ended is seen only as long as no parent but the launcher has reaped it; None after that.
        """
        while True:
            with anyio.move_on_after(LOOK_SECONDS):
                await anyio.wait_readable(self._ends)
            for number, _ in self._ends.poll(0):
                member = self._by_pidfd[number]
                after = None
                with contextlib.suppress(OSError):
                    after = processes.process(member.process.pid)
                self._forget(number)
                is_there = after is not None and after.key == member.process.key
                how = Exit.of(after.code) if is_there else self._reaper.ended(member.process.pid, member.seen_at)
                if self._is_loss(member, how):
                    return member.process, how
            self.look()

    async def end(self) -> None:
        """Kill what lives and wait until nothing does. What cannot be killed in time is named in the log."""
        began = said = time.monotonic()
        quiet = 0
        while quiet < 2:  # twice, since one may be forked while the table is being read
            members = self.look()
            if not members and not self._is_blind:
                quiet += 1
                continue
            quiet, now = 0, time.monotonic()
            for each in members:
                if now - began > processes.TRACKER_SECONDS or not processes.is_tracker(each.pid):
                    self._kill(each)
            names = ", ".join(f"{each} in state {each.state}" for each in members)
            if now - began > END_SECONDS:
                logger.error("left behind after %.0f s: %s; it may hold memory that is missing now", END_SECONDS, names)
                break
            if now - said > SAY_SECONDS:
                said = now
                logger.warning("waiting for the end of %s", names)
            await anyio.sleep(0.005 if now - began < 0.5 else 0.05)
            self._reaper.reap()

    def close(self) -> None:
        """Let go of it. Where `end` was not reached, by a fault of ours, what lives is killed and not waited for."""
        for each in self.look():
            self._kill(each)
        for number in list(self._by_pidfd):
            self._forget(number)
        self._ends.close()

    def _stamped(self, table: dict[int, Process]) -> set[int]:
        """Those with our number. Each process is asked once: it has its number from the first moment, or never."""
        keys = {each.key for each in table.values()}
        self._others &= keys
        found = set()
        for key in keys - self._others - self._members.keys():
            if stamp.of(key[0]) == self._number:
                found.add(key[0])
            else:
                self._others.add(key)
        return found

    def _known(self) -> list[Process]:
        ended = {number for number, _ in self._ends.poll(0)}
        return [each.process for number, each in self._by_pidfd.items() if number not in ended]

    def _admit(self, process: Process) -> _Member | None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return None  # it has ended since
        if not _is_same(process):
            os.close(pidfd)
            return None  # and its pid is another's
        member = self._members[process.key] = _Member(process, pidfd)
        self._by_pidfd[pidfd] = member
        self._ends.register(pidfd, select.EPOLLIN)
        return member

    def _kill(self, process: Process) -> None:
        member = self._members.get(process.key)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is another user's by now; it will be named
            if member is not None:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            elif _is_same(process):  # there is no room for a pidfd, or it has ended
                os.kill(process.pid, signal.SIGKILL)

    def _see(self, member: _Member, process: Process) -> None:
        if not process.is_alive:
            return
        now = time.monotonic()
        member.process, member.seen_at = process, now
        if process.stack == 0:
            return  # it is ending, or we may not look into it: no word of what it was before
        if process.pid == self._server:
            self._stack = process.stack
        elif process.stack == self._stack:
            member.forked_since, member.forked_until = min(member.forked_since, now), now
        else:
            member.forked_since = math.inf

    def _is_loss(self, member: _Member, how: Exit | None) -> bool:
        """The server's own end is seen elsewhere; one with exit code 0 was meant."""
        if member.process.pid == self._server or how == Exit(code=0):
            return False
        return member.process.pid in self._marked or member.forked_until - member.forked_since >= ESTABLISHED_SECONDS

    def _forget(self, pidfd: int) -> None:
        member = self._by_pidfd.pop(pidfd)
        self._members.pop(member.process.key, None)
        self._ended.add(member.process.key)
        self._ends.unregister(pidfd)
        os.close(pidfd)


def _is_same(process: Process) -> bool:
    """Whether its pid is still its own; False where there is no room to look."""
    with contextlib.suppress(OSError):
        now = processes.process(process.pid)
        return now is not None and now.key == process.key
    return False
