"""weightkeeper's own loader, which dies by SIGKILL at a stage: once, the first time that it comes there.

WEIGHTKEEPER_TEST_KILL_AT is a stage of its progress, or `publish` (the message is sent, its descriptors are not).
WEIGHTKEEPER_TEST_KILLED is a file that is there once it has happened.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from weightkeeper import loader

STAGE = os.environ["WEIGHTKEEPER_TEST_KILL_AT"]
DONE = Path(os.environ["WEIGHTKEEPER_TEST_KILLED"])


def die_once() -> None:
    if not DONE.exists():
        DONE.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class DyingChannel(loader.KeeperChannel):
    def progress(self, stage: str, done: int = 0, total: int = 0) -> None:
        super().progress(stage, done, total)
        if stage == STAGE and (done or not total):
            die_once()

    def publish(self, message: Any, descriptors: list[int]) -> None:
        if STAGE == "publish" and not DONE.exists():
            self._channel.send(message)
            die_once()
        super().publish(message, descriptors)


loader.KeeperChannel = DyingChannel

if __name__ == "__main__":
    sys.exit(loader.main())
