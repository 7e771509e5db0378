"""The launcher's `--env-file`: watched, and read again by a reload; the engine's container stays."""

from collections.abc import Iterator

import pytest
from stand import ENGINE, LAUNCHED, Stand, by_rename, in_place, run, until

from weightkeeper.supervisor.provision import FROM_DISK

pytestmark = pytest.mark.docker

FILES = "'--env-file', /config/launcher.env, '--env-file=/config/more.env'"
COMMAND = LAUNCHED.replace("engine,", f"engine, {FILES},")
HEALTHY = "engine healthy S after reload"
FIRST = "LIMIT=4\nHF_TOKEN=hf_first\n"


def made(stand: Stand) -> Stand:
    (stand.engine_yaml.parent / "launcher.env").write_text(FIRST)
    (stand.engine_yaml.parent / "more.env").write_text("MORE=1\n")
    stand.keep()
    return stand


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Stand]:
    """In place of the one of conftest: its launcher reads two files."""
    one = made(Stand(tmp_path_factory.mktemp("env") / "project", COMMAND))
    try:
        one.up()
        one.supervise()
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture
def prepared(tmp_path, image: str) -> Iterator[Stand]:
    """As `running`, not started yet and for one test."""
    one = made(Stand(tmp_path / "project", COMMAND))
    try:
        yield one
    finally:
        one.close()
        one.down()


def variables(stand: Stand) -> set[str]:
    """The environment of the server that answers, as its process was given it."""
    found = run("docker", "exec", f"{stand.name}-engine-1", "cat", f"/proc/{stand.options()['pid']}/environ")
    return set(found.split("\0"))


@pytest.mark.parametrize("save", [in_place, by_rename])
def test_a_changed_variable_reloads(stand, save):
    """The same container, another server with the new value; on record with both."""
    before, generation = stand.start_of(), stand.engine()["generation"]
    save(stand.engine_yaml.parent / "launcher.env", FIRST.replace("4", "8"))
    stand.only("reload engine: launcher.env LIMIT 4 → 8", HEALTHY)
    assert (stand.start_of(), stand.engine()["generation"]) == (before, generation + 1)
    assert {"LIMIT=8", "MORE=1"} < variables(stand)
    [record] = stand.history()
    assert (record["action"], record["from"], record["to"]) == (
        "reload", {"LIMIT": "4"}, {"LIMIT": "8"},
    )  # fmt: skip


def test_both_files_and_the_config_file_are_one_reload(stand):
    """Every one of them is watched; what came to rest together is one plan."""
    (stand.engine_yaml.parent / "more.env").write_text("MORE=2\nNEW=x\n")
    (stand.engine_yaml.parent / "launcher.env").write_text(FIRST + "MORE=0\n")
    stand.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    stand.only(
        "reload engine: engine.yaml max-model-len 2048 → 1024; more.env MORE 1 → 2, NEW (unset) → x", HEALTHY
    )  # fmt: skip
    assert {"MORE=2", "NEW=x"} < variables(stand)


def test_a_secret_is_named_and_never_shown(stand):
    """Neither in the log nor on record."""
    (stand.engine_yaml.parent / "launcher.env").write_text(FIRST.replace("hf_first", "hf_second"))
    stand.only("reload engine: launcher.env HF_TOKEN changed", HEALTHY)
    assert "HF_TOKEN=hf_second" in variables(stand)
    written = stand.log.read_text() + (stand.state / "history.jsonl").read_text()
    assert "hf_first" not in written and "hf_second" not in written


def test_comments_order_and_line_ends_do_nothing(stand):
    """Values are compared, as the launcher reads them."""
    generation = stand.engine()["generation"]
    text = b"# mine\r\nexport HF_TOKEN='hf_first'\r\n\r\nLIMIT = 4\r\n"
    (stand.engine_yaml.parent / "launcher.env").write_bytes(text)
    stand.only("nothing to do: launcher.env changed, no value did")
    assert stand.engine()["generation"] == generation and stand.history() == []


@pytest.mark.parametrize(
    ("text", "reason"), [("HF_TOKEN hf_first\n", "line 1: expected NAME=VALUE"), (None, "no such file; put it back")]
)
def test_a_file_that_cannot_be_used_keeps_the_engine(stand, text, reason):
    """Said once with the reason and no value; right again, it is compared with what was applied last."""
    file = stand.engine_yaml.parent / "launcher.env"
    generation = stand.engine()["generation"]
    file.unlink() if text is None else file.write_text(text)
    stand.expect(f"keep engine: {file}")
    assert reason in stand.messages()[-1] and "hf_first" not in stand.messages()[-1]
    file.write_text("# again\n" + FIRST)
    stand.expect("nothing to do: launcher.env changed, no value did")
    file.write_text(FIRST.replace("4", "8"))
    stand.expect("engine healthy")
    assert stand.messages()[1:] == [
        "nothing to do: launcher.env changed, no value did",
        "reload engine: launcher.env LIMIT 4 → 8",
        HEALTHY,
    ]
    assert stand.engine()["generation"] == generation + 1


def test_an_edit_while_no_supervisor_ran_is_planned_and_then_applied_once(prepared):
    """`weightkeeper plan` shows it, `--with` before it is saved; the next supervisor has nothing to do."""
    file = prepared.engine_yaml.parent / "launcher.env"
    prepared.up()
    prepared.supervise()
    assert prepared.end() == 0
    candidate = prepared.directory.parent / "candidate.env"
    candidate.write_text(FIRST + "NEW=1\n")
    assert prepared.weightkeeper("plan", "--with", f"{file}={candidate}").stdout == (
        "reload engine: launcher.env NEW (unset) → 1\n"
    )
    candidate.write_text("no assignment\n")
    told = prepared.weightkeeper("plan", "--with", f"{file}={candidate}").stdout
    assert told.startswith(f"keep engine: {candidate}, line 1: ")
    file.write_text(FIRST.replace("4", "8"))
    line = "reload engine: launcher.env LIMIT 4 → 8"
    assert prepared.weightkeeper("plan").stdout == f"{line}\n"
    prepared.supervise()
    until(lambda: prepared.messages() == [line, HEALTHY], lambda: prepared.log.read_text())
    assert prepared.end() == 0
    assert prepared.weightkeeper("plan").stdout == "nothing to do\n"
    prepared.supervise()
    prepared.mark()
    assert prepared.done() == [("reload", "healthy")]


def test_a_variable_that_may_shape_weights_is_said_to_leave_the_keeper_behind(prepared):
    """Its own environment is not in that file: the engine loads from disk where it may, else the edit is refused."""
    ours = "model: /model\nload-format: weightkeeper\n"
    file = prepared.engine_yaml.parent / "launcher.env"
    prepared.engine_yaml.write_text(ours)
    prepared.up()
    prepared.supervise()
    file.write_text(FIRST + "VLLM_USE_X=1\n")
    prepared.expect("engine healthy")
    prepared.engine_yaml.write_text(ours + 'model-loader-extra-config: {"fallback": false}\n')
    until(lambda: len(prepared.done()) == 2, lambda: prepared.log.read_text())
    file.write_text(FIRST + "VLLM_USE_X=2\n")
    prepared.expect("refuse engine: ")
    generation = prepared.engine()["generation"]
    file.write_text(FIRST)
    until(lambda: len(prepared.done()) == 3, lambda: prepared.log.read_text())
    first, _, _, _, refused, last, _ = prepared.messages()
    assert first == (
        f"reload engine: launcher.env VLLM_USE_X (unset) → 1 (the keeper of sidecar differs in VLLM_USE_X) {FROM_DISK}"
    )
    assert refused.startswith(
        "refuse engine: launcher.env VLLM_USE_X 1 → 2: other weights, the keeper of sidecar differs in VLLM_USE_X, and"
        " the engine may neither publish them nor read them from disk"
    )
    assert last == "reload engine: launcher.env VLLM_USE_X 1 → (unset)"
    assert prepared.engine()["generation"] == generation + 1
