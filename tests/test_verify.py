"""`weightkeeper verify`: a byte that is not as it was loaded is found and its tensors named, on real keepers."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from keepers import KeeperProcess, keeper, wait_for

from weightkeeper import client
from weightkeeper.errors import BuildFailedError, MemoryKindError, ProtocolError
from weightkeeper.frames import close_all
from weightkeeper.memory import cuda_devices
from weightkeeper.protocol import Report

LOADER = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('digesting_loader.py')))}"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
NBYTES = 64 * 100 * 4 + 300 * 100 * 4 + 300 * 4 + 2000 * 4


def verify(one: KeeperProcess, *arguments):
    """Exit code, stdout and stderr of the command."""
    command = [sys.executable, "-m", "weightkeeper.cli", "verify", "--socket-dir", one.socket_dir, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    return result.returncode, result.stdout, result.stderr


@contextmanager
def holding(directory: Path, **plan):
    """A keeper that holds the model of `digesting_loader`."""
    one = KeeperProcess(directory, **plan).start(loader=LOADER)
    try:
        one.wait_for_state("ready")
        yield one
    finally:
        one.kill()


def test_weights_as_they_were_loaded(tmp_path):
    """Exit code 0 and one line a device; nothing is left of the lease."""
    with holding(tmp_path) as one:
        code, out, err = verify(one)
        assert (code, err) == (0, "")
        pattern = r"cpu-0: as it was loaded \(154\.8 kB in 4 storages, \d+\.\d\d s, \d+\.\d [kMG]B/s\)\n"
        assert re.fullmatch(pattern, out), out
        assert f"{NBYTES / 1000:.1f}" == "154.8"
        wait_for(lambda: one.status().leases == (), "the end of the lease")
        assert [line.split(" after")[0] for line in one.lines()[-2:]] == [
            "lease begins: verify on cpu-0 (verify, generation 1)",
            "lease ends: verify on cpu-0 (verify, generation 1)",
        ]


@pytest.mark.parametrize(
    ("spoiled", "paths"),
    [
        ("layer.weight", ["layer.weight"]),
        ("embed.weight", ["embed.weight", "head.weight"]),
        ("right", ["left", "right"]),
    ],
)
def test_a_spoiled_byte_is_found_and_named(tmp_path, spoiled, paths):
    """With every tensor that lies in its storage, and every tie."""
    with holding(tmp_path, spoil=spoiled) as one:
        code, out, err = verify(one, "--json")
        assert (code, err) == (1, "")
        report = json.loads(out)
        (device,) = report["devices"]
        (found,) = device["differences"]
        assert report["same"] is False
        assert (device["device"], device["storages"], device["unchecked"]) == ("cpu-0", 4, [])
        assert found["paths"] == paths
        assert found["expected"] != found["found"]
        code, out, _ = verify(one)
        assert code == 1
        first, second = out.splitlines()
        assert first.startswith("cpu-0: 1 of 4 storages differ (154.8 kB in 4 storages, ")
        assert second == (
            f"  {', '.join(paths)}: {found['nbytes']} bytes at {found['offset']}: "
            f"digest {found['expected']} at load, {found['found']} now"
        )


def test_json_of_good_weights(tmp_path):
    """The fields that scripts read."""
    with holding(tmp_path) as one:
        code, out, _ = verify(one, "--json", "--device", "cpu-0")
        report = json.loads(out)
        assert (code, report["same"]) == (0, True)
        (device,) = report["devices"]
        assert device.pop("seconds") > 0
        assert device == {
            "device": "cpu-0", "generation": 1, "kind": "host", "nbytes": NBYTES, "storages": 4, "differences": [],
            "unchecked": [],
        }  # fmt: skip


def test_a_loader_without_digests_is_said(tmp_path):
    """Weights of an older release cannot be verified, and that is not success."""
    with holding(tmp_path, digests=False) as one:
        assert verify(one) == (
            1, "cpu-0: cannot be verified: its loader took no digests; `weightkeeper load` takes them\n", "",
        )  # fmt: skip


def test_a_digest_over_bytes_outside_the_arena_is_not_published(tmp_path):
    """The keeper refuses it, as it refuses tensors outside."""
    one = KeeperProcess(tmp_path, beyond=True).start(loader=LOADER)
    try:
        assert "the digest of 'left' is over bytes outside the arena" in one.wait_for_state("failed").failure
    finally:
        one.kill()


def test_a_device_that_is_not_held_is_a_wrong_option(tmp_path):
    """Exit code 2, with what is held."""
    with holding(tmp_path) as one:
        code, out, err = verify(one, "--device", "cpu-1")
        assert (code, out) == (2, "")
        assert "nothing is held on cpu-1; held: cpu-0" in err


def test_without_weights_there_is_nothing_to_verify(tmp_path):
    """Exit code 1 and the keeper's state."""
    with keeper(tmp_path, with_config=False) as one:
        one.wait_for_state("empty")
        code, out, err = verify(one)
        assert (code, out) == (1, "")
        assert err == "weightkeeper: the keeper holds no weights (it is empty), so there is nothing to verify\n"


def test_verifying_is_a_lease_and_no_engine(tmp_path):
    """It shows in status, compares no fingerprint, stops no release, takes no refusal from an engine, gives nothing."""
    with keeper(tmp_path) as one:
        one.wait_for_state("ready")
        client.report(one.socket_dir, Report("build_failed", "vllm-a", message="no such layer"))
        with client.open_session(one.socket_dir, "cpu-0", name="verify") as session:
            granted = session.map({}, "verify")
            assert granted.grant.fingerprint == {"dtype": "bfloat16"}
            close_all(granted.descriptors)
            (lease,) = one.status().leases
            assert (lease.name, lease.mode, lease.is_engine) == ("verify", "verify", False)
            status = [sys.executable, "-m", "weightkeeper.cli", "status", "--socket-dir", one.socket_dir]
            shown = subprocess.run(status, capture_output=True, text=True, env=ENVIRONMENT).stdout
            assert "engines      none\nverifying    verify  cpu-0  verify, generation 1" in shown
            with client.open_session(one.socket_dir, "cpu-0") as engine, pytest.raises(BuildFailedError):
                engine.map({"dtype": "bfloat16"}, "zero_copy")
            with pytest.raises(ProtocolError, match="ReleaseRequest is out of place on an engine socket"):
                session.release()
        with client.open_session(one.socket_dir, "cpu-0", name="verify") as session:
            close_all(session.map({}, "verify").descriptors)
            assert client.release(one.socket_dir) == "generation 1, 1.0 MB"
            assert one.status().state == "released"


def test_a_gpu_that_is_not_here_is_named(monkeypatch):
    """With the GPUs that are, and the variable that hides others."""
    from fake_cuda import FakeCuda

    monkeypatch.setattr(cuda_devices, "bindings", FakeCuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert cuda_devices.ordinal_of("MIG-00010203-0405-0607-0809-0A0B0C0D0E0F") == 0
    with pytest.raises(MemoryKindError) as caught:
        cuda_devices.ordinal_of("GPU-ffffffff-0405-0607-0809-0a0b0c0d0e0f")
    assert str(caught.value) == (
        "GPU-ffffffff-0405-0607-0809-0a0b0c0d0e0f is not visible in this process (visible: "
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f, CUDA_VISIBLE_DEVICES is '1'); run this where that GPU is, "
        "in the container that loaded its weights, say"
    )
