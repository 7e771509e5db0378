"""Whether what an engine wants fits beside the keeper's copy."""

import json
import struct
import sys
import types

import pytest
from click.testing import CliRunner

from weightkeeper import room
from weightkeeper.commands import room as command
from weightkeeper.errors import Difference, MismatchError, NoRoomError, NoSocketError
from weightkeeper.memory.available import Available

GIB = 1 << 30
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
MISMATCH = MismatchError([Difference("dtype", "a", "b")])


@pytest.fixture
def checkpoint(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4000))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_only_causes_that_leave_the_keepers_copy_ask_for_room_for_a_second():
    """Without a keeper there is nothing beside which a disk load has to fit."""
    assert room.second_copy(MISMATCH)
    assert not room.second_copy(NoSocketError("none"))


def test_a_second_copy_without_room_is_refused_with_the_cause_and_the_numbers(checkpoint, monkeypatch):
    """C01 under `fallback: true`: never a second copy in silence."""
    monkeypatch.setattr(room, "available", lambda: Available(3999, "the memory limit in /group"))
    with pytest.raises(NoRoomError) as caught:
        room.check(checkpoint, MISMATCH)
    assert "needs 4000 bytes beside the keeper's copy, 3999 are free (the memory limit in /group)" in str(caught.value)
    assert "code=mismatch: dtype: the keeper has a, the engine has b" in str(caught.value)
    assert caught.value.code == "no_room"


def test_a_second_copy_with_room_is_let_through(checkpoint, monkeypatch):
    """Exactly enough is enough."""
    monkeypatch.setattr(room, "available", lambda: Available(4000, "memory"))
    room.check(checkpoint, MISMATCH)


def test_held_bytes_count_once_as_weights():
    """G02: what vLLM may use itself is its share less what the keeper holds for it."""
    assert room.requested(100 * GIB, 85 * GIB, 0.9, 14 * GIB, "zero_copy", UUID) == 76 * GIB


def test_copy_mode_keeps_the_whole_share_because_the_keepers_copy_goes_back():
    """The same bytes are never counted twice."""
    assert room.requested(100 * GIB, 85 * GIB, 0.9, 14 * GIB, "copy", UUID) == 90 * GIB


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_what_does_not_fit_names_total_keeper_and_others(mode):
    """G02, second form: another process holds memory too."""
    with pytest.raises(NoRoomError) as caught:
        room.requested(100 * GIB, 60 * GIB, 0.9, 14 * GIB, mode, UUID)
    for number in (100 * GIB, 14 * GIB, 26 * GIB, 60 * GIB, 90 * GIB):
        assert str(number) in str(caught.value)
    assert UUID in str(caught.value)


def test_a_share_smaller_than_the_weights_is_refused():
    """Nothing would be left for the cache."""
    with pytest.raises(NoRoomError):
        room.requested(100 * GIB, 85 * GIB, 0.1, 14 * GIB, "zero_copy", UUID)


class Nvml(types.ModuleType):
    """A stand-in for NVML: a GPU for each number of free bytes."""

    class NVMLError(Exception):
        pass

    def __init__(self, free: list[int]):
        super().__init__("pynvml")
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: len(free)
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetName = self.nvmlSystemGetDriverVersion = lambda *_: "any"
        self.nvmlDeviceGetUUID = lambda index: f"GPU-{index}abc"
        self.nvmlDeviceGetMemoryInfo = lambda index: types.SimpleNamespace(total=100 * GIB, free=free[index])


@pytest.mark.parametrize(
    ("visible", "ranks", "free"),
    [(None, 1, 7), (None, 2, 6), ("1", 1, 3), ("GPU-2a", 1, 50), ("2,1", 1, 50), ("2,1", 2, 6), ("1", 2, None)],
)
def test_room_on_gpus_is_that_of_those_which_engines_compute_on(checkpoint, monkeypatch, visible, ranks, free):
    """CUDA_VISIBLE_DEVICES says which, and in which order; the fullest bounds all ranks."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([7, 3, 50]))
    monkeypatch.setattr(command, "kind_of_device", lambda: "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = checkpoint / "engine.yaml"
    config.write_text(f"model: {checkpoint}\ntensor-parallel-size: {ranks}\n")
    done = CliRunner().invoke(command.command, ["--config", str(config)])
    assert json.loads(done.output) == {
        "needed": 8000,
        "free": free,
        "bound": f"{ranks} GPU(s) are not visible here, or NVML does not say what is free"
        if free is None
        else f"on {ranks} GPU(s)",
    }
