"""Watching: real files, real events, and the content before and after. What is written is awaited, never slept for."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import watchfiles

from weightkeeper.errors import ConfigError
from weightkeeper.supervisor import files
from weightkeeper.supervisor.stop import Stop
from weightkeeper.supervisor.watch import Timing, Watch

DEADLINE = 60.0
"""Seconds for anything that has to happen."""

EVENTS = Timing(settle=0.2, bound=3.0, check=3600.0)
"""No look without an event: what these tests see, events have brought."""

LOOKS = Timing(settle=0.2, bound=3.0, check=0.3, poll=0.1)


class Watching:
    """A watch that runs in a thread; `told` is what it yielded."""

    def __init__(self, paths: list[Path], timing: Timing) -> None:
        self.stop = Stop()
        self.watch = Watch(timing, self.stop)
        self.watch.take_part(paths)
        self.told: queue.Queue[frozenset[Path]] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for changed in self.watch.changes():
            self.told.put(changed)

    def next(self) -> frozenset[Path]:
        return self.told.get(timeout=DEADLINE)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


@pytest.fixture
def watching() -> Iterator[Callable[..., Watching]]:
    """Starts watches, and ends them after the test."""
    started: list[Watching] = []

    def start(*paths: Path, timing: Timing = EVENTS) -> Watching:
        started.append(Watching(list(paths), timing))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config" / "engine.yaml"
    path.parent.mkdir()
    path.write_text("seed: 1\n")
    return path


def marked(one: Watching, mark: Path) -> list[frozenset[Path]]:
    """Everything told until a change of `mark`, which is made now: nothing else was told if that is all."""
    mark.write_text(str(time.monotonic()))
    told = []
    while not told or mark not in told[-1]:
        told.append(one.next())
    return told


def save_in_place(path: Path, text: str) -> None:
    path.write_text(text)


def save_by_rename(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.swp")
    new.write_text(text)
    new.replace(path)


def save_by_return(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def save_with_backup(path: Path, text: str) -> None:
    path.rename(path.with_name(f"{path.name}~"))
    path.write_text(text)


@pytest.mark.parametrize("save", [save_in_place, save_by_rename, save_by_return, save_with_backup])
@pytest.mark.parametrize("timing", [EVENTS, LOOKS, Timing(settle=0.2, poll=0.1, is_polling=True)])
def test_every_way_of_saving_is_told_once(watching, file, tmp_path, save, timing):
    """In place, by rename, by deletion and return, with a backup; with events, without them, polling."""
    one = watching(file, tmp_path / "mark", timing=timing)
    save(file, "seed: 2\n")
    assert one.next() == {file}
    assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]


def test_a_file_in_chunks_is_told_when_it_rests(watching, file, tmp_path):
    """Truncate, wait, and the rest in two chunks: one change, of the whole file."""
    one = watching(file, tmp_path / "mark", timing=Timing(settle=0.5, check=3600.0))
    digests = []
    with file.open("w") as stream:
        for chunk in ("", "see", "d: 2\n"):
            stream.write(chunk)
            stream.flush()
            digests.append(files.digest(file))
            time.sleep(0.2)
    assert one.next() == {file}
    assert one.watch.digest([file]) == (digests[-1],)
    assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]


def test_a_file_that_never_rests_is_told_at_the_bound(watching, file, caplog):
    """Constant noise in the file itself delays it, but not for ever."""
    one = watching(file, timing=Timing(settle=0.5, bound=1.0, check=3600.0))
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            save_by_rename(file, f"seed: {(number := number + 1)}\n")
            ended.wait(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert one.next() == {file}
    finally:
        ended.set()
        writer.join()
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].getMessage().startswith("files never come to rest, taken as they are after 1.")


def test_noise_beside_a_file_tells_nothing_and_delays_nothing(watching, file, tmp_path):
    """A hundred other files a second in the same directory: only the watched one counts."""
    one = watching(file, tmp_path / "mark")
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            (file.parent / f"noise-{(number := number + 1) % 100}").write_text(str(number))
            ended.wait(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        file.write_text("seed: 2\n")
        assert one.next() == {file}
        assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]
    finally:
        ended.set()
        writer.join()


def test_a_touch_tells_nothing(watching, file, tmp_path):
    """An event without other content is none."""
    one = watching(file, tmp_path / "mark")
    os.utime(file)
    save_by_rename(file, "seed: 1\n")
    assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]


def test_a_changed_and_restored_file_tells_nothing(watching, file, tmp_path):
    """Within the settle time only the end counts."""
    one = watching(file, tmp_path / "mark")
    file.write_text("seed: 2\n")
    file.write_text("seed: 1\n")
    assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]


def test_a_swapped_link_is_told_once(watching, tmp_path):
    """The way of Kubernetes: engine.yaml → ..data/engine.yaml, and ..data is swapped to a new directory."""
    for name, text in (("..2026-01", "seed: 1\n"), ("..2026-02", "seed: 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..2026-01")
    file = tmp_path / "engine.yaml"
    file.symlink_to("..data/engine.yaml")
    one = watching(file, tmp_path / "mark")

    (tmp_path / "..data_tmp").symlink_to("..2026-02")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert one.next() == {file}
    assert marked(one, tmp_path / "mark") == [{tmp_path / "mark"}]

    (tmp_path / "..2026-02" / "engine.yaml").write_text("seed: 3\n")
    assert one.next() == {file}, "a save behind the new link is seen too"


def test_a_link_in_the_middle_of_a_path_is_watched(watching, tmp_path):
    """The directory in which a link is swapped may be neither the file's nor the path's."""
    for name in ("one", "two"):
        (tmp_path / "releases" / name).mkdir(parents=True)
        (tmp_path / "releases" / name / "engine.yaml").write_text(name)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "current").symlink_to("../releases/one")
    (tmp_path / "project").mkdir()
    file = tmp_path / "project" / "engine.yaml"
    file.symlink_to(tmp_path / "links" / "current" / "engine.yaml")
    one = watching(file)
    (tmp_path / "links" / "new").symlink_to("../releases/two")
    (tmp_path / "links" / "new").replace(tmp_path / "links" / "current")
    assert one.next() == {file}


def test_a_directory_that_goes_and_comes_back_is_watched_again(watching, file):
    """As a checkout of another branch does it. Looks bring it back, events go on after that."""
    one = watching(file, timing=Timing(settle=0.2, check=1.0))
    file.unlink()
    file.parent.rmdir()
    assert one.next() == {file}
    file.parent.mkdir()
    file.write_text("seed: 2\n")
    assert one.next() == {file}
    file.write_text("seed: 3\n")
    assert one.next() == {file}


def test_a_file_that_is_not_there_yet_is_told_when_it_appears(watching, tmp_path):
    """An override file may come later."""
    file = tmp_path / "compose.override.yaml"
    one = watching(file)
    file.write_text("services: {}\n")
    assert one.next() == {file}


def test_a_file_that_takes_part_later_is_watched(watching, file, tmp_path):
    """The set of files changes with what is in them."""
    other = tmp_path / "elsewhere" / "more.env"
    other.parent.mkdir()
    one = watching(file)
    one.watch.take_part([file, other])
    file.write_text("seed: 2\n")
    assert one.next() == {file}
    other.write_text("A=1\n")
    assert one.next() == {other}


def test_a_change_while_the_teller_is_busy_is_told_afterwards(file):
    """Nothing is lost between two changes, and a burst is one change."""
    stop = Stop()
    watch = Watch(EVENTS, stop)
    watch.take_part([file])
    told = []
    file.write_text("seed: 2\n")
    for changed in watch.changes():
        told.append(changed)
        if len(told) == 2:
            break
        for number in range(3, 6):
            file.write_text(f"seed: {number}\n")
        assert watch.has_changed()
    assert told == [{file}, {file}]
    assert not watch.has_changed()


def test_what_somebody_wants_is_told_as_a_change_of_no_file(file):
    """At a look that finds none; a change of a file is told as such all the same."""
    wanted = iter([True, False])
    watch = Watch(LOOKS, Stop(), lambda: next(wanted, False))
    watch.take_part([file])
    changes = watch.changes()
    assert next(changes) == set()
    file.write_text("seed: 2\n")
    assert next(changes) == {file}


def test_without_inotify_it_says_so_and_polls(watching, file, monkeypatch, caplog):
    """A limit of the system is no reason to miss a change, and no secret."""

    def refuse(*_: object, **__: object) -> Iterator[set]:
        raise OSError("OS file watch limit reached.")

    monkeypatch.setattr(watchfiles, "watch", refuse)
    one = watching(file, timing=Timing(settle=0.2, check=3600.0, poll=0.1))
    file.write_text("seed: 2\n")
    assert one.next() == {file}
    assert [record.getMessage() for record in caplog.records] == [
        "no file events (OS file watch limit reached.), the content is looked at every 0.1 s instead;"
        " raise fs.inotify.max_user_watches or max_user_instances"
    ]


@pytest.mark.parametrize("timing", [EVENTS, Timing(poll=3600.0, is_polling=True), Timing(settle=3600.0)])
def test_it_ends_at_once_when_told_to(watching, file, timing):
    """Waiting for an event, for a look, and for a file to rest."""
    one = watching(file, timing=timing)
    file.write_text("seed: 2\n")
    one.close()


def test_a_fifo_in_place_of_a_file_blocks_nothing(tmp_path):
    """Nor does a directory, a device without an end, or a link to itself."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "loop"):
        with pytest.raises(ConfigError, match=str(path)):
            files.read(path)
        assert files.digest(path)
        assert files.directories(path)


def test_a_file_over_the_limit_is_refused(tmp_path):
    """A read never takes more than the limit."""
    path = tmp_path / "large"
    with path.open("wb") as stream:
        stream.truncate(files.MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="over 4194304 bytes"):
        files.read(path)


def test_a_missing_file_behind_a_link_is_named_with_its_target(tmp_path):
    """Whoever reads it has to know where to look."""
    (tmp_path / "engine.yaml").symlink_to("gone.yaml")
    with pytest.raises(ConfigError) as caught:
        files.read(tmp_path / "engine.yaml")
    assert str(caught.value) == (
        f"{tmp_path}/engine.yaml: no such file (a link to gone.yaml); put it back or correct the path"
    )


def test_the_directories_of_a_plain_file_are_its_own(file):
    """Nothing above it is watched."""
    assert files.directories(file) == {file.parent}


def test_a_missing_directory_is_stood_in_for_by_the_one_above(tmp_path):
    """What can be watched is what exists."""
    assert files.directories(tmp_path / "a" / "b" / "c.yaml") == {tmp_path}
