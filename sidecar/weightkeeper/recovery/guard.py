"""Ends what a benchmark has started when it is killed itself, and cannot.

It waits for the end of a pipe whose other end the benchmark alone has.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from weightkeeper.recovery import processes

END_SECONDS = 2 * processes.END_SECONDS


class Guard:
    """Guards processes with a mark, and a directory of theirs, until it is closed or this process is gone."""

    def __init__(self, mark: str, directory: Path):
        environment = {name: value for name, value in os.environ.items() if name != processes.MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, mark, str(directory)],
            stdin=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End it, and what is left of all that it guards."""
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    processes.kill_marked(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
