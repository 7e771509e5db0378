"""What one agent works on, and the files that it leaves; known to those who watch it without being one."""

from dataclasses import dataclass
from pathlib import Path

STATE_FILE = "agent.sqlite"
LEDGER_FILE = "ledger.sqlite"


@dataclass(frozen=True, slots=True)
class Settings:
    """What one agent works on.

    Attributes:
        directory: of its state file and the ledger.
        url: of the API, with `/v1`.
        model: as the server names it.
        job: name of the job; the same name gives the same questions.
        steps: of the job.
        tokens: asked for in each step.
        timeout_s: for each read and write of a request.
        patience_s: after which a step without an answer ends the agent; it can be started again.
        longest_wait_s: between two tries.
    """

    directory: Path
    url: str
    model: str
    job: str = "inventory"
    steps: int = 12
    tokens: int = 32
    timeout_s: float = 60.0
    patience_s: float = 600.0
    longest_wait_s: float = 0.25
