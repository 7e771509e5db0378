"""Work that may take long, beside the event loop: health checks, signals and the control socket go on."""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread.

    A caller that is cancelled does not wait for it, nor does the launcher at its end. What it does must therefore
    need no undoing.
    """
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
