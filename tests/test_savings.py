"""What of a start can be saved: the switch, the account, the kept size of the KV cache, and the shortened capture."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from weightkeeper import kv_size, savings
from weightkeeper.errors import ConfigError
from weightkeeper.kv_size import SLACK_BYTES, KvSize, Recalled

FIELDS = {"gpu": "GPU-1", "gpu_memory_utilization": "0.9", "driver": "580.1"}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        ("", ()),
        (" ", ()),
        ("ALL", savings.ALL),
        ("none", ()),
        ("default", savings.ALL),
        ("kv-size, bulk-capture", (savings.BULK_CAPTURE, savings.KV_SIZE)),
    ],
)
def test_the_switch_names_what_is_saved(value, names):
    """`all` is everything, `none` nothing, and else names with commas between, in any order; unset it is nothing."""
    assert savings.wanted({} if value is None else {savings.SWITCH: value}, "0.30.0") == names


@pytest.mark.parametrize("version", ["0.29.2", "0.3.0", "0.31.0", "0.32.0+cpu", "0.300.0", "dev", ""])
def test_nothing_is_saved_by_default_with_a_vllm_that_was_not_compared(version):
    """On a GPU, its tokens with those of a start without savings; who asks has them."""
    assert savings.wanted({savings.SWITCH: "default"}, version) == ()
    assert savings.wanted({savings.SWITCH: "all"}, version) == savings.ALL


def test_a_name_that_there_is_not_is_refused():
    """A typing error must not look like a saving that does nothing."""
    with pytest.raises(ConfigError, match="there is no saving bulk-captures; there are frozen-heap, bulk-capture,"):
        savings.wanted({savings.SWITCH: "kv-size,bulk-captures"}, "0.30.0")


def test_the_account_says_what_was_applied_and_why_the_rest_was_not():
    """One line, in the order of the names; the first cause stays, and what is not wanted is not in it."""
    account = savings.Account([savings.BULK_CAPTURE, savings.DEFERRED_GRAPHS, savings.KV_SIZE])
    account.apply(savings.KV_SIZE, "1.00 GiB")
    account.apply(savings.BULK_CAPTURE)
    account.apply(savings.FROZEN_HEAP)
    account.skip(savings.DEFERRED_GRAPHS, "LoRA")
    account.skip(savings.DEFERRED_GRAPHS, "another")
    account.apply(savings.DEFERRED_GRAPHS)
    said = "savings of this start: bulk-capture, kv-size (1.00 GiB); not: deferred-graphs (LoRA)"
    assert str(account) == said
    assert not account.wants(savings.DEFERRED_GRAPHS)


def test_what_fails_later_is_no_longer_applied():
    """A saving that was applied and then failed is told as failed."""
    account = savings.Account([savings.LATE_INDUCTOR])
    account.apply(savings.LATE_INDUCTOR)
    account.skip(savings.LATE_INDUCTOR, "broken")
    assert str(account) == "savings of this start: none; not: late-inductor (broken)"


def place(directory: Path, free: int = 100 * GIB, **changed: str) -> KvSize:
    return KvSize(directory, FIELDS | changed, free)


def test_the_size_of_a_good_start_is_used_by_the_next(tmp_path):
    """Kept, recalled, used and confirmed, as often as one likes."""
    assert place(tmp_path / "a/b").recall() == Recalled(0, "no good start of this configuration is known")
    place(tmp_path / "a/b").keep(12345)
    for _ in range(2):
        one = place(tmp_path / "a/b")
        assert one.recall() == Recalled(12345)
        one.begin()
        one.good()
    assert [file.name for file in (tmp_path / "a/b").iterdir()] == [one.path.name]


@pytest.mark.parametrize("name", FIELDS)
def test_a_size_is_not_used_where_a_field_differs(tmp_path, name):
    """Every field is part of the key."""
    place(tmp_path).keep(12345)
    assert place(tmp_path, **{name: "other"}).recall().nbytes == 0
    assert place(tmp_path).recall().nbytes == 12345


def test_a_size_is_not_used_where_less_memory_is_free(tmp_path):
    """Up to the slack it is the noise of contexts; more is another tenant."""
    place(tmp_path).keep(12345)
    assert place(tmp_path, 100 * GIB - SLACK_BYTES).recall().nbytes == 12345
    assert place(tmp_path, 200 * GIB).recall().nbytes == 12345
    short = place(tmp_path, 100 * GIB - SLACK_BYTES - 1).recall()
    assert short == Recalled(0, "107307073535 bytes of the GPU are free, 107374182400 were when it was measured")


def test_a_size_is_forgotten_when_the_start_with_it_did_not_come_up(tmp_path):
    """The next start measures, and so does the one after it if nothing was kept."""
    place(tmp_path).keep(12345)
    place(tmp_path).begin()
    assert place(tmp_path).recall() == Recalled(0, "the last start with it did not come up")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b'{"schema": 1, "fields": {}, "kv_cache_bytes": "many", "free_bytes": 1}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_is_not_used(tmp_path, content):
    """Whatever lies there, the start measures."""
    one = place(tmp_path)
    one.path.write_bytes(content)
    assert one.recall().nbytes == 0
    assert str(one.path) in one.recall().why


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"kv_cache_bytes": 0}, {"kv_cache_bytes": -5}, {"fields": {"a": "b"}}]
)
def test_a_file_of_another_kind_is_not_used(tmp_path, change):
    """Its name is a digest; its content has to say the same, and has to make sense."""
    one = place(tmp_path)
    one.keep(12345)
    one.path.write_text(json.dumps(json.loads(one.path.read_text()) | change))
    assert one.recall() == Recalled(0, f"{one.path} is of another kind")


def test_only_so_many_sizes_are_kept(tmp_path, monkeypatch):
    """The oldest go."""
    monkeypatch.setattr(kv_size, "MAX_FILES", 2)
    for number in range(4):
        one = place(tmp_path, gpu=f"GPU-{number}")
        one.keep(1)
        os.utime(one.path, (number, number))
    assert sorted(place(tmp_path, gpu=f"GPU-{n}").recall().nbytes for n in range(4)) == [0, 0, 1, 1]
    assert place(tmp_path, gpu="GPU-3").recall().nbytes == 1


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, calls: list):
        self.calls = calls

    def capture_begin(self, *pool: object, **named: object) -> None:
        self.calls.append(("begin", pool, named))

    def capture_end(self) -> None:
        self.calls.append("end")


class Stream:
    """Stands for the stream's context."""

    def __init__(self, calls: list):
        self.calls = calls

    def __enter__(self) -> None:
        self.calls.append("stream")

    def __exit__(self, *_: object) -> None:
        self.calls.append("stream left")


@pytest.fixture
def calls(monkeypatch) -> list:
    """What torch's real `torch.cuda.graph` calls of the GPU."""
    import torch

    made: list = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty_cache"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: made.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Stream(made))
    return made


def capture(calls: list) -> None:
    import torch

    with torch.cuda.graph(Graph(calls), (0, 1), stream=SimpleNamespace()):
        calls.append("run")


CLEARED = ["synchronize", "empty_cache", "host"]
BEGUN = ["stream", ("begin", ((0, 1),), {"capture_error_mode": "global", "check_input_liveness": False}), "run"]
ENDED = ["end", "stream left"]


def test_this_torch_begins_a_graph_in_a_known_way(calls):
    """And what the real class does is what `shortened` leaves out, and what it keeps."""
    from weightkeeper import bulk_capture

    assert bulk_capture.why_not() == ""
    capture(calls)
    assert calls == CLEARED + BEGUN + ENDED


def test_a_bulk_capture_clears_once_before_and_once_after(calls):
    """However many graphs there are; afterwards everything is as it was."""
    from weightkeeper import bulk_capture

    with bulk_capture.bulk():
        capture(calls)
        capture(calls)
    assert calls == [*CLEARED, *(BEGUN + ENDED) * 2, "synchronize", "empty_cache"]
    calls.clear()
    capture(calls)
    assert calls == CLEARED + BEGUN + ENDED


def test_a_bulk_capture_that_fails_leaves_nothing_changed(calls):
    """The error goes on, and torch begins its graphs as before."""
    from weightkeeper import bulk_capture

    with pytest.raises(RuntimeError, match="out of memory"), bulk_capture.bulk():
        raise RuntimeError("out of memory")
    calls.clear()
    capture(calls)
    assert calls == CLEARED + BEGUN + ENDED


def test_a_shortened_graph_can_have_another_error_mode(calls):
    """Where other threads may use the GPU meanwhile."""
    from weightkeeper import bulk_capture

    with bulk_capture.shortened("thread_local"):
        capture(calls)
    assert calls[1][2]["capture_error_mode"] == "thread_local"


def test_a_graph_with_annotations_is_begun_by_torch_itself(calls, monkeypatch):
    """They need more than the beginning."""
    import torch

    from weightkeeper import bulk_capture

    whole = torch.cuda.graph.__enter__
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda self: calls.append("whole"))
    with bulk_capture.shortened():
        one = torch.cuda.graph(Graph(calls), stream=SimpleNamespace())
        one._enable_annotations = True
        one.__enter__()
    assert calls == ["whole"]
    assert torch.cuda.graph.__enter__ is not whole


ENTERS = {
    "2.11": """
        def __enter__(self) -> None:
            # Free as much memory as we can for the graph
            torch.cuda.synchronize()

            if torch.compiler.config.force_cudagraph_gc:
                # Originally we unconditionally garbage collected here.
                gc.collect()

            torch.cuda.empty_cache()
            # pyrefly: ignore [missing-attribute]
            torch._C._host_emptyCache()

            self.stream_ctx.__enter__()

            self.cuda_graph.capture_begin(
                # type: ignore[misc]
                *self.pool,
                # pyrefly: ignore [bad-keyword-argument]
                capture_error_mode=self.capture_error_mode,
            )
    """,
    "unknown": """
        def __enter__(self) -> None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.stream_ctx.__enter__()
            self.register_with_somebody()
            self.cuda_graph.capture_begin(*self.pool, capture_error_mode=self.capture_error_mode)
    """,
}


@pytest.mark.parametrize(("version", "is_known"), [("2.11", True), ("unknown", False)])
def test_only_a_known_way_to_begin_is_shortened(monkeypatch, version, is_known):
    """By what it is made of, not by a version's number: torch 2.11's is known, one that does more is not."""
    from weightkeeper import bulk_capture

    monkeypatch.setattr(bulk_capture.inspect, "getsource", lambda _: ENTERS[version])
    why = bulk_capture.why_not()
    assert (why == "") is is_known
    assert is_known or why.endswith("begins a graph in a way that is not known here")
