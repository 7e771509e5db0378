"""weightkeeper's own loader, which publishes what it has loaded once the file in WEIGHTKEEPER_TEST_UNTIL is there."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from weightkeeper import loader

WAIT_SECONDS = 180.0

UNTIL = Path(os.environ["WEIGHTKEEPER_TEST_UNTIL"])


class WaitingChannel(loader.KeeperChannel):
    def publish(self, message: Any, descriptors: list[int]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not UNTIL.exists():
            if time.monotonic() > deadline:
                sys.exit(f"{UNTIL} is not there after {WAIT_SECONDS:.0f} s")
            time.sleep(0.05)
        super().publish(message, descriptors)


loader.KeeperChannel = WaitingChannel

if __name__ == "__main__":
    sys.exit(loader.main())
