"""Real vLLM on mapped weights answers as real vLLM on weights from disk."""

import os
import re
import shutil
from pathlib import Path

import models
import pytest
from engines import Engine, keeper, mapped, run

pytestmark = pytest.mark.vllm

MAPPED_LINE = re.compile(r"weightkeeper: (\w+), mapped (\d+) bytes and copied (\d+) in [\d.]+ ms \(.*connect")


def smollm2() -> Path:
    """The real chat model that `make model` wrote."""
    path = Path(
        os.environ.get("WEIGHTKEEPER_TEST_MODEL", Path(__file__).parents[1] / ".work/models/SmolLM2-135M-Instruct")
    )
    if not path.is_dir():
        pytest.fail(f"{path} is missing: run `make model`, or set WEIGHTKEEPER_TEST_MODEL")
    return path


@pytest.fixture(scope="module", params=["SmolLM2-135M-Instruct, tied", "tiny, tied", "tiny, untied"])
def served(request, tmp_path_factory):
    """A model, a keeper that holds it, and what vLLM answers from disk with the CPU's repacking switched off."""
    if request.param.startswith("Smol"):
        model = smollm2()
    else:
        model = models.write(tmp_path_factory.mktemp("model") / "m", tied="untied" not in request.param)
    disk, log = run(model, repack=False)
    assert disk["parameter_bytes"]["shared"] == 0
    assert "weightkeeper:" not in log
    with keeper(model) as running:
        yield model, running, disk


def test_tokens_and_logprobs_are_those_of_a_disk_load(served):
    """Bit for bit, on the mapping."""
    model, running, disk = served
    answer, log = mapped(model, running)
    assert answer["tokens"] == disk["tokens"]
    assert answer["logprobs"] == disk["logprobs"]
    assert MAPPED_LINE.search(log).group(1) == "zero_copy"


def test_every_parameter_byte_lies_in_the_shared_mapping(served):
    """Counted by address in the engine, and against the log and the keeper."""
    model, running, _ = served
    with Engine(model, load_format="weightkeeper", extra=running.extra(fallback=False), hold=True) as engine:
        answer = engine.answer()
        status = running.status()
        counted = answer["parameter_bytes"]
        assert counted["shared"] == counted["all"] > 0
        (lease,) = status.leases
        assert (lease.mode, lease.device) == ("zero_copy", "cpu-0")
        assert answer["mapped"]["Size"] == status.held.nbytes
        assert answer["mapped"]["Anonymous"] == 0
        engine.end()
        assert int(MAPPED_LINE.search(engine.log()).group(2)) == counted["all"]


def test_two_engines_at_once_answer_alike_and_cost_one_copy(served):
    """The proportional set sizes of both engines together are one copy of what is resident."""
    model, running, disk = served
    request = {"load_format": "weightkeeper", "extra": running.extra(fallback=False), "hold": True}
    with Engine(model, **request) as first:
        one = first.answer()
        with Engine(model, **request) as second:
            two = second.answer()
            assert len(running.status().leases) == 2
            assert one["tokens"] == two["tokens"] == disk["tokens"]
            shares = [share_of(engine.pid) for engine in (first, second)]
            assert sum(shares) <= running.status().held.nbytes
            assert min(shares) > 0
            assert max(shares) < 0.75 * sum(shares)


def share_of(pid: int) -> int:
    """Proportional set size of the shared mapping in a process, in bytes."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line[0].isupper():
            inside = "/memfd:weightkeeper" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_the_lease_ends_with_the_engine(served):
    """Nothing is tracked by process id; the connection is the lease."""
    model, running, _ = served
    with Engine(model, load_format="weightkeeper", extra=running.extra(fallback=False), hold=True) as engine:
        engine.answer()
        assert len(running.status().leases) == 1
    status = running.status()
    assert status.leases == ()
    assert status.last_report.event == "mapped"
    assert status.last_report.phases.keys() >= {"python and imports", "connect", "fingerprint", "map", "bind"}


def test_copy_mode_owns_its_weights_and_gives_the_keepers_back(tmp_path):
    """C04: tokens as from disk with repacking, no byte on the mapping; a second start reports, as configured."""
    model = models.write(tmp_path / "m")
    disk, _ = run(model)
    with keeper(model) as running:
        answer, log = mapped(model, running, extra={"mode": "copy"})
        assert answer["tokens"] == disk["tokens"]
        assert answer["parameter_bytes"]["shared"] == 0
        assert MAPPED_LINE.search(log).group(1) == "copy"
        assert running.status().state == "released"
        again, log = run(model, load_format="weightkeeper", extra=running.extra(mode="copy"))
        assert again["tokens"] == disk["tokens"]
        assert "weightkeeper: fallback to disk, code=not_loaded" in log
        with Engine(model, load_format="weightkeeper", extra=running.extra(mode="copy", fallback=False)) as engine:
            with pytest.raises(AssertionError, match="ended without an answer"):
                engine.answer()
            assert engine.end() != 0
            assert "code=not_loaded" in engine.log()


def test_copy_mode_with_release_off_leaves_the_keeper_ready(tmp_path):
    """The option to keep."""
    model = models.write(tmp_path / "m")
    with keeper(model) as running:
        mapped(model, running, extra={"mode": "copy", "release": False})
        assert running.status().state == "ready"
        assert running.status().leases == ()


def test_other_weights_of_the_same_shape_give_other_tokens(tmp_path):
    """Negative control: with the fingerprint check out of the way, the answer is the keeper's weights'."""
    model = models.write(tmp_path / "m", seed=1)
    other = models.write(tmp_path / "other", seed=2)
    disk, _ = run(model, repack=False)
    from_other, _ = run(other, repack=False)
    with keeper(other) as running:
        # without its check the engine sends back the keeper's own fingerprint
        answer, _ = mapped(model, running, blind=True)
    assert answer["tokens"] != disk["tokens"]
    assert answer["tokens"] == from_other["tokens"]


def test_a_fine_tune_in_place_of_its_base_is_never_served_from_the_old_weights(tmp_path):
    """C01: same names, shapes and offsets, other bytes, copied over in place."""
    model = models.write(tmp_path / "m", seed=1)
    tuned = models.write(tmp_path / "tuned", seed=2)
    with keeper(model) as running:
        before, _ = mapped(model, running)
        for file in tuned.glob("*.safetensors"):
            shutil.copyfile(file, model / file.name)
        answer, log = run(model, load_format="weightkeeper", extra=running.extra(), repack=False)
        expected, _ = run(tuned, repack=False)
        assert answer["tokens"] == expected["tokens"] != before["tokens"]
        assert answer["parameter_bytes"]["shared"] == 0
        assert re.search(r"fallback to disk, code=mismatch: content of model-00001-of-00002.safetensors", log)
        assert running.status().fallbacks == {"mismatch": 1}
        strict = Engine(model, load_format="weightkeeper", extra=running.extra(fallback=False))
        with strict as engine:
            with pytest.raises(AssertionError, match="ended without an answer"):
                engine.answer()
            assert "code=mismatch" in engine.log()


def test_the_same_bytes_at_another_path_are_the_same_model(tmp_path):
    """Identity is content, not a path."""
    model = models.write(tmp_path / "m")
    twin = Path(shutil.copytree(model, tmp_path / "twin"))
    with keeper(model) as running:
        _, log = mapped(twin, running)
    assert "hashed" in log
    assert MAPPED_LINE.search(log)


def test_an_option_given_to_the_engine_alone_is_a_named_mismatch(tmp_path):
    """C02: what shapes weights belongs into engine.yaml."""
    model = models.write(tmp_path / "m")
    with keeper(model) as running:
        _, log = run(
            model, load_format="weightkeeper", extra=running.extra(), options={"hf_overrides": {"rope_theta": 5000.0}}
        )
    assert "code=mismatch" in log
    assert re.search(r"hf overrides: the keeper has \{\}, the engine has", log)


def test_two_ranks_map_their_own_halves(tmp_path):
    """Tensor parallel: one loader and one socket a rank, all ranks or none, tokens as from disk."""
    model = models.write(tmp_path / "m", hidden=256)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    disk, _ = run(model, repack=False, options=options)
    before = set(Path("/dev/shm").glob("weightkeeper-loader-*"))
    with keeper(model, tensor_parallel_size=2) as running:
        assert set(Path("/dev/shm").glob("weightkeeper-loader-*")) == before  # vLLM's ranks leave their files there
        held = running.status().held
        assert sorted(held.devices) == ["cpu-0", "cpu-1"]
        assert held.devices["cpu-0"] == held.devices["cpu-1"]
        request = {"load_format": "weightkeeper", "extra": running.extra(fallback=False), "options": options}
        with Engine(model, hold=True, **request) as engine:
            answer = engine.answer()
            assert sorted(lease.device for lease in running.status().leases) == ["cpu-0", "cpu-1"]
            engine.end()
            assert engine.log().count("weightkeeper: zero_copy, mapped") == 2
    assert answer["tokens"] == disk["tokens"]


def test_another_number_of_ranks_is_a_named_mismatch(tmp_path):
    """A shard is not a model."""
    model = models.write(tmp_path / "m", hidden=256)
    with keeper(model, tensor_parallel_size=2) as running:
        _, log = run(model, load_format="weightkeeper", extra=running.extra())
    assert "code=mismatch: tensor parallel size: the keeper has 2, the engine has 1" in log
