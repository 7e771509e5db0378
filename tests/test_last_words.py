"""What a server said of its start or its end is found in its log. The lines are those of vLLM 0.32, shortened."""

import pytest

from weightkeeper.supervisor import last_words
from weightkeeper.supervisor.error_words import MAX_CHARACTERS, error_in, fallback_in
from weightkeeper.supervisor.follow import Outcome
from weightkeeper.supervisor.last_words import added, of_server

TOO_MUCH = (
    "ValueError: Available memory on node 0 (19.57/23.54 GiB) is less than requested memory for kv (100000.0 GiB)."
)
WORKER = "(Worker pid=14453) ERROR 11-30 04:52:57 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=13719) ERROR 11-30 04:52:57 [core.py:1510] "
INVALID = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
STARTING = "(APIServer pid=7) INFO 11-30 04:52:34 [model.py:2152] Using max model len 8192"
LIMIT = "(APIServer pid=7) WARNING 11-30 04:52:34 [system_utils.py:255] This can cause errors like `OSError: too many`"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            [
                STARTING, LIMIT,
                f"{WORKER}Traceback (most recent call last):",
                f'{WORKER}  File "/vllm/v1/worker/cpu_worker.py", line 7, in determine_available_memory',
                f"{WORKER}    raise ValueError(",
                f"{WORKER}{TOO_MUCH}",
                f"{CORE}RuntimeError: Worker failed with error 'Available …', please check the stack trace above",
                "RuntimeError: Worker failed with error 'Available …', please check the stack trace above for it",
                "    raise RuntimeError(",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            TOO_MUCH,
        ),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
         "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (["(EngineCore pid=7) ValueError: first", "(EngineCore pid=7) KeyError: 'second'"], "KeyError: 'second'"),
        (["vllm serve: error: unrecognized arguments: --x"], ""),
        (["RuntimeError: Engine core initialization failed. See root cause above."],
         "RuntimeError: Engine core initialization failed. See root cause above."),
        ([STARTING, LIMIT, "Killed", "ValueError:", "  ValueError: in a source line"], ""),
        (["2026-11-30 04:52:57,001 INFO weightkeeper.launcher: generation 2: ended: exit code 1"], ""),
        ([], ""),
        ([f"{CORE}Traceback (most recent call last):", f"{CORE}MemoryError"], "MemoryError"),
        (["torch.OutOfMemoryError"], "torch.OutOfMemoryError"),
        (["KeyboardInterrupt\r"], "KeyboardInterrupt"),
        (["ValueError: too long", "asyncio.exceptions.CancelledError"], "ValueError: too long"),
        (["MemoryError", "asyncio.exceptions.CancelledError", "RuntimeError: It failed. See root cause above."],
         "MemoryError"),
        (["RuntimeError: It failed. See root cause above.", "zlib.error"], "zlib.error"),
        (["error", "Error", "  MemoryError", "no MemoryError"], ""),
        (["Fatal Python error: Segmentation fault", "Current thread 0x1:"], "Fatal Python error: Segmentation fault"),
        (["(EngineCore pid=7) WARNING 11-30 04:52:57 [cache.py:9] OSError: cannot read the cache, going on"], ""),
        (["ValueError: too long", "Exception ignored in: <function X.__del__>", "Traceback", "AttributeError: 'None'"],
         "ValueError: too long"),
        (["Exception ignored in: <function X>", "KeyError: 'x'", "ValueError: too long"], "ValueError: too long"),
        ([f"(APIServer pid=7) {INVALID}", "(APIServer pid=7)   Value error, too long [type=value_error, input=7]",
          "(APIServer pid=7)     For further information visit https://errors.pydantic.dev"],
         f"{INVALID}: Value error, too long"),
        ([INVALID, "max_num_seqs", "  Input should be greater than 0 [type=greater_than, input_value=0]"],
         f"{INVALID}: max_num_seqs: Input should be greater than 0"),
        ([INVALID], INVALID),
        (["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: unhandled (1 sub-exception)",
          "  +-+---------------- 1 ----------------", "    | Traceback (most recent call last):",
          "    | ValueError: too long", "    +------------------------------------"], "ValueError: too long"),
    ],
    ids=["worker", "memory", "the last one", "no traceback", "only a hint", "nothing", "ours", "empty", "bare",
         "bare torch", "bare interrupt", "words before none",
         "the first of those without", "bare before a hint", "no bare one",
         "a crash of Python", "only a warning", "taken apart", "taken apart before",
         "invalid", "invalid field", "invalid, cut off", "group"],
)  # fmt: skip
def test_the_error_is_the_last_one_that_says_what_went_wrong(lines, found):
    assert error_in(lines) == found


def test_an_error_is_cut_and_has_nothing_in_it_that_moves_a_terminal():
    said = error_in([f"ValueError: \x1b[2J{'x' * 10_000}"])
    assert said.startswith("ValueError: ?[2Jxxx")
    assert len(said) == MAX_CHARACTERS + 1


def test_a_fallback_to_disk_is_told_with_its_first_reason():
    """Every worker says it."""
    line = "(Worker pid=7) WARNING 11-30 04:52:57 [mapped_loader.py:213] weightkeeper: fallback to disk, code="
    quoted = "INFO weightkeeper: reload engine: words → weightkeeper: fallback to disk, code=old: x"
    lines = [STARTING, quoted, f"{line}not_loaded: nothing is held", f"{line}timeout: x"]
    assert fallback_in(lines) == "code=not_loaded: nothing is held"
    assert fallback_in([STARTING, LIMIT]) == ""


LAUNCHER = "2026-11-30 04:52:57,001 INFO weightkeeper.launcher.generation: generation"


def test_what_a_server_said_begins_with_its_own_start():
    """The end of the one before, and what users quote, are not its words; 0 is the newest server."""
    lines = [
        "ValueError: of the old one", f"{LAUNCHER} 6: starts (reload: x)", "ValueError: of the sixth",
        f"{LAUNCHER} 7: starts (crash: exit code 1)", f"words {LAUNCHER} 6: starts (x)", "last",
    ]  # fmt: skip
    assert of_server(lines, 6) == lines[1:]
    assert of_server(lines, 7) == of_server(lines) == lines[3:]
    assert of_server(lines, 8) == lines


def test_a_server_that_could_not_be_started_has_said_nothing():
    """What is in the log was said by the one before."""
    lines = [
        "ValueError: of the old one",
        f"{LAUNCHER} 6: the server cannot be started: no room".replace("INFO", "ERROR"),
    ]
    assert error_in(of_server(lines, 6)) == ""


class Late:
    """A container whose log gets one more line with every look, and its last one stays."""

    def __init__(self, *lines: str):
        self.lines = lines
        self.looks = 0

    def logs(self, since: float, tail: int) -> bytes:
        self.looks += 1
        return "\n".join(self.lines[: self.looks]).encode()


STARTS = f"{LAUNCHER} 2: starts (reload: x)"
ENDED = f"{LAUNCHER} 2: ended with exit code 1, nothing of it left after 0.01 s"


@pytest.mark.parametrize(
    ("generation", "lines"),
    [
        (
            2,
            (
                "ValueError: of the old one",
                f"{LAUNCHER} 1: ended",
                STARTS,
                "KeyError: 'before'",
                "MemoryError: x",
                ENDED,
            ),
        ),
        (2, (STARTS, ENDED, "MemoryError: x")),
        (0, ("INFO starting", "INFO working", "MemoryError: x")),
    ],
    ids=["in order", "the error last", "without our launcher"],
)
def test_an_error_that_docker_writes_late_is_waited_for(generation, lines):
    """What the launcher tells of an end is known before it is all in the container's log."""
    container = Late(*lines)
    assert added(Outcome("exited", 1.0, "with exit code 1"), container, 0.0, generation).detail == (
        "with exit code 1 (MemoryError: x)"
    )
    assert container.looks >= len(lines)


def test_a_fallback_that_docker_writes_late_is_waited_for():
    """Up to the launcher's line about the server that is ready, and no longer."""
    ready = f"{LAUNCHER} 2: ready after 1.0 s: fork 0.1 s"
    container = Late(STARTS, "INFO", "weightkeeper: fallback to disk, code=timeout: x", ready)
    assert added(Outcome("healthy", 1.0), container, 0.0, 2).detail == "weights from disk, code=timeout: x"
    assert container.looks == 4


@pytest.mark.parametrize(("generation", "seconds"), [(2, "REST_SECONDS"), (0, "LOG_SECONDS")])
def test_an_end_without_words_is_waited_for_only_so_long(generation, seconds, monkeypatch):
    """It may have been killed."""
    monkeypatch.setattr(last_words, seconds, 0.1)
    container = Late(STARTS, ENDED)
    assert added(Outcome("exited", 1.0, "by SIGKILL"), container, 0.0, generation).detail == "by SIGKILL"
    assert 2 <= container.looks < 20


def test_a_health_that_our_launcher_does_not_tell_is_looked_at_once():
    """A container without it, or whose start was seen by Docker's health alone."""
    container = Late("INFO", "weightkeeper: fallback to disk, code=timeout: x")
    assert added(Outcome("healthy", 1.0), container, 0.0).detail == ""
    assert container.looks == 1
