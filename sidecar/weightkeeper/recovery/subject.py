"""What a run was measured on, and with what: the facts that parts of one result have in common."""

from typing import Literal

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as NVML names it."""

    name: str
    uuid: str
    memory_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """What a run was measured on; nothing that names the machine or its user.

    Attributes:
        cores: that this process may use.
        driver: of the GPUs; empty where there is none.
        versions: package → version; packages that are not there are left out.
        disk_bytes_s: reading the model's files past the page cache; null where that was not allowed.
        page_cache_bytes_s: reading them when they lie in the page cache.
    """

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    disk_bytes_s: float | None = None
    page_cache_bytes_s: float | None = None


class Subject(msgspec.Struct, frozen=True):
    """What was served, with what, to whom. Parts of one result are equal in all of it.

    Attributes:
        model: its name, without the path.
        model_bytes: of its weight files.
        options: vLLM's, equal for all scenarios.
        steps: of the agent's job.
        tokens: of each answer.
        place: where engines ran: as processes of the benchmark, or in the containers of a compose project.
        has_agent: an agent worked while its engine was lost. Without one, a sample ends with the first right completion
            of a new engine; nothing is known, and nothing is claimed, of work that would have come back intact.
        savings: `WEIGHTKEEPER_SAVINGS` of our own engines; vLLM's own rows have none whatever this is.
    """

    model: str
    model_bytes: int
    options: dict[str, str | int | float | bool | None]
    steps: int
    tokens: int
    place: Literal["processes", "compose"] = "processes"
    has_agent: bool = True
    savings: str = "none"
