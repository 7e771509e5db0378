"""The scripts that measure: what they compute from what they saw, and that they run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from keepers import wait_for

from weightkeeper.checkpoint import open_checkpoint
from weightkeeper.launcher.processes import table

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

import make_model  # noqa: E402
import torch  # noqa: E402


@pytest.mark.parametrize("options", [{}, {"quantize_to": "fp8-block"}, {"mla": True}], ids=["bf16", "fp8", "mla"])
def test_made_checkpoints_are_whole(tmp_path, options):
    """Two seeds give equal headers and other bytes."""
    shape = make_model.Shape(layers=1, hidden=256, intermediate=300, vocabulary=512)
    one, two = tmp_path / "one", tmp_path / "two"
    for seed, out in enumerate((one, two)):
        make_model.make(out, shape, seed=seed, **options)
    first, second = open_checkpoint(one), open_checkpoint(two)
    assert first.nbytes == second.nbytes > 0
    assert [file.name for file in first.files] == [file.name for file in second.files]
    assert (one / "config.json").read_bytes() == (two / "config.json").read_bytes()
    assert (one / "model-00001.safetensors").read_bytes() != (two / "model-00001.safetensors").read_bytes()


def test_fp8_blocks_give_the_weights_back():
    """Every block, also the cut ones at the edges, within the precision of e4m3."""
    weight = make_model.Draw(0).matrix(300, 200).float()
    weight[130, 140] = 5.0
    quantized, scale = make_model.quantize(weight)
    assert (quantized.dtype, quantized.shape, scale.shape) == (torch.float8_e4m3fn, (300, 200), (3, 2))
    full = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    error = (quantized.float() * full - weight).abs()
    assert (error <= weight.abs() * 2**-4 + full * 2**-10).all()
    assert quantized.float().abs().max() == 448


def test_mapping_is_measured(tmp_path):
    """On the host's transport, with real keepers; every sample is in the JSON."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPTS / "bench_map.py"), "--sizes", "0.01,0.02", "-n", "2", "--tensors", "10"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*command, "--json", str(out)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("| GB | segments | connect ms | receive ms | map ms | bind ms |")
    result = json.loads(out.read_text())
    assert [size["gigabytes"] for size in result["sizes"]] == [0.01, 0.02]
    for size in result["sizes"]:
        assert {name: len(values) for name, values in size["milliseconds"].items()} == {
            "connect": 2, "receive": 2, "map": 2, "bind": 2,
        }  # fmt: skip


def test_an_interrupted_benchmark_leaves_no_process(tmp_path):
    """Ctrl-C while it measures."""
    command = [sys.executable, str(SCRIPTS / "bench_map.py"), "--sizes", "0.01", "-n", "100000", "--tensors", "10"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": str(tmp_path)
    }  # fmt: skip
    with subprocess.Popen(command, env=environment, start_new_session=True) as bench:
        wait_for(lambda: any(tmp_path.glob("wk*/*/run/cpu-0.sock")), "a keeper that is ready")
        bench.send_signal(signal.SIGINT)
        assert bench.wait(30) == 130
    deadline = time.monotonic() + 10
    while mine := [pid for pid in table() if str(tmp_path) in command_of(pid)]:
        assert time.monotonic() < deadline, mine
    assert not list(tmp_path.glob("wk*"))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
