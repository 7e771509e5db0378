"""NVML: which bindings are taken, and which GPUs a program sees."""

import sys
import types

import pytest

from weightkeeper import nvml

UUIDS = ["GPU-aa1", "GPU-ab2", "GPU-b03"]


@pytest.mark.parametrize(
    ("seen", "indexes"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , GPU-b", [1, 2]),
        ("GPU-aa1", [0]),
        ("7", []),
        ("1,7,0", [1]),
        ("1,-1,0", [1]),
        ("GPU-a,0", []),
        ("GPU-c", []),
        ("MIG-7f", None),
        ("0,MIG-7f", None),
    ],
)
def test_gpus_are_those_of_cuda_visible_devices_in_its_order(seen, indexes):
    """By index or by the beginning of one UUID, up to the first word that names none; of MIG ids nobody knows."""
    assert nvml.visible(seen, UUIDS) == indexes


class Bindings(types.ModuleType):
    """A stand-in: a driver that answers, or none."""

    class NVMLError(Exception):
        pass

    def __init__(self, name: str, works: bool):
        super().__init__(name)
        self.works = works

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")


def test_bindings_without_a_driver_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Bindings("pynvml", works=False))
    assert nvml.bindings() is None


def test_vllms_copy_serves_where_nvidias_package_is_missing(monkeypatch, tmp_path):
    """It is read from its file; vLLM itself is not imported for it."""
    package = tmp_path / "vllm"
    (package / "third_party").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('vLLM was imported')\n")
    (package / "third_party/pynvml.py").write_text(
        "class NVMLError(Exception):\n    pass\n\n\nstarts = []\n\n\ndef nvmlInit():\n    starts.append(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in ("vllm", "vllm_pynvml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = nvml.bindings()
    assert found is nvml.bindings()
    assert (found.__file__, found.starts) == (str(package / "third_party/pynvml.py"), [1, 1])
    assert "vllm" not in sys.modules
    del sys.modules["vllm_pynvml"]


def test_no_package_at_all_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "vllm_pynvml", raising=False)
    monkeypatch.setattr(nvml, "vllm_directory", lambda: None)
    assert nvml.bindings() is None


def test_the_copy_that_this_vllm_carries_is_found(monkeypatch):
    """The real one, which finds no driver here or answers."""
    pytest.importorskip("vllm.version", reason="vLLM is not installed")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "vllm_pynvml", raising=False)
    nvml.bindings()
    assert sys.modules.pop("vllm_pynvml").__file__ == str(nvml.vllm_directory() / "third_party/pynvml.py")
