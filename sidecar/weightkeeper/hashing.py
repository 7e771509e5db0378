"""BLAKE3 of a checkpoint's files: several at once, in bounded memory, each the same file before and after."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from blake3 import blake3

from weightkeeper import changes
from weightkeeper.checkpoint import File
from weightkeeper.files import open_regular, shown

CHUNK_BYTES = 4 * 1024 * 1024
"""Larger pieces leave the processor's cache between reading and hashing, and cost half the speed."""

MAX_WORKERS = 8
"""Files at once. Disks are not faster with more."""

REPORT_SECONDS = 0.2

Progress = Callable[[str, int, int], None]
"""Called in the caller's thread with a word for the stage, bytes done, and bytes in all."""


def hash_files(directory: Path, files: Sequence[File], progress: Progress | None = None) -> dict[str, str]:
    """File name → digest in hex. Every byte is read with `read`: of a mapping, a file cut short kills the reader.

    Raises:
        CheckpointChangedError: a file is not what it was when the checkpoint was opened, before or after reading.
        CheckpointError: a file cannot be read.
    """
    changes.refuse(changes.since_opened(directory, files))
    cores = len(os.sched_getaffinity(0))
    workers = max(1, min(MAX_WORKERS, cores, sum(file.size > CHUNK_BYTES for file in files)))
    done = {file.name: 0 for file in files}
    total = sum(file.size for file in files)
    stop = threading.Event()
    with ThreadPoolExecutor(workers, "hashing") as pool:
        largest_first = sorted(files, key=lambda file: file.size, reverse=True)
        futures = {f.name: pool.submit(_hash, directory, f, cores // workers, done, stop) for f in largest_first}
        pending: set[Future[str]] = set(futures.values())
        try:
            while pending:
                finished, pending = wait(pending, REPORT_SECONDS, FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                if progress:
                    progress("hashing", sum(done.values()), total)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return {file.name: futures[file.name].result() for file in files}


def _hash(directory: Path, file: File, threads: int, done: dict[str, int], stop: threading.Event) -> str:
    path = directory / file.name
    hasher = blake3(max_threads=threads if file.size > CHUNK_BYTES else 1)
    piece = memoryview(bytearray(min(CHUNK_BYTES, file.size)))
    with open_regular(path) as (descriptor, stamp):
        words = file.stamp.changes(stamp)
        while not words and not stop.is_set() and (left := file.size - done[file.name]):
            if not (count := os.readv(descriptor, [piece[:left]])):
                break
            hasher.update(piece[:count])
            done[file.name] += count
    changes.refuse([f"{shown(path)}: {words}"] if words else changes.since_opened(directory, [file]))
    if done[file.name] != file.size and not stop.is_set():
        changes.refuse([f"{shown(path)}: it ended after {done[file.name]} of {file.size} bytes"])
    return hasher.hexdigest()
