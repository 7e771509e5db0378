"""Fixtures of the docker tests with stand-ins: `launched` is an engine behind our launcher, `plain` one without."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stand import IMAGE, PLAIN, Stand, build_image, run

UNTOUCHED = ("sidecar", "unlabelled")


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    build_image()
    yield IMAGE
    run("docker", "rmi", "--force", IMAGE)


@pytest.fixture
def prepared(tmp_path: Path, image: str) -> Iterator[Stand]:
    """A project whose files can still be changed before it is started."""
    one = Stand(tmp_path / "project")
    try:
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture
def prepared_plain(tmp_path: Path, image: str) -> Iterator[Stand]:
    """As `prepared`, without a launcher."""
    one = Stand(tmp_path / "project", PLAIN)
    try:
        yield one
    finally:
        one.close()
        one.down()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Stand]:
    """A project under supervision for the tests of one module."""
    yield from _running(Stand(tmp_path_factory.mktemp("stand") / "project"))


@pytest.fixture(scope="module")
def running_plain(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Stand]:
    """As `running`, without a launcher."""
    yield from _running(Stand(tmp_path_factory.mktemp("plain") / "project", PLAIN))


@pytest.fixture
def stand(running: Stand) -> Iterator[Stand]:
    """The module's project as at first. Afterwards, what is not supervised has the id and start it had before."""
    yield from _used(running)


@pytest.fixture
def plain(running_plain: Stand) -> Iterator[Stand]:
    """As `stand`, without a launcher."""
    yield from _used(running_plain)


def _running(one: Stand) -> Iterator[Stand]:
    try:
        one.up()
        one.supervise()
        yield one
    finally:
        one.close()
        one.down()


def _used(one: Stand) -> Iterator[Stand]:
    one.reset()
    before = [one.start_of(service) for service in UNTOUCHED]
    yield one
    assert [one.start_of(service) for service in UNTOUCHED] == before
    assert one.supervisor.poll() is None, one.log.read_text()
