"""A project on a mount that sends no events, as NFS, virtiofs and the mounts of desktop machines: edited beside it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import watchfiles
from silent_mount import CannotMountError, mounted
from stand import ENGINE, Stand, by_rename, in_place, run, until

pytestmark = pytest.mark.docker

RELOAD = "reload engine: engine.yaml max-model-len 2048 → 1024"
HEALTHY = "engine healthy S after reload"
EDITED = ENGINE.replace("2048", "1024")

TICK_MS = 100
POLL = ("--poll",)
CHECK = ()
BOUNDS = {POLL: 1.5, CHECK: 6.5}
"""Seconds from a save to the action, as README has them: looks at every 0.5 s, or 5 s, and the rest of 0.5 s."""


@contextmanager
def mount_of(source: Path, target: Path) -> Iterator[Path]:
    """`source`, seen at `target` without events. The test is skipped, with the reason, where that cannot be mounted."""
    try:
        with mounted(source, target):
            yield target
    except CannotMountError as error:
        pytest.skip(str(error))


@pytest.fixture
def mirrored(tmp_path: Path, image: str) -> Iterator[Stand]:
    """A project that runs on the mount, and is edited at its source. What is not supervised is as before afterwards."""
    one = Stand(tmp_path / "server" / "project", seen=tmp_path / "mount")
    with mount_of(one.directory, one.seen):
        try:
            one.up()
            untouched = one.start_of("sidecar"), one.start_of("unlabelled")
            yield one
            assert (one.start_of("sidecar"), one.start_of("unlabelled")) == untouched
            assert one.supervisor.poll() is None, one.log.read_text()
        finally:
            one.close()
            one.down()


class Events:
    """The events in some directories, as the kernel tells them to the supervisor's own library."""

    def __init__(self, *directories: Path) -> None:
        self.paths: set[Path] = set()
        self._directories = directories
        self._is_over = threading.Event()
        self._rounds = 0
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Events":
        self._thread.start()
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def settle(self) -> None:
        """Return when everything that has happened until now would have been told."""
        rounds = self._rounds
        until(lambda: self._rounds >= rounds + 3, "events are read")

    def _read(self) -> None:
        for events in watchfiles.watch(
            *self._directories, watch_filter=None, recursive=False, force_polling=False, debounce=TICK_MS,
            rust_timeout=TICK_MS, yield_on_timeout=True, stop_event=self._is_over,
        ):  # fmt: skip
            self.paths |= {Path(path) for _, path in events}
            self._rounds += 1


def test_the_mount_shows_each_change_at_once_and_sends_no_event(tmp_path):
    """In place, by rename, a swapped link, a file that comes and goes. The directory itself sends an event of each."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("one")
    (source / "link").symlink_to("file")
    with mount_of(source, tmp_path / "mount") as mount, Events(mount) as silent, Events(source) as loud:
        in_place(source / "file", "two")
        assert (mount / "file").read_text() == "two"
        by_rename(source / "file", "three")
        assert (mount / "file").read_text() == (mount / "link").read_text() == "three"
        (source / "other").write_text("four")
        (source / "swapped").symlink_to("other")
        (source / "swapped").replace(source / "link")
        assert (mount / "link").read_text() == "four"
        (source / "other").unlink()
        assert not (mount / "link").exists()
        assert {path.name for path in mount.iterdir()} == {"file", "link"}
        loud.settle()
        silent.settle()
        assert {path.name for path in loud.paths} >= {"file", "link", "other"}
        assert silent.paths == set()


@pytest.mark.parametrize("options", [POLL, ("--check", "1")], ids=["poll", "check"])
@pytest.mark.parametrize("save", [in_place, by_rename])
def test_a_save_beside_a_mount_without_events_is_one_action(mirrored, options, save):
    """With `--poll`, and by the periodic look alone: one reload, then one recreation; and no event told of them."""
    before, generation = mirrored.start_of(), mirrored.engine()["generation"]
    mirrored.supervise(*options)
    with Events(mirrored.seen, mirrored.seen / "config") as events:
        save(mirrored.engine_yaml, EDITED)
        mirrored.only(RELOAD, HEALTHY)
        assert mirrored.start_of() == before
        assert mirrored.engine()["generation"] == generation + 1
        assert mirrored.options()["max-model-len"] == "1024"
        save(mirrored.compose_yaml, mirrored.compose_yaml.read_text().replace("-one", "-two"))
        until(lambda: "engine healthy S after recreate" in mirrored.messages(), lambda: mirrored.log.read_text())
        assert mirrored.start_of()[0] != before[0]
        assert mirrored.done() == [("reload", "healthy"), ("recreate", "healthy")]
        events.settle()
        assert events.paths == set()


@pytest.mark.parametrize("options", [POLL, CHECK], ids=["poll", "check"])
def test_without_events_it_takes_no_longer_than_promised(mirrored, options):
    """From the last write to the action; five times that on a busy machine."""
    mirrored.supervise(*options)
    saved = time.monotonic()
    in_place(mirrored.engine_yaml, EDITED)
    mirrored.expect(RELOAD)
    assert time.monotonic() - saved < 5 * BOUNDS[options]
    mirrored.only(RELOAD, HEALTHY)


def test_a_swapped_link_beside_a_mount_without_events_is_one_reload(mirrored):
    """engine.yaml → ..data/engine.yaml, and ..data goes to another directory, by the periodic look."""
    config = mirrored.engine_yaml.parent
    for name, length in (("..1", "2048"), ("..2", "1024")):
        (config / name).mkdir()
        (config / name / "engine.yaml").write_text(ENGINE.replace("2048", length))
    (config / "..data").symlink_to("..1")
    (config / ".new").symlink_to("..data/engine.yaml")
    (config / ".new").replace(mirrored.engine_yaml)
    before = mirrored.start_of()
    mirrored.supervise("--check", "1")
    (config / "..new").symlink_to("..2")
    (config / "..new").replace(config / "..data")
    mirrored.only(RELOAD, HEALTHY)
    assert mirrored.start_of() == before
    assert mirrored.options()["max-model-len"] == "1024"
    assert mirrored.done() == [("reload", "healthy")]


def test_a_mount_that_goes_away_and_comes_back_keeps_the_engine(mirrored):
    """A file server that was away: said once, the engine goes on as it is, and an edit counts afterwards."""
    before = mirrored.start_of()
    mirrored.supervise(*POLL)
    run("umount", "--lazy", mirrored.seen)
    mirrored.expect("keep every engine: ")
    with mount_of(mirrored.directory, mirrored.seen):
        mirrored.expect("nothing to do: ")
        in_place(mirrored.engine_yaml, EDITED)
        until(lambda: mirrored.messages()[-1:] == [HEALTHY], lambda: mirrored.log.read_text())
        kept, nothing, *rest = mirrored.messages()
        assert kept.startswith("keep every engine: ") and nothing.startswith("nothing to do: ")
        assert rest == [RELOAD, HEALTHY]
        assert mirrored.start_of() == before
        assert mirrored.done() == [("reload", "healthy")]
