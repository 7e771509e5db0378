"""Threads of libraries, by the library that they wait in, and which of them a fork may lose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightkeeper.launcher import cuda_state

pytest.importorskip("zmq")

SCRIPT = """
import threading, time, zmq
from weightkeeper.launcher import warming
from weightkeeper.launcher.native_threads import native_threads
print(warming.unfit())
context = zmq.Context()
one = context.socket(zmq.PAIR)
deadline = time.monotonic() + 30
while not all("ZMQbg" in each.name and each.library for each in native_threads()) and time.monotonic() < deadline:
    time.sleep(0.05)  # one that has just begun has no name yet, and does not wait
print(*native_threads(), sep="; ")
print(warming.unfit())
threading.Thread(target=threading.Event().wait, name="ours", daemon=True).start()
print(len(native_threads()), warming.unfit())
"""

RENAMED = """
import os, pathlib, time, zmq
from weightkeeper.launcher import warming
from weightkeeper.launcher.native_threads import native_threads
before = set(os.listdir("/proc/self/task"))
context = zmq.Context()
one = context.socket(zmq.PAIR)
deadline = time.monotonic() + 30
while sum("ZMQbg" in each.name for each in native_threads()) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
for number, name in zip(sorted(set(os.listdir("/proc/self/task")) - before), NAMES, strict=True):
    pathlib.Path(f"/proc/self/task/{number}/comm").write_text(name)
print(warming.unfit())
"""


def told(**environment: str) -> list[str]:
    """What a process with two threads of libzmq, and then one of Python's, says of itself."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_thread_of_a_library_is_named_with_the_library_it_waits_in():
    """The kernel's name alone is mostly that of the process. A thread of Python's is none of them."""
    alone, native, unfit, more = told()
    assert alone == "None"
    reaper, worker = native.split("; ")
    assert reaper.startswith("ZMQbg/Reaper in libzmq")
    assert worker.startswith("ZMQbg/IO/0 in libzmq")
    assert unfit.startswith(
        "the imports left 3 threads running, and a fork keeps only one (besides it: ZMQbg/Reaper in"
    )
    assert more.startswith(
        "2 the imports left 4 threads running, and a fork keeps only one (besides it: ours of Python, "
    )


@pytest.mark.parametrize("names", ["ZMQbg/Reaper, ZMQbg/IO/0", "libzmq*"])
def test_threads_may_be_allowed_by_name_and_by_library(names):
    """One of Python's own never is."""
    _, _, unfit, more = told(WEIGHTKEEPER_ALLOW_THREADS=names)
    assert unfit == "None"
    assert more == "2 the imports left 2 threads running, and a fork keeps only one (besides it: ours of Python)"


def test_what_is_not_allowed_is_still_named():
    """A list for one library says nothing of another's."""
    *_, unfit, _ = told(WEIGHTKEEPER_ALLOW_THREADS="ZMQbg/Reaper,libgomp*")
    assert "(besides it: ZMQbg/IO/0 in libzmq" in unfit


@pytest.mark.parametrize(
    ("names", "unfit"),
    [
        (["jemalloc_bg_thd", "cuda00001800007"], "None"),
        (["jemalloc_bg_thd", "cudaless"], "the imports left 2 threads running"),
    ],
)
def test_threads_that_are_known_to_be_harmless_need_no_leave(names, unfit):
    """libarrow's and NVML's, which vLLM's imports leave on a GPU machine."""
    script = RENAMED.replace("NAMES", repr(names))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(unfit)


class Driver:
    """CUDA's driver as a loaded library, before and after cuInit()."""

    def __init__(self, code: int):
        self.code = code

    def cuDeviceGetCount(self, count: object) -> int:
        return self.code


@pytest.mark.parametrize(("code", "initialized"), [(3, False), (0, True), (100, True)])
def test_the_driver_says_whether_cuda_is_initialized(code, initialized):
    """A call that needs cuInit() is refused before it, and its threads and devices say nothing."""
    asked = []

    def library(name: str, mode: int) -> Driver:
        asked.append((name, mode & os.RTLD_NOLOAD))
        return Driver(code)

    assert cuda_state.is_initialized(library) is initialized
    assert asked == [("libcuda.so.1", os.RTLD_NOLOAD)]


def test_a_driver_that_is_not_loaded_is_not_initialized():
    """Without a GPU, or before torch needs it; asking does not load it."""
    assert not cuda_state.is_initialized()
    assert "libcuda" not in Path("/proc/self/maps").read_text()
