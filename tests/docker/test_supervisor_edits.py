"""Two hundred random edits, or STANDIN_EDITS, on one project, against a model of what should have happened."""

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from stand import Stand, by_rename, in_place, until

pytestmark = pytest.mark.docker

EDITS = int(os.environ.get("STANDIN_EDITS", "200"))

BAD = -1
"""A length that the check refuses."""


@dataclass(frozen=True)
class Wanted:
    """What the files say.

    Attributes:
        fault: text in place of the config file; None for no fault, "gone" for no file.
    """

    length: int = 2048
    seed: int = 0
    level: str = "one"
    b: int = 2
    fault: str | None = None


@dataclass
class Model:
    """One project, what is applied to it, and what was tried in vain.

    Attributes:
        said: the fault that was said last, by its text.
    """

    stand: Stand
    compose: str
    wanted: Wanted = field(default_factory=Wanted)
    applied: Wanted = field(default_factory=Wanted)
    tried: tuple[Any, ...] | None = None
    left: int = EDITS
    counted: dict[str, int] = field(default_factory=dict)
    after: tuple[Any, ...] = ()
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def edit(self, wanted: Wanted, is_renamed: bool, is_reordered: bool) -> None:
        """Write what differs, in a form that is new each time, wait for the answer and compare."""
        number = next(self.numbers)
        before = self.after or self.seen()
        save = by_rename if is_renamed else in_place
        if (wanted.length, wanted.seed, wanted.fault) != (self.wanted.length, self.wanted.seed, self.wanted.fault):
            self._write_config(wanted, save, number, is_reordered)
        if wanted.level != self.wanted.level:
            save(
                self.stand.compose_yaml, self.compose.replace("LEVEL:-one", f"LEVEL:-{wanted.level}") + f"# {number}\n"
            )
        if wanted.b != self.wanted.b or wanted == self.wanted:
            save(self.stand.directory / "engine.env", f"# {number}\nA=1\nB={wanted.b}\n")
        self.wanted = wanted
        self.left -= 1
        self.compare(before)

    def _write_config(self, wanted: Wanted, save: Any, number: int, is_reordered: bool) -> None:
        file = self.stand.engine_yaml
        if wanted.fault == "gone":
            file.unlink(missing_ok=True)
        elif wanted.fault is not None:
            save(file, wanted.fault)
        else:
            lines = ["model: /model", f"max-model-len: {wanted.length}", f"seed: {wanted.seed}", f"# {number}"]
            save(file, "\n".join(reversed(lines) if is_reordered else lines) + "\n")

    def seen(self) -> tuple[Any, ...]:
        """Number of log lines, of records; engine and sidecar, each with its start; what the server has read."""
        names = [f"{self.stand.name}-{service}-1" for service in ("engine", "sidecar")]
        done = subprocess.run(["docker", "inspect", *names], capture_output=True, text=True, check=True)
        starts = [(one["Id"], one["State"]["StartedAt"]) for one in json.loads(done.stdout)]
        return len(self.stand.messages()), len(self.records()), *starts, self.stand.options()

    def records(self) -> list[dict[str, Any]]:
        file = self.stand.state / "history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def expected(self) -> tuple[str, list[tuple[str, str]]]:
        """How the last line of the log begins, and the action and result of each new record."""
        wanted, applied = self.wanted, self.applied
        content = (wanted.length, wanted.seed, wanted.level, wanted.b)
        if wanted.fault is not None:
            return "keep engine: |nothing to do: ", []
        if content == self.tried:
            return "nothing to do: ", []
        if replace(wanted, fault=None) == applied:
            return "nothing to do: ", []
        if (wanted.level, wanted.b) != (applied.level, applied.b):
            return "engine healthy", [("recreate", "healthy")]
        if wanted.length == BAD:
            return "engine goes on as it is", [("reload", "refused")]
        return "engine healthy", [("reload", "healthy")]

    def compare(self, before: tuple[Any, ...]) -> None:
        beginnings, actions = self.expected()

        def look() -> bool:
            new = self.stand.messages()[before[0] :]
            return bool(new) and any(new[-1].startswith(text) for text in beginnings.split("|"))

        until(look, lambda: f"{beginnings} for {self.wanted} on {self.applied} in\n{self.stand.log.read_text()}")
        lines, _, engine, sidecar, served = self.after = self.seen()
        assert [(one["action"], one["result"]) for one in self.records()[before[1] :]] == actions, self.wanted
        assert sidecar == before[3]
        assert (engine == before[2]) is (actions[:1] != [("recreate", "healthy")])
        is_new = ("reload", "healthy") in actions or ("recreate", "healthy") in actions
        assert (served["pid"] != before[4]["pid"] or engine != before[2]) is is_new
        assert lines - before[0] == (2 if actions else 1), self.stand.messages()[before[0] :]
        if actions and actions[0][1] == "healthy":
            self.applied, self.tried = self.wanted, None
        elif actions:
            self.tried = (self.wanted.length, self.wanted.seed, self.wanted.level, self.wanted.b)
        elif self.wanted.fault is None and self.wanted == self.applied:
            self.tried = None
        assert (served["max-model-len"], served["seed"]) == (str(self.applied.length), str(self.applied.seed))
        for action, _ in actions:
            self.counted[action] = self.counted.get(action, 0) + 1


MODEL: list[Model] = []


class Edits(RuleBasedStateMachine):
    """Each example goes on where the one before ended."""

    is_renamed = st.booleans()

    @property
    def model(self) -> Model:
        return MODEL[0]

    def is_bad(self, wanted: Wanted) -> bool:
        """A new container with a length that ends it at once is a test of its own."""
        is_other = (wanted.level, wanted.b) != (self.model.applied.level, self.model.applied.b)
        return wanted.length == BAD and is_other and wanted.fault is None

    def save(self, is_renamed: bool, is_reordered: bool = False, **values: Any) -> None:
        wanted = replace(self.model.wanted, **values)
        if not self.is_bad(wanted):
            self.model.edit(wanted, is_renamed, is_reordered)

    @precondition(lambda self: self.model.left > 0)
    @rule(length=st.sampled_from([1024, 2048, 4096, BAD]), is_renamed=is_renamed, is_reordered=st.booleans())
    def edit_the_length(self, length: int, is_renamed: bool, is_reordered: bool) -> None:
        self.save(is_renamed, is_reordered, length=length, fault=None)

    @precondition(lambda self: self.model.left > 0)
    @rule(seed=st.integers(0, 3), is_renamed=is_renamed)
    def edit_the_seed(self, seed: int, is_renamed: bool) -> None:
        self.save(is_renamed, seed=seed, fault=None)

    @precondition(lambda self: self.model.left > 0)
    @rule(fault=st.sampled_from(["gone", "", "a: [\n", "model: a\n b: c\n", "- list\n"]), is_renamed=is_renamed)
    def break_the_file(self, fault: str, is_renamed: bool) -> None:
        self.save(is_renamed, fault=fault)

    @precondition(lambda self: self.model.left > 0 and self.model.wanted.fault is not None)
    @rule(is_renamed=is_renamed)
    def restore_the_file(self, is_renamed: bool) -> None:
        wanted = self.model.applied
        self.save(is_renamed, length=wanted.length, seed=wanted.seed, fault=None)

    @precondition(lambda self: self.model.left > 0)
    @rule(level=st.sampled_from(["one", "two"]), is_renamed=is_renamed)
    def edit_the_definition(self, level: str, is_renamed: bool) -> None:
        self.save(is_renamed, level=level)

    @precondition(lambda self: self.model.left > 0)
    @rule(is_renamed=is_renamed)
    def edit_a_comment(self, is_renamed: bool) -> None:
        self.save(is_renamed)

    @precondition(lambda self: self.model.left > 0)
    @rule(level=st.sampled_from(["one", "two"]), b=st.integers(2, 3), seed=st.integers(0, 3))
    def check_out_a_branch(self, level: str, b: int, seed: int) -> None:
        self.save(True, level=level, b=b, seed=seed, length=2048, fault=None)

    @precondition(lambda self: self.model.left <= 0)
    @rule()
    def rest(self) -> None:
        """Enough edits were made."""


@pytest.mark.timeout(600)
def test_random_edits(prepared):
    """One action for a change that matters and none for the others; the sidecar is the same from first to last."""
    prepared.engine_yaml.write_text("model: /model\nmax-model-len: 2048\nseed: 0\n")
    prepared.up()
    prepared.supervise("--settle", "0.1")
    sidecar = prepared.start_of("sidecar")
    MODEL[:] = [Model(prepared, prepared.compose_yaml.read_text())]
    try:
        run_state_machine_as_test(
            Edits,
            settings=settings(
                max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
            ),
        )  # fmt: skip
        assert MODEL[0].left <= 0
        counted = MODEL[0].counted
        assert counted["reload"] > EDITS // 10
        assert counted["recreate"] > (10 if EDITS >= 200 else 0), counted
        assert prepared.start_of("sidecar") == sidecar
    finally:
        MODEL.clear()
