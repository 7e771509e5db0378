"""An engine behind our launcher, under measurement; its server is a stand-in."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import free_port

from weightkeeper.errors import ServerStartError
from weightkeeper.recovery.launched import Launched

TESTS = Path(__file__).parent


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """A launcher whose server is healthy."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, sys.path)]))
    directory = Path(tempfile.mkdtemp(prefix="wk"))  # pytest's own are too long for sockets
    config = directory / "engine.yaml"
    config.write_text("model: m\n")
    launched = Launched(directory, config, free_port(), directory / "log", "standin_server")
    try:
        launched.wait_for_health(60)
        yield launched
    finally:
        launched.kill()
        shutil.rmtree(directory)


def test_a_launcher_that_tells_nothing_is_waited_for_as_long_as_was_asked_for(engine):
    """Its server answers all the while."""
    engine.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ServerStartError, match=r"^the launcher is not ready after 1 s; --limit SECONDS gives it long"):
        engine.wait_for_health(1)
    engine.process.send_signal(signal.SIGCONT)
    assert engine.wait_for_health(60) > engine.started
