"""The plan: what a change of values asks for, without Docker and without files."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightkeeper.supervisor import weights
from weightkeeper.supervisor.plan import Nothing, Recreate, Restart, applied, plan, same
from weightkeeper.supervisor.project import ConfigFile, Service, Snapshot

FILE = Path("/project/engine.yaml")
DEFINITION = {
    "command": ["--config", "/config/engine.yaml"],
    "environment": {"LEVEL": "one", "HF_TOKEN": "hf_old"},
    "image": "engine:1",
    "depends_on": {"sidecar": {"condition": "service_healthy"}},
}


def engine(
    values: Mapping[str, Any] | None = None, fault: str = "", name: str = "engine", **definition: Any
) -> Service:
    values = None if fault else {"model": "/model", "max-model-len": 2048} | dict(values or {})
    return Service(name, DEFINITION | definition, True, ConfigFile(FILE, values, fault))


def project(*services: Service, **shared: Any) -> Snapshot:
    shared = {"networks": {"default": {}}, "volumes": {}} | shared
    return Snapshot("test", {service.name: service for service in services}, shared)


def lines(old: Snapshot, new: Snapshot) -> list[str]:
    return [str(action) for action in plan(old, new)]


def test_equal_snapshots_ask_for_nothing():
    """No difference, no action."""
    assert plan(project(engine()), project(engine())) == []


def test_the_order_of_options_asks_for_nothing():
    """Mappings are compared, not their order."""
    one = engine({"hf-overrides": {"a": 1, "b": [1, 2]}, "seed": 0})
    other = engine({"seed": 0, "hf-overrides": {"b": [1, 2], "a": 1}})
    assert plan(project(one), project(other)) == []


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ({}, {"max-model-len": 1024}, "engine.yaml max-model-len 2048 → 1024"),
        ({"seed": 1}, {"max-model-len": 1024, "seed": 2}, "engine.yaml max-model-len 2048 → 1024, seed 1 → 2"),
        ({}, {"enforce-eager": True}, "engine.yaml enforce-eager (unset) → true"),
        ({"enforce-eager": True}, {}, "engine.yaml enforce-eager true → (unset)"),
        ({"enforce-eager": True}, {"enforce-eager": 1}, "engine.yaml enforce-eager true → 1"),
        ({"revision": "main"}, {"revision": None}, f"engine.yaml revision main → null {weights.NOTE}"),
        ({"middleware": ["a"]}, {"middleware": ["a", "b"]}, 'engine.yaml middleware ["a"] → ["a", "b"]'),
        ({"max-model-len": "32k"}, {"max-model-len": "32K"}, "engine.yaml max-model-len 32k → 32K"),
        ({"api-key": "old"}, {"api-key": "new"}, "engine.yaml api-key (hidden) → (hidden)"),
        ({"max-num-batched-tokens": 1}, {"max-num-batched-tokens": 2}, "engine.yaml max-num-batched-tokens 1 → 2"),
        ({"x": "two\nlines"}, {"x": ""}, "engine.yaml x two lines → ''"),
    ],
)  # fmt: skip
def test_a_changed_option_restarts_with_both_values(before, after, cause):
    """The cause names each option that differs, its old and its new value."""
    assert plan(project(engine(before)), project(engine(after))) == [Restart("engine", cause)]


def test_the_log_line_of_a_restart_is_stable_text():
    """What the log shows is what people grep for."""
    old, new = project(engine()), project(engine({"max-model-len": 1024}))
    assert lines(old, new) == ["restart engine: engine.yaml max-model-len 2048 → 1024"]


@pytest.mark.parametrize("option", ["dtype", "tensor-parallel-size", "no-enable-lora", "hf-overrides.rope_theta"])
def test_an_option_that_shapes_the_weights_says_so(option):
    """Whoever changes such an option learns that the weights held are not the ones the engine will ask for."""
    [action] = plan(project(engine()), project(engine({option: "x"})))
    assert action.cause == f"engine.yaml {option} (unset) → x (shapes the weights: `make load` prepares them)"


def test_the_note_on_weights_is_given_once():
    """Two such options, one note."""
    [action] = plan(project(engine()), project(engine({"dtype": "half", "model": "/other"})))
    assert action.cause.count("make load") == 1


def test_a_long_value_is_cut():
    """A log line stays a line."""
    [action] = plan(project(engine()), project(engine({"hf-overrides": {"a": "b" * 1000}})))
    assert len(action.cause) < 250


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"command": ["--config", "/config/engine.yaml", "--seed", "1"]}, "command"),
        ({"environment": {"LEVEL": "two", "HF_TOKEN": "hf_old"}}, "environment LEVEL"),
        ({"environment": {"HF_TOKEN": "hf_new"}}, "environment HF_TOKEN LEVEL"),
        ({"environment": None}, "environment HF_TOKEN LEVEL"),
        ({"image": "engine:2"}, "image engine:1 → engine:2"),
        ({"image": "engine:2", "shm_size": "1073741824"}, "image engine:1 → engine:2, shm_size null → 1073741824"),
        ({"volumes": [{"type": "bind"}]}, "volumes"),
    ],
)
def test_a_changed_definition_recreates_and_names_the_fields(change, cause):
    """Names of fields and variables, no values of environments."""
    assert plan(project(engine()), project(engine(**change))) == [Recreate("engine", cause)]


def test_no_secret_of_an_environment_is_in_a_cause():
    """A token that was changed is named, not shown."""
    [action] = plan(project(engine()), project(engine(environment={"LEVEL": "one", "HF_TOKEN": "hf_new"})))
    assert "hf_" not in action.cause
    assert action == Recreate("engine", "environment HF_TOKEN")


def test_both_kinds_of_change_are_one_recreation():
    """A new container reads the new file anyway."""
    new = project(engine({"max-model-len": 1024}, image="engine:2"))
    assert lines(project(engine()), new) == [
        "recreate engine: image engine:1 → engine:2; engine.yaml max-model-len 2048 → 1024"
    ]


@pytest.mark.parametrize("field", ["build", "depends_on", "develop", "profiles", "pull_policy", "scale"])
def test_fields_that_make_no_other_container_ask_for_nothing(field):
    """Compose itself would leave the container alone."""
    assert plan(project(engine()), project(engine(**{field: "other"}))) == []


def test_services_without_the_label_are_never_acted_upon():
    """A change of the sidecar is said, with the command that applies it."""
    old = project(Service("sidecar", {"image": "a"}), engine())
    new = project(Service("sidecar", {"image": "b"}), engine({"max-model-len": 1}))
    assert plan(old, new) == [
        Nothing("sidecar", "image a → b changed, not supervised; apply it with `docker compose up -d sidecar`"),
        Restart("engine", "engine.yaml max-model-len 2048 → 1"),
    ]


@pytest.mark.parametrize("is_added", [True, False])
def test_adding_or_removing_the_label_is_left_to_the_user(is_added):
    """The running container was made under the other decision."""
    plain, labelled = Service("engine", DEFINITION), engine(labels={"weightkeeper.supervise": "true"})
    old, new = (plain, labelled) if is_added else (labelled, plain)
    assert lines(project(old), project(new)) == [
        "keep engine: labels weightkeeper.supervise changed, not supervised;"
        " apply it with `docker compose up -d engine`"
    ]


def test_services_that_come_and_go_are_said():
    """Starting and removing services is the user's."""
    assert lines(project(engine()), project(engine(name="second"))) == [
        "keep second: new in the project; apply it with `docker compose up -d second`",
        "keep engine: no longer in the project; end it with `docker compose rm -sf engine`",
    ]


def test_shared_sections_are_said():
    """A network or a volume belongs to more than one engine."""
    assert lines(project(engine()), project(engine(), volumes={"cache": {}})) == [
        "keep the containers: volumes cache changed; apply it with `docker compose up -d`"
    ]


def test_a_file_that_cannot_be_used_keeps_the_engine():
    """Neither a restart nor a recreation starts an engine on a broken file."""
    new = project(engine(fault="engine.yaml, line 2 column 1: bad", image="engine:2"))
    assert plan(project(engine()), new) == [Nothing("engine", "engine.yaml, line 2 column 1: bad")]


def test_a_file_broken_and_restored_causes_nothing():
    """What counts is what was applied last, not what lay there in between."""
    first, broken = project(engine()), project(engine(fault="empty"))
    assert plan(applied(first, broken), project(engine())) == []


def test_a_file_broken_and_changed_is_compared_with_what_was_applied():
    """The values of before the fault are the old ones."""
    after = applied(project(engine()), project(engine(fault="empty", image="engine:2")))
    assert lines(after, project(engine({"max-model-len": 7}, image="engine:2"))) == [
        "recreate engine: image engine:1 → engine:2; engine.yaml max-model-len 2048 → 7"
    ]


def test_a_file_that_was_broken_from_the_start_restarts_once_it_is_right():
    """Nobody knows what the engine runs with."""
    assert lines(project(engine(fault="empty")), project(engine())) == [
        "restart engine: engine.yaml can be used now; what the engine runs with is not known"
    ]


def test_a_fault_of_one_engine_does_not_stop_another():
    """Each engine has a file of its own."""
    old = project(engine(), engine(name="second"))
    new = project(engine(fault="empty"), engine({"seed": 1}, name="second"))
    assert lines(old, new) == ["keep engine: empty", "restart second: engine.yaml seed (unset) → 1"]


def test_what_waits_is_not_applied():
    """An action that was not carried out is planned again."""
    old, new = project(engine()), project(engine({"seed": 1}))
    assert plan(applied(old, new, waiting={"engine"}), new) == plan(old, new)
    assert plan(applied(old, new), new) == []


def test_every_row_of_the_table_has_a_reason():
    """The table is for people too."""
    assert all(reason and reason == reason.strip() for reason in weights.SHAPING.values())


@pytest.mark.vllm
def test_every_row_of_the_table_is_an_option_of_vllm():
    """A misspelled row would never match."""
    script = (
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser as make\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
        "print(*{text for action in make(Parser())._actions for text in action.option_strings})"
    )
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    known = {text.removeprefix("--") for text in done.stdout.split()}
    assert "max-model-len" in known
    assert weights.SHAPING.keys() - known == set()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_a_value_is_the_same_as_itself(value):
    """Not-a-number included: an unchanged file never causes a restart."""
    assert same(value, value)


@given(st.dictionaries(st.sampled_from(["a", "b", "max-model-len"]), values))
def test_a_plan_ends_at_its_own_result(options):
    """Once a plan is carried out, the same files ask for nothing more."""
    old, new = project(engine()), project(engine(options))
    assert len(plan(old, new)) <= 1
    assert plan(applied(old, new), new) == []
