"""What is known of the engine at this moment, for `status`."""

import os
import time

from weightkeeper import __version__
from weightkeeper.launcher.arguments import Configuration
from weightkeeper.launcher.forking import Template
from weightkeeper.launcher.messages import Ended, EngineStatus, State
from weightkeeper.launcher.templates import Templates
from weightkeeper.launcher.tree import Tree
from weightkeeper.launcher.warden import Warden


class EngineState:
    """Written by the loop, read by the control socket."""

    def __init__(self, name: str):
        self.name = name
        self.now: State = "warming"
        self.cause = ""
        self.generation = 0
        self.pid = 0
        self.address = ""
        self.tree: Tree | None = None
        self.configuration: Configuration | None = None
        self.restarts: dict[str, int] = {}
        self.last_exit: Ended | None = None
        self.phases: dict[str, float] = {}
        self.start_seconds = 0.0
        self.next_start_at = 0.0
        self.refusal = ""
        self.refused_at = 0.0
        self._since = self._started_at = time.time()

    def enter(self, state: State, cause: str = "", delay: float = 0.0) -> None:
        """`delay` is seconds until the next start, of the state `waiting`."""
        self.now = state
        self.cause = cause
        self._since = time.time()
        self.next_start_at = self._since + delay if state == "waiting" else 0.0

    def count(self, kind: str) -> None:
        self.restarts[kind] = self.restarts.get(kind, 0) + 1

    def refuse(self, reason: str) -> None:
        self.refusal, self.refused_at = reason, time.time() if reason else 0.0

    def status(self, templates: Templates, warden: Warden) -> EngineStatus:
        """All of it as a message."""
        current, configuration = templates.current, self.configuration
        template = current if isinstance(current, Template) else None
        return EngineStatus(
            name=self.name,
            version=__version__,
            state=self.now,
            since=self._since,
            started_at=self._started_at,
            launcher=os.getpid(),
            generation=self.generation,
            pid=self.pid,
            processes=self.tree.names if self.tree else {},
            model=configuration.model if configuration else "",
            address=self.address,
            config=configuration.config if configuration else "",
            restarts=dict(self.restarts),
            last_exit=self.last_exit,
            cause=self.cause,
            next_start_at=self.next_start_at,
            phases=dict(self.phases),
            start_seconds=self.start_seconds,
            prefork=template is not None,
            why_plain=templates.why_plain,
            template=template.process.pid if template else 0,
            threads=template.threads if template else 0,
            warden=warden.pid,
            refusal=self.refusal,
            refused_at=self.refused_at,
        )
