"""Several engines in one project: what they share, what is one's own, and which of them a profile has."""

from collections.abc import Iterator

import pytest
from stand import ENGINE, LAUNCHED, Stand, run, until

pytestmark = pytest.mark.docker

NAMES = ("engine", "engine-b", "engine-c", "engine-d", "engine-e")
EDITED = ENGINE.replace("2048", "1024")

Starts = dict[str, tuple[str, str]]


def services() -> str:
    """Definitions of the engines beside the first."""
    same = [f"  {name}:\n    <<: *engine\n    command: {LAUNCHED}\n    env_file: engine.env\n" for name in NAMES[1:4]]
    last = f"  engine-e:\n    <<: *engine\n    command: {LAUNCHED}\n    env_file: e.env\n"
    return "".join([*same, last])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Stand]:
    """Five engines on one engine.yaml; four have one environment file, the last another."""
    one = Stand(tmp_path_factory.mktemp("five") / "project")
    (one.directory / "e.env").write_text("E=1\n")
    one.compose_yaml.write_text(one.compose_yaml.read_text().replace("  sidecar:\n", services() + "  sidecar:\n"))
    one.keep()
    try:
        one.up()
        until(lambda: all(health(one, name) == "healthy" for name in NAMES), "all engines are healthy")
        one.supervise()
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture
def five(project: Stand) -> Iterator[Stand]:
    """The project as at first. Afterwards, what is not supervised has the id and start it had before."""
    project.reset()
    before = project.start_of("sidecar"), project.start_of("unlabelled")
    yield project
    assert (project.start_of("sidecar"), project.start_of("unlabelled")) == before
    assert project.supervisor.poll() is None, project.log.read_text()


def health(stand: Stand, name: str) -> str:
    return stand.inspect(name)["State"]["Health"]["Status"]


def starts(stand: Stand) -> Starts:
    return {name: stand.start_of(name) for name in NAMES}


def recorded(stand: Stand) -> list[tuple[str, str, str]]:
    return [(one["service"], one["action"], one["result"]) for one in stand.history()]


def finished(stand: Stand, count: int) -> None:
    """Wait for that many records, and see that no other comes."""
    until(lambda: len(stand.history()) >= count, lambda: stand.log.read_text())
    stand.mark()
    assert len(stand.history()) == count


def test_a_shared_config_file_reloads_each_engine_once_and_one_after_the_other(five):
    """In the project's order, the next when the one before is healthy; no container is started again."""
    before = starts(five)
    generations = [five.engine(name)["generation"] for name in NAMES]
    five.engine_yaml.write_text(EDITED)
    pairs = [
        (f"reload {name}: engine.yaml max-model-len 2048 → 1024", f"{name} healthy S after reload") for name in NAMES
    ]
    five.only(*(line for pair in pairs for line in pair))
    assert starts(five) == before
    assert [five.engine(name)["generation"] for name in NAMES] == [generation + 1 for generation in generations]
    assert {five.options(name)["max-model-len"] for name in NAMES} == {"1024"}
    assert recorded(five) == [(name, "reload", "healthy") for name in NAMES]


def test_a_shared_environment_file_recreates_those_that_use_it(five):
    """Each once and in order; the one with a file of its own is left alone."""
    before = starts(five)
    (five.directory / "engine.env").write_text("A=1\nB=7\n")
    finished(five, 4)
    after = starts(five)
    assert [name for name in NAMES if before[name][0] != after[name][0]] == list(NAMES[:4])
    assert after["engine-e"] == before["engine-e"]
    assert recorded(five) == [(name, "recreate", "healthy") for name in NAMES[:4]]
    assert {line.partition(": ")[2] for line in five.messages() if line.startswith("recreate")} == {"environment B"}


def test_an_environment_file_of_one_engine_recreates_that_one(five):
    """The four others are the same containers, not started again."""
    before = starts(five)
    (five.directory / "e.env").write_text("E=2\n")
    five.only("recreate engine-e: environment E", "engine-e healthy S after recreate")
    after = starts(five)
    assert [name for name in NAMES if before[name] != after[name]] == ["engine-e"]
    assert after["engine-e"][0] != before["engine-e"][0]
    assert recorded(five) == [("engine-e", "recreate", "healthy")]


def test_an_engine_of_a_profile_is_supervised_while_the_profile_is_active(prepared):
    """Its file counts for nothing before and after; it is made and ended by hand; the other engine is left alone."""
    file = prepared.directory / "config" / "second.yaml"
    file.write_text("model: /model\nmax-model-len: 7\n")
    command = LAUNCHED.replace("engine.yaml", "second.yaml")
    second = f"  second:\n    <<: *engine\n    profiles: [extra]\n    command: {command}\n"
    text = prepared.compose_yaml.read_text()
    prepared.compose_yaml.write_text(text.replace("  sidecar:\n", second + "  sidecar:\n"))
    prepared.up()
    before = {name: prepared.start_of(name) for name in ("engine", "sidecar", "unlabelled")}
    prepared.supervise()
    file.write_text("model: /model\nmax-model-len: 8\n")
    prepared.only()
    (prepared.directory / ".env").write_text("COMPOSE_PROFILES=extra\n")
    prepared.expect("keep second: new in the project; apply it with `docker compose up -d second`")
    prepared.up()
    until(lambda: health(prepared, "second") == "healthy", "the second engine is healthy")
    start = prepared.start_of("second")
    file.write_text("model: /model\nmax-model-len: 9\n")
    prepared.expect("second healthy")
    assert prepared.options("second")["max-model-len"] == "9"
    (prepared.directory / ".env").write_text("COMPOSE_PROFILES=\n")
    prepared.expect("keep second: no longer in the project; end it with `docker compose rm -sf second`")
    file.write_text("model: /model\nmax-model-len: 10\n")
    prepared.mark()
    assert prepared.start_of("second") == start
    assert prepared.options("second")["max-model-len"] == "9"
    assert {name: prepared.start_of(name) for name in before} == before
    assert recorded(prepared) == [("second", "reload", "healthy")]
    run("docker", "rm", "--force", f"{prepared.name}-second-1")
