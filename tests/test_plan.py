"""The plan: what a change of values asks for, without Docker and without files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightkeeper.harmless import HARMLESS
from weightkeeper.supervisor import variables
from weightkeeper.supervisor.builds import Build, Pair
from weightkeeper.supervisor.changes import same
from weightkeeper.supervisor.keepers import Keeper
from weightkeeper.supervisor.plan import Nothing, Recreate, Refuse, Reload, Restart, applied, plan
from weightkeeper.supervisor.programs import Program
from weightkeeper.supervisor.project import ConfigFile, Service, Snapshot
from weightkeeper.supervisor.provision import FROM_DISK, PUBLISHED

FILE = Path("/project/engine.yaml")
DEFINITION = {
    "command": ["--config", "/config/engine.yaml"],
    "environment": {"LEVEL": "one", "HF_TOKEN": "hf_old"},
    "image": "engine:1",
    "depends_on": {"sidecar": {"condition": "service_healthy"}},
}


LAUNCHER = Program(("weightkeeper",), "engine", ("--", "--config", "/config/engine.yaml"))
KEEPER = Keeper("sidecar", Program(("weightkeeper",), "serve", ("--config", "/config/engine.yaml")), FILE)


def engine(
    values: Mapping[str, Any] | None = None,
    fault: str = "",
    name: str = "engine",
    launcher: Program | None = None,
    keeper: Keeper | None = None,
    **definition: Any,
) -> Service:
    values = None if fault else {"model": "/model", "max-model-len": 2048} | dict(values or {})
    return Service(name, DEFINITION | definition, True, ConfigFile(FILE, values, fault), launcher, keeper)


def the(actions: list[Any]) -> tuple[type, str]:
    """Kind and cause of the only action."""
    [action] = actions
    return type(action), action.cause


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
        ({"revision": "main"}, {"revision": None}, "engine.yaml revision main → null"),
        ({"middleware": ["a"]}, {"middleware": ["a", "b"]}, 'engine.yaml middleware ["a"] → ["a", "b"]'),
        ({"max-model-len": "32k"}, {"max-model-len": "32K"}, "engine.yaml max-model-len 32k → 32K"),
        ({"api-key": "old"}, {"api-key": "new"}, "engine.yaml api-key (hidden) → (hidden)"),
        ({"max-num-batched-tokens": 1}, {"max-num-batched-tokens": 2}, "engine.yaml max-num-batched-tokens 1 → 2"),
        ({"x": "two\nlines"}, {"x": ""}, "engine.yaml x two lines → ''"),
    ],
)  # fmt: skip
def test_a_changed_option_restarts_with_both_values(before, after, cause):
    """The cause names each option that differs, its old and its new value."""
    assert the(plan(project(engine(before)), project(engine(after)))) == (Restart, cause)


def test_an_engine_behind_a_launcher_is_reloaded():
    """Its container stays; the changes are there by name and value."""
    old, new = engine({}, launcher=LAUNCHER), engine({"max-model-len": 1024}, launcher=LAUNCHER)
    [action] = plan(project(old), project(new))
    assert type(action) is Reload
    assert str(action) == "reload engine: engine.yaml max-model-len 2048 → 1024"
    assert [(change.name, change.before, change.after) for change in action.changes] == [
        ("max-model-len", "2048", "1024")
    ]
    assert action.keeper == ""


def test_the_log_line_of_a_restart_is_stable_text():
    """What the log shows is what people grep for."""
    old, new = project(engine()), project(engine({"max-model-len": 1024}))
    assert lines(old, new) == ["restart engine: engine.yaml max-model-len 2048 → 1024"]


OURS = {"load-format": "weightkeeper"}


@pytest.mark.parametrize(
    "option", ["dtype", "tensor-parallel-size", "no-enable-lora", "hf-overrides.rope_theta", "new"]
)
def test_other_weights_are_loaded_before_the_reload(option):
    """By the keeper that reads the same file; an option that nobody knows may shape them, too."""
    old = engine(OURS, launcher=LAUNCHER, keeper=KEEPER)
    new = engine({**OURS, option: "x"}, launcher=LAUNCHER, keeper=KEEPER)
    assert lines(project(old), project(new)) == [f"load, then reload engine: engine.yaml {option} (unset) → x"]


def test_other_weights_and_another_definition_are_a_load_and_a_recreation():
    """One action."""
    old = engine(OURS, launcher=LAUNCHER, keeper=KEEPER)
    new = engine({**OURS, "dtype": "half"}, launcher=LAUNCHER, keeper=KEEPER, image="engine:2")
    assert lines(project(old), project(new)) == [
        "load, then recreate engine: image engine:1 → engine:2; engine.yaml dtype (unset) → half"
    ]


def test_weights_that_come_from_disk_need_no_load():
    """An engine with another load format does not ask a keeper."""
    old, new = engine({}, keeper=KEEPER), engine({"dtype": "half"}, keeper=KEEPER)
    assert lines(project(old), project(new)) == ["restart engine: engine.yaml dtype (unset) → half"]


@pytest.mark.parametrize(
    ("extra", "kind", "note"),
    [
        ({}, Reload, f" {FROM_DISK}"),
        ({"publish": True, "fallback": False}, Reload, f" {PUBLISHED}"),
        (
            {"fallback": False}, Refuse,
            ": other weights, no keeper is in sight, and the engine may neither publish them nor read them from disk",
        ),
        ('{"fallback": false}', Refuse, None),
        ("no JSON", Reload, f" {FROM_DISK}"),
    ],
)  # fmt: skip
def test_other_weights_that_no_keeper_loads(extra, kind, note):
    """From disk, or published, where the engine may; refused where it could not start at all."""
    values = {**OURS, "model-loader-extra-config": extra}
    old, new = engine(values, launcher=LAUNCHER), engine({**values, "dtype": "half"}, launcher=LAUNCHER)
    [action] = plan(project(old), project(new))
    assert type(action) is kind
    assert note is None or action.cause == f"engine.yaml dtype (unset) → half{note}"


def test_a_keeper_that_reads_another_file_loads_nothing_for_this_engine():
    """It would load what that file says."""
    keeper = Keeper("sidecar", KEEPER.program, Path("/project/other.yaml"))
    old, new = engine(OURS, keeper=keeper), engine({**OURS, "dtype": "half"}, keeper=keeper)
    [action] = plan(project(old), project(new))
    assert (action.keeper, action.cause) == ("", f"engine.yaml dtype (unset) → half {FROM_DISK}")


@pytest.mark.parametrize(
    ("before", "after", "is_loaded"),
    [
        ({"fallback": True}, {"fallback": False}, False),
        ({}, {"mode": "copy", "release": False}, False),
        ({}, {"disk_load_format": "gguf"}, True),
        ({}, {"unknown": 1}, True),
        ({}, "text", True),
    ],
)
def test_of_our_own_loader_only_some_options_shape_weights(before, after, is_loaded):
    """What says how the keeper is asked makes no other weights."""
    name = "model-loader-extra-config"
    old, new = engine({**OURS, name: before}, keeper=KEEPER), engine({**OURS, name: after}, keeper=KEEPER)
    [action] = plan(project(old), project(new))
    assert bool(action.keeper) is is_loaded


ENV = Path("/project/engine.env")


def behind(text: str | None, *more: str, keeper: Keeper | None = KEEPER, **values: Any) -> Service:
    """An engine behind a launcher that reads engine.env with this text (one that cannot be used), and further ones."""
    files = [variables.parse(ENV, b"no assignment" if text is None else text.encode())]
    files += [variables.parse(ENV.with_name("more.env"), other.encode()) for other in more]
    environment = values.pop("environment", {})
    one = engine(OURS | values, launcher=LAUNCHER, keeper=keeper, environment=environment)
    return replace(one, env_files=tuple(files))


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("OMP_NUM_THREADS=4", "OMP_NUM_THREADS=8", "engine.env OMP_NUM_THREADS 4 → 8"),
        ("A=1", "A=1\nB=2\n", "engine.env B (unset) → 2"),
        ("A=1\nB=2", "B=", "engine.env A 1 → (unset), B 2 → ''"),
        ("HF_TOKEN=hf_a", "HF_TOKEN=hf_b", "engine.env HF_TOKEN changed"),
        ("", "my_password=x\nA_KEY=y\nB=1", "engine.env my_password changed, A_KEY changed, B (unset) → 1"),
        ("HTTPS_PROXY=http://a", "HTTPS_PROXY=http://me:pw@a", "engine.env HTTPS_PROXY changed"),
        ("VLLM_LOGGING_LEVEL=INFO", "VLLM_LOGGING_LEVEL=DEBUG", "engine.env VLLM_LOGGING_LEVEL INFO → DEBUG"),
    ],
)
def test_a_changed_variable_of_the_launcher_is_a_reload(before, after, cause):
    """With both values; of what looks like a secret only the name."""
    [action] = plan(project(behind(before)), project(behind(after)))
    assert (type(action), action.cause, action.keeper) == (Reload, cause, "")
    assert not any("hf_" in f"{change.before}{change.after}" for change in action.changes)


def test_comments_order_and_quotes_in_an_environment_file_ask_for_nothing():
    """Values are compared."""
    assert plan(project(behind("A=1\nB=2\n")), project(behind("# mine\r\nexport B='2'\r\n\r\nA = 1\r\n"))) == []


def test_what_counts_is_the_value_that_the_server_gets():
    """A later file goes over an earlier one, and both over the container's own environment."""
    assert plan(project(behind("A=1", "A=2")), project(behind("A=3", "A=2"))) == []
    assert lines(project(behind("A=1", "A=2")), project(behind("A=1", "B=2"))) == [
        "reload engine: engine.env A 2 → 1; more.env B (unset) → 2"
    ]
    same_environment = {"environment": {"A": "$$1"}}
    assert plan(project(behind("A=$1", **same_environment)), project(behind("", **same_environment))) == []


def test_both_files_of_an_engine_are_one_reload():
    """And with the definition one recreation."""
    old, new = behind("A=1"), behind("A=2", seed=1)
    assert lines(project(old), project(new)) == ["reload engine: engine.yaml seed (unset) → 1; engine.env A 1 → 2"]
    other = replace(new, definition={**new.definition, "shm_size": "1"})
    assert lines(project(old), project(other)) == [
        "recreate engine: shm_size null → 1; engine.yaml seed (unset) → 1; engine.env A 1 → 2"
    ]


def test_an_environment_file_that_cannot_be_used_keeps_the_engine():
    """Right again, it is compared with what was applied; where that is not known, it is read again."""
    [kept] = plan(project(behind("A=1")), project(behind(None, seed=1)))
    assert (type(kept), kept.cause) == (Nothing, f"{ENV}, line 1: expected NAME=VALUE")
    after = applied(project(behind("A=1")), project(behind(None)))
    assert plan(after, project(behind("A=1"))) == []
    assert lines(project(behind(None)), project(behind("A=1"))) == [
        "reload engine: engine.env can be used now; what the engine runs with is not known"
    ]


OTHER_X = "(the keeper of sidecar differs in VLLM_USE_X)"


@pytest.mark.parametrize(
    ("extra", "kind", "cause"),
    [
        ({}, Reload, f"engine.env VLLM_USE_X 0 → 1 {OTHER_X} {FROM_DISK}"),
        ({"publish": True}, Reload, f"engine.env VLLM_USE_X 0 → 1 {OTHER_X} {PUBLISHED}"),
        (
            {"fallback": False}, Refuse,
            "engine.env VLLM_USE_X 0 → 1: other weights, the keeper of sidecar differs in VLLM_USE_X, and the engine"
            " may neither publish them nor read them from disk; make them the same, or allow `publish` or `fallback` in"
            " model-loader-extra-config",
        ),
    ],
)  # fmt: skip
def test_a_variable_that_may_shape_weights_leaves_the_keeper_without_them(extra, kind, cause):
    """The keeper's own environment is not in that file, so that it cannot load them."""
    old, new = (behind(f"VLLM_USE_X={value}", **{"model-loader-extra-config": extra}) for value in "01")
    [action] = plan(project(old), project(new))
    assert (type(action), action.cause, action.keeper) == (kind, cause, "")


def test_a_variable_that_becomes_what_the_keeper_has_is_a_plain_reload():
    """Given in the sidecar's own environment, or taken away where the sidecar never had it."""
    keeper = replace(KEEPER, variables={"VLLM_USE_X": "1"})
    old, new = behind("VLLM_USE_X=0", keeper=keeper), behind("VLLM_USE_X=1", keeper=keeper)
    assert lines(project(old), project(new)) == ["reload engine: engine.env VLLM_USE_X 0 → 1"]
    assert lines(project(behind("VLLM_USE_X=1")), project(behind(""))) == [
        "reload engine: engine.env VLLM_USE_X 1 → (unset)"
    ]


def test_a_keeper_that_has_other_variables_is_not_asked_for_other_weights():
    """It would load what this engine cannot map."""
    old, new = behind("VLLM_USE_X=1"), behind("VLLM_USE_X=1", dtype="half")
    assert lines(project(old), project(new)) == [
        f"reload engine: engine.yaml dtype (unset) → half {OTHER_X} {FROM_DISK}"
    ]
    assert lines(project(old), project(behind("VLLM_USE_X=1", seed=1))) == [
        "reload engine: engine.yaml seed (unset) → 1"
    ]


def test_a_variable_that_may_shape_weights_needs_a_keeper_only_where_one_is_used():
    """Without one in sight it is as for options; an engine that loads from disk anyway is reloaded."""
    old, new = (behind(f"VLLM_USE_X={value}", keeper=None) for value in "01")
    assert lines(project(old), project(new)) == [f"reload engine: engine.env VLLM_USE_X 0 → 1 {FROM_DISK}"]
    old, new = (behind(f"VLLM_USE_X={value}", **{"load-format": "auto"}) for value in "01")
    assert lines(project(old), project(new)) == ["reload engine: engine.env VLLM_USE_X 0 → 1"]


def test_the_variables_that_leave_weights_alone_are_those_of_the_fingerprint():
    """One list, with a reason each; any other variable of vLLM's may shape weights."""
    assert all(variables.effect(name).kind == "reload" and variables.effect(name).reason for name in HARMLESS)
    assert variables.effect("VLLM_USE_X").kind == "weights"
    assert variables.effect("OMP_NUM_THREADS").kind == "reload"


OLD_VLLM, NEW_VLLM = Build("0.32.0", "2.13.0"), Build("0.33.0", "2.13.0")
ELSE = "(engine:2 has vLLM 0.33.0, the keeper of sidecar vLLM 0.32.0)"
NOT_KNOWN = "(not known whether engine:2 has the vLLM of sidecar)"


@pytest.mark.parametrize(
    ("extra", "ours", "theirs", "kind", "note"),
    [
        ({}, OLD_VLLM, OLD_VLLM, Recreate, ""),
        ({"fallback": False}, OLD_VLLM, Build("0.32.0"), Recreate, ""),
        ({}, Build(), OLD_VLLM, Recreate, f" {NOT_KNOWN}"),
        ({"fallback": False}, NEW_VLLM, Build(), Recreate, f" {NOT_KNOWN}"),
        ({}, NEW_VLLM, OLD_VLLM, Recreate, f" {ELSE} {FROM_DISK}"),
        ({"publish": True, "fallback": False}, NEW_VLLM, OLD_VLLM, Recreate, f" {ELSE} {PUBLISHED}"),
        (
            {"fallback": False}, NEW_VLLM, OLD_VLLM, Refuse,
            ": other weights, engine:2 has vLLM 0.33.0, the keeper of sidecar vLLM 0.32.0, and the engine may neither"
            " publish them nor read them from disk; make them the same, or allow `publish` or `fallback` in"
            " model-loader-extra-config",
        ),
        (
            {}, Build("0.32.0", "2.14.0"), OLD_VLLM, Recreate,
            f" (engine:2 has torch 2.14.0, the keeper of sidecar torch 2.13.0) {FROM_DISK}",
        ),
    ],
)  # fmt: skip
def test_another_image_is_compared_with_the_keepers(extra, ours, theirs, kind, note):
    """Weights of another vLLM are other weights; what is not known is said."""
    values = {**OURS, "model-loader-extra-config": extra}
    old, new = engine(values, keeper=KEEPER), engine(values, keeper=KEEPER, image="engine:2")
    [action] = plan(project(old), project(new), {"engine": Pair(ours, theirs)})
    assert (type(action), action.cause, action.keeper) == (kind, f"image engine:1 → engine:2{note}", "")


def test_versions_count_only_where_the_image_changes_and_a_keeper_is_used():
    """What runs already is not looked into, nor is what loads from disk anyway."""
    pairs = {"engine": Pair(NEW_VLLM, OLD_VLLM)}
    old, new = engine(OURS, keeper=KEEPER), engine({**OURS, "seed": 1}, keeper=KEEPER)
    assert [action.cause for action in plan(project(old), project(new), pairs)] == ["engine.yaml seed (unset) → 1"]
    old, new = engine({}, keeper=KEEPER), engine({}, keeper=KEEPER, image="engine:2")
    assert [action.cause for action in plan(project(old), project(new), pairs)] == ["image engine:1 → engine:2"]


def test_a_keeper_of_another_vllm_is_not_asked_for_other_weights():
    """With the same one it loads them first."""
    old, new = engine(OURS, keeper=KEEPER), engine({**OURS, "dtype": "half"}, keeper=KEEPER, image="engine:2")
    keepers = {
        versions: [action.keeper for action in plan(project(old), project(new), {"engine": Pair(versions, OLD_VLLM)})]
        for versions in (OLD_VLLM, NEW_VLLM, Build())
    }
    assert keepers == {OLD_VLLM: ["sidecar"], NEW_VLLM: [""], Build(): ["sidecar"]}


PORTS = [{"mode": "ingress", "target": 8000, "published": "8000", "protocol": "tcp"}]


@pytest.mark.parametrize(
    ("values", "ports", "reason"),
    [
        ({"port": 9000}, PORTS, "the container publishes port 8000; change its `ports:` and health check, too"),
        ({"uds": "/s"}, PORTS, "the container publishes port 8000, a server on a Unix socket has none"),
        (
            {"host": "127.0.0.1"}, PORTS,
            "published ports do not reach a server on the container's loopback address; use 0.0.0.0",
        ),
        ({"port": 9000}, [], None),
        ({"host": "0.0.0.0"}, PORTS, None),
        ({"port": 8000}, PORTS, None),
    ],
)  # fmt: skip
def test_a_server_that_clients_could_not_reach_is_refused(values, ports, reason):
    """The definition has to follow; then both are one recreation."""
    old, new = engine({}, launcher=LAUNCHER, ports=ports), engine(values, launcher=LAUNCHER, ports=ports)
    [action] = plan(project(old), project(new))
    assert type(action) is (Refuse if reason else Reload)
    assert reason is None or action.cause.endswith(f": {reason}")


def test_a_port_that_both_files_change_is_one_recreation():
    """In either order of the two saves."""
    ports = [dict(PORTS[0], target=9000)]
    [action] = plan(project(engine({}, ports=PORTS)), project(engine({"port": 9000}, ports=ports)))
    assert (type(action), action.cause) == (Recreate, "ports; engine.yaml port (unset) → 9000")


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
    assert the(plan(project(engine()), project(engine(**change)))) == (Recreate, cause)


def test_no_secret_of_an_environment_is_in_a_cause():
    """A token that was changed is named, not shown."""
    [action] = plan(project(engine()), project(engine(environment={"LEVEL": "one", "HF_TOKEN": "hf_new"})))
    assert "hf_" not in action.cause
    assert the([action]) == (Recreate, "environment HF_TOKEN")


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
    assert lines(old, new) == [
        "keep sidecar: image a → b changed, not supervised; apply it with `docker compose up -d sidecar`",
        "restart engine: engine.yaml max-model-len 2048 → 1",
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
