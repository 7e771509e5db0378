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

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

import make_model  # noqa: E402
import torch  # noqa: E402
from bench_restart import Bench, Start, arguments_of, options_of, table  # noqa: E402
from server_run import ServerRun, kill_session, processes  # noqa: E402
from weight_holders import as_arguments, cuda_libraries  # noqa: E402

LOG = """\
    0.500 INFO non-default args: {}
    2.000 INFO Initializing a V1 LLM engine (v0.30.0) with config
    3.000 INFO Starting to load model /m...
    3.500 INFO weightkeeper: zero_copy, mapped 100 bytes and copied 5 in 54.5 ms (connect 1 ms)
    3.600 INFO Model loading took 13.4 GiB memory and 0.600000 seconds
    5.000 INFO Graph capturing finished in 3 secs, took 0.5 GiB
    6.000 INFO Graph capturing finished in 4 secs, took 0.5 GiB
    6.500 INFO init engine (profile, create kv cache, warmup model) took 2.90 s (compilation: 1.00 s)
"""


@pytest.fixture
def logged() -> ServerRun:
    """A server of which only the log is left."""
    server = object.__new__(ServerRun)
    server.lines = [(float(line[:9]), line[10:]) for line in LOG.splitlines()]
    return server


def test_phases_add_up_to_the_answer(logged):
    """A moment that the log does not tell goes to the phase behind it."""
    phases = logged.phases(health=7.0, answered=7.25)
    assert phases == {
        "server imported": 0.5, "engine core imported": 1.5, "device ready": 1.0, "weights there": 0.6,
        "engine ready": 2.9, "healthy": 0.5, "answered": 0.25,
    }  # fmt: skip
    assert sum(phases.values()) == 7.25


def test_numbers_of_the_log_are_read_and_added(logged):
    """vLLM captures graphs twice and says so twice."""
    details = logged.details()
    assert details["graph capture"] == 7.0
    assert details["map and bind (ms)"] == 54.5
    assert details["init engine"] == 2.9
    assert logged.fell_back() is False
    logged.lines.append((8.0, "WARNING weightkeeper: fallback to disk, code=mismatch: dtype"))
    assert logged.fell_back() is True


def test_only_right_completions_count():
    """A wrong answer is told and is in no median; the ratio is of starts of the same round."""
    starts = [
        Start("disk", 1, "right", 30.0, 29.0, 1.0),
        Start("mapped", 1, "right", 9.0, 8.0, 1.0),
        Start("ipc_cache", 1, "right", 19.0, 18.0, 1.0),
        Start("mapped", 2, "wrong", 1.0, 1.0, 1.0),
        Start("ipc_cache", 2, "right", 39.0, 38.0, 1.0),
    ]
    rows = {line.split("|")[1].strip(): line for line in table(starts, ["disk", "ipc_cache", "mapped"]).splitlines()}
    assert rows["mapped"] == "| mapped | 1 of 2 | 10.00 / 10.00 / 10.00 | 1.00 | 8.00 | 0.50 (0.50–0.50) |"
    assert rows["ipc_cache"].startswith("| ipc_cache | 2 of 2 | 20.00 / 30.00 / 40.00 |")
    assert rows["disk"].endswith("| 1.55 (1.55–1.55) |")


def test_without_a_reference_the_first_counted_start_is_from_disk_and_gives_it(tmp_path, monkeypatch, logged):
    """What a cold start computed while others used the GPU judges nothing; a wrong answer is told with both."""
    bench = Bench({}, tmp_path, None)
    tokens = {"disk": [1, 2], "reload": [1, 3], "crash": [1, 2]}

    def start(row: str, number: int) -> Start:
        made = Start(row, number, tokens=tokens[row])
        made.result = bench._judge(made, logged)
        return made

    assert bench._judge(Start("disk", 0, tokens=[9]), logged) == "right" and bench.reference == []
    monkeypatch.setattr(bench, "start", start)
    told = {(one.round, one.row): one for one in bench.rounds(["crash", "reload", "disk"], 2, 0, float("inf"))}
    assert next(iter(told)) == (1, "disk")
    assert {row: told[1, row].result for row in tokens} == {"disk": "right", "reload": "wrong", "crash": "right"}
    assert told[2, "reload"].message == "tokens [1, 3], and not [1, 2]"


def test_a_run_needs_a_row_from_disk_or_the_tokens_of_another_run(capsys):
    """Or nothing would say what is right."""
    with pytest.raises(SystemExit):
        arguments_of(["--model", "/m", "--rows", "reload"])
    assert "what is right is told by the row disk" in capsys.readouterr().err


def test_options_are_the_same_for_engines_and_holders():
    """As a config file for both, and as arguments for vLLM's daemon, without those of an engine alone."""
    given = ["--model", "/m", "--eager", "--option", "max-model-len=64", "--option", "load-format=auto"]
    options = options_of(arguments_of(given))
    assert options["max-model-len"] == 64
    arguments = as_arguments(options | {"hf-overrides": {"a": 1}, "trust-remote-code": False})
    assert arguments == [
        "--model", "/m", "--dtype", "bfloat16", "--max-model-len", "64", "--enforce-eager",
        "--gpu-memory-utilization", "0.6", "--hf-overrides", '{"a": 1}',
    ]  # fmt: skip


def test_a_killed_session_takes_everything_it_started_along(tmp_path):
    """Also a grandchild that has begun a session of its own."""
    code = (
        "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as leader:
        pid = int(wait_for((tmp_path / "pid").exists and (lambda: read(tmp_path / "pid")), "the grandchild"))
        assert pid in processes()
        kill_session(leader.pid)
        assert leader.wait(10) == -signal.SIGKILL
    assert pid not in processes()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_libraries_of_cuda_and_torch_are_seen():
    """The control of `no CUDA library is mapped`: torch is, here."""
    assert any(name.startswith("libtorch") for name in cuda_libraries(os.getpid()))


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
    while mine := [pid for pid in processes() if str(tmp_path) in command_of(pid)]:
        assert time.monotonic() < deadline, mine
    assert not list(tmp_path.glob("wk*"))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
