"""The Docker engine is stopped and started under a supervisor: the only time at which the sidecar is started again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand import ENGINE, Stand, docker_engine, foreign, until

pytestmark = pytest.mark.docker

RELOAD = "reload engine: engine.yaml max-model-len 2048 → 1024"
EDITED = ENGINE.replace("2048", "1024")
RECREATE = "recreate engine: environment LEVEL"
AGAIN = "engine was started again while Docker did not answer"


@pytest.fixture
def supervised(prepared: Stand) -> Iterator[Stand]:
    """A project under supervision, on a Docker engine that nobody else uses."""
    prepared.up()
    prepared.supervise()
    if os.geteuid() != 0:
        pytest.skip("only root may restart the Docker engine")
    if others := foreign():
        pytest.skip(f"other containers run here ({' '.join(others)}); restarting the Docker engine would stop them")
    yield prepared
    docker_engine("start")


def restarted(stand: Stand, path: Path, text: str, said: str, answer: str) -> list[str]:
    """Stop the Docker engine, save `text`, start it when the supervisor has said `said`; all that it said, in the end.

    The end is `answer`, and that of one more comment.

    Lost and back were said once each. Sidecar and other service are the same containers, started once more.
    """
    others = ("sidecar", "unlabelled")
    before = [stand.start_of(service) for service in others]
    docker_engine("stop")
    stand.expect("Docker does not answer: ")
    path.write_text(text)
    stand.expect(said)
    docker_engine("start")
    stand.expect("Docker answers again after ")
    stand.expect(answer)
    until(lambda: stand.inspect()["State"].get("Health", {}).get("Status") == "healthy", "the engine is healthy")
    *lines, nothing = stand.mark()
    assert nothing == "nothing to do: engine.yaml changed, no value did"
    after = [stand.start_of(service) for service in others]
    assert [one[0] for one in after] == [one[0] for one in before]
    assert all(new[1] > old[1] for new, old in zip(after, before, strict=True))
    lost, *lines = lines
    assert lost.startswith("Docker does not answer: ")
    lines.remove("Docker answers again after S")
    return lines


def test_a_config_file_saved_while_docker_is_down_is_one_start(supervised):
    """The container that Docker starts has read the new file: it is followed, and not asked to reload it once more."""
    before = supervised.start_of()
    lines = restarted(supervised, supervised.engine_yaml, EDITED, RELOAD, "engine healthy")
    assert [line for line in lines if line != AGAIN] == [RELOAD, "engine healthy S after start"]
    after = supervised.start_of()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert supervised.options()["max-model-len"] == "1024"
    assert supervised.engine()["generation"] == 1
    [record] = supervised.history()
    assert (record["action"], record["result"], record["cause"]) == ("start", "healthy", RELOAD.partition(": ")[2])
    assert (record["before"], record["after"]) == (before[0], before[0])


def test_a_definition_saved_while_docker_is_down_is_one_recreation(supervised):
    """When Docker is back, once; what it started on the old definition until then is no action."""
    before = supervised.start_of()
    text = supervised.compose_yaml.read_text().replace("-one", "-two")
    lines = restarted(supervised, supervised.compose_yaml, text, RECREATE, "engine healthy")
    assert [line for line in lines if line != AGAIN] == [RECREATE, "engine healthy S after recreate"]
    after = supervised.start_of()
    assert after[0] != before[0]
    assert "LEVEL=two" in supervised.inspect()["Config"]["Env"]
    [record] = supervised.history()
    assert (record["action"], record["result"]) == ("recreate", "healthy")
    assert (record["before"], record["after"]) == (before[0], after[0])


def test_a_docker_engine_that_restarts_without_an_edit_is_no_action(supervised):
    """Docker starts the engine again, which is said; a comment that was saved meanwhile changes nothing."""
    before = supervised.start_of()
    nothing = "nothing to do: engine.yaml changed, no value did"
    lines = restarted(supervised, supervised.engine_yaml, ENGINE + "# a comment\n", nothing, AGAIN)
    assert sorted(lines) == [AGAIN, nothing]
    assert supervised.start_of()[0] == before[0]
    assert supervised.engine()["generation"] == 1
    assert supervised.history() == []
