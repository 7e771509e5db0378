"""How engine core and workers agree on what is saved, and what is done while the engine core is idle.

The engine core's loop, its executor and the managers of graphs are vLLM's own; there is no GPU, so what a worker
measures and runs is made up.
"""

import gc
import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from fake_graphs import PIECES, SIZES, Gpu

from weightkeeper import savings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM is imported here

GIB = 1 << 30
MEASURED = 100 * GIB


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return models.write(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def _config(model) -> Any:
    from weightkeeper import vllm_api

    before = dict(os.environ)
    try:
        config = vllm_api.engine_config(["--model", str(model), "--max-model-len", "256"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return config


@pytest.fixture
def config(_config, monkeypatch) -> Any:
    """vLLM's real configuration, as it would be on a GPU where that matters here."""
    from vllm.config.compilation import CompilationMode

    monkeypatch.setattr(_config.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    monkeypatch.setattr(_config.compilation_config, "cudagraph_capture_sizes", SIZES)
    monkeypatch.setattr(_config.parallel_config, "worker_cls", "vllm.v1.worker.gpu_worker.Worker")
    monkeypatch.setattr(_config.model_config, "enforce_eager", False)
    monkeypatch.setattr(_config.cache_config, "kv_cache_memory_bytes", None)
    return _config


class Worker:
    """What the savings see of vLLM's worker; `start` does the part of a start that they change."""

    def __init__(self, config: Any, gpu: Gpu, free: int = 140 * GIB, rank: int = 0):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        self.vllm_config, self.cache_config, self.rank = config, config.cache_config, rank
        self.init_snapshot = SimpleNamespace(free_memory=free, total_memory=141 * GIB)
        self.requested_memory = 126 * GIB
        self.model_runner = runner = GPUModelRunner.__new__(GPUModelRunner)
        runner.model = SimpleNamespace(load_weights=None)
        runner.model_memory_usage = 14 * GIB
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
        runner.attn_groups = [[SimpleNamespace(backend=backend)]]
        self.gpu = gpu
        runner.cudagraph_manager = gpu.manager()

    def determine_available_memory(self) -> None:
        if self.cache_config.kv_cache_memory_bytes is None:
            self.available_kv_cache_memory_bytes = MEASURED

    def start(self) -> None:
        from vllm.compilation.compiler_interface import trigger_inductor_lazy_init
        from vllm.v1.worker.gpu import model_runner

        self.determine_available_memory()
        with model_runner.freeze_gc_for_cudagraph_capture():
            self.gpu.capture(self.model_runner.cudagraph_manager)
        trigger_inductor_lazy_init("cuda:0")


@pytest.fixture
def core(monkeypatch, tmp_path):
    """vLLM's engine core with ours around it, on a machine that seems to have a GPU."""
    from vllm import envs
    from vllm.compilation import compiler_interface
    from vllm.v1.engine import core
    from vllm.v1.worker.gpu import model_runner

    from weightkeeper import saving, vllm_api, vllm_graphs, vllm_kv_size, vllm_start

    monkeypatch.setenv(savings.SWITCH, "all")
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    monkeypatch.setattr(vllm_api, "is_cuda", lambda: True)
    monkeypatch.setattr(vllm_api, "device_name", lambda rank: "GPU-1234")
    monkeypatch.setattr(vllm_api, "device_text", lambda: "NVIDIA H200 9.0")
    monkeypatch.setattr(vllm_kv_size, "driver_version", lambda: "580.1")
    monkeypatch.setattr(compiler_interface, "trigger_inductor_lazy_init", lambda device: inductor.append(device))
    monkeypatch.setattr(vllm_start, "_inductor_lazy_init", compiler_interface.trigger_inductor_lazy_init)
    monkeypatch.setattr(model_runner, "freeze_gc_for_cudagraph_capture", vllm_start._freeze_for_capture)
    monkeypatch.setattr(core.EngineCore, "_initialize_kv_caches", lambda engine, config: engine.worker.start())
    for name in ("_process_input_queue", "_notify_idle_state_callbacks"):
        monkeypatch.setattr(core.EngineCoreProc, name, getattr(core.EngineCoreProc, name))
    inductor: list[Any] = []
    core.inductor = inductor
    saving.install()
    yield core
    vllm_graphs.follow(None)
    gc.unfreeze()


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def log(caplog, monkeypatch):
    """What the savings say."""
    logger = logging.getLogger("vllm.weightkeeper")
    monkeypatch.setattr(logger, "propagate", False)  # vLLM's own logger does not, once it is configured
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm.weightkeeper"):
        yield lambda: [record.getMessage().removeprefix("weightkeeper: ") for record in caplog.records]
    logger.removeHandler(caplog.handler)


def engine_of(core: Any, worker: Any, kind: str = "EngineCoreProc") -> Any:
    """An engine core as it is before it makes the KV cache; its scheduler has as many requests as is said."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    engine = getattr(core, kind).__new__(getattr(core, kind))
    engine.model_executor = UniProcExecutor.__new__(UniProcExecutor)
    engine.model_executor.driver_worker = SimpleNamespace(worker=worker)
    engine.vllm_config, engine.worker = worker.vllm_config, worker
    engine.requests = []
    engine.scheduler = SimpleNamespace(has_requests=lambda: bool(engine.requests), pause_state=PauseState.UNPAUSED)
    engine.input_queue, engine.aborts_queue = queue.Queue(), queue.Queue()
    engine.engines_running, engine.batch_queue, engine._idle_state_callbacks = False, None, []
    engine.shutdown_state = core.EngineShutdownState.RUNNING
    engine.process_input_queue_block = False
    engine._handle_client_request = lambda kind, request: None
    return engine


def start(core: Any, config: Any, gpu: Gpu, kind: str = "EngineCoreProc", **options: Any) -> Any:
    engine = engine_of(core, Worker(config, gpu, **options), kind)
    engine._initialize_kv_caches(config)
    return engine


def kept(tmp_path: Path) -> list[str]:
    return sorted(file.suffix for file in (tmp_path / "weightkeeper/kv_size").glob("*"))


def again(config: Any, gpu: Gpu) -> None:
    """A new process: nothing of the last start is in it."""
    config.cache_config.kv_cache_memory_bytes = None
    gpu.runs.clear()
    for piece in gpu.pieces:
        piece.clear_graphs()


MEASURING = "this start measures memory"
FIRST = (
    "savings of this start: frozen-heap (up to the capture), bulk-capture, late-inductor; "
    f"not: one-warm-up ({MEASURING}), deferred-graphs ({MEASURING}), "
    "kv-size (no good start of this configuration is known)"
)
SECOND = (
    "savings of this start: frozen-heap, bulk-capture, one-warm-up, deferred-graphs (7 sizes wait), late-inductor, "
    "kv-size (100.00 GiB as in the last good start)"
)


def test_the_first_start_measures_and_the_second_saves(core, config, gpu, log, tmp_path):
    """The first has all its graphs at once; the second takes its size, and captures the rest once it is idle."""
    engine = start(core, config, gpu)
    assert gpu.sizes() == [SIZES] * PIECES
    assert (core.inductor, kept(tmp_path), log()) == ([], [], [])
    engine._process_input_queue()
    assert core.inductor == ["cuda:0"]
    assert kept(tmp_path) == [".json"]
    assert log() == [FIRST, f"the KV cache's size, {MEASURED} bytes, is kept for the next start of the same"]
    assert "weightkeeper_idle" not in vars(engine)

    again(config, gpu)
    engine = start(core, config, gpu)
    assert config.cache_config.kv_cache_memory_bytes == MEASURED
    assert gpu.sizes() == [[]] * PIECES
    assert kept(tmp_path) == [".json", ".starting"]
    engine._process_input_queue()
    assert gpu.sizes() == [SIZES] * PIECES
    assert kept(tmp_path) == [".json"]
    assert core.inductor == ["cuda:0"] * 2
    first, second = log()[-2:]
    assert first == SECOND
    assert second.startswith("all graphs are there: 7 deferred sizes took 0.")
    assert second.endswith("s, 21 piecewise graphs, 6 whole ones")
    assert "dispatch" not in vars(engine.worker.model_runner.cudagraph_manager)


def test_a_start_that_dies_on_the_way_makes_the_next_one_measure(core, config, gpu, log, tmp_path):
    """Its size may be the cause."""
    start(core, config, gpu)._process_input_queue()
    again(config, gpu)
    start(core, config, gpu)
    again(config, gpu)
    start(core, config, gpu)._process_input_queue()
    assert config.cache_config.kv_cache_memory_bytes is None
    assert "kv-size (the last start with it did not come up)" in log()[-2]
    assert kept(tmp_path) == [".json"]


def test_a_size_that_is_given_is_left_as_it_is(core, config, gpu, log, tmp_path):
    """Nothing is kept of such a start, and its graphs can wait."""
    config.cache_config.kv_cache_memory_bytes = 5 * GIB
    start(core, config, gpu)._process_input_queue()
    assert config.cache_config.kv_cache_memory_bytes == 5 * GIB
    assert log()[0].endswith("; not: kv-size (it is given)")
    assert "deferred-graphs (7 sizes wait)" in log()[0]
    assert kept(tmp_path) == []


def test_a_request_is_served_before_the_next_graph(core, config, gpu):
    """Whatever arrives ends the idleness; nothing is captured while a request runs, but for one graph a second."""
    config.cache_config.kv_cache_memory_bytes = 5 * GIB
    engine = start(core, config, gpu)
    engine.input_queue.put((None, None))
    engine._handle_client_request = lambda kind, request: engine.requests.append("one")
    engine._process_input_queue()
    engine._process_input_queue()
    assert (engine.requests, gpu.sizes()) == (["one"], [[]] * PIECES)
    engine.requests.clear()
    engine._process_input_queue()
    assert gpu.sizes() == [SIZES] * PIECES


def test_what_arrives_and_is_no_work_does_not_keep_the_server_from_being_idle(core, config, gpu):
    """vLLM stays with its queue then until there is work; the graphs come all the same."""
    config.cache_config.kv_cache_memory_bytes = 5 * GIB
    engine = start(core, config, gpu)
    engine.process_input_queue_block = True  # as in vLLM's own loop
    handled: list[str] = []

    def handle(kind: str, _: None) -> None:
        handled.append(kind)
        if kind == "request":
            engine.requests.append("one")

    engine._handle_client_request = handle
    engine.input_queue.put(("utility", None))
    waiting = threading.Thread(target=engine._process_input_queue, daemon=True)
    waiting.start()
    try:
        deadline = time.monotonic() + 30
        while "weightkeeper_idle" in vars(engine) and time.monotonic() < deadline:
            waiting.join(0.01)
        assert gpu.sizes() == [SIZES] * PIECES
        assert (handled, waiting.is_alive()) == (["utility"], True)
    finally:
        engine.input_queue.put(("request", None))
        waiting.join(30)
    assert (handled, waiting.is_alive()) == (["utility", "request"], False)


def test_under_constant_load_a_graph_is_captured_each_second(core, config, gpu, monkeypatch):
    """Between two steps, and after the workers have answered everything before."""
    from weightkeeper import vllm_idle, worker_savings

    now = [100.0]
    asked: list[str] = []
    monkeypatch.setattr(vllm_idle.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(worker_savings, "settle", lambda wrapper: asked.append("settle"))
    config.cache_config.kv_cache_memory_bytes = 5 * GIB
    engine = start(core, config, gpu)
    engine.requests.append("one")
    engine._process_input_queue()
    captured = []
    for _ in range(20):
        now[0] += 0.5
        engine._process_input_queue()
        captured.append(len(gpu.sizes()[0]))
    assert captured == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7, 7]
    assert asked == ["settle"] * 7
    assert core.inductor == []  # takes longer than a graph, and can wait for an idle moment
    engine.requests.clear()
    engine._process_input_queue()
    assert core.inductor == ["cuda:0"]
    assert "weightkeeper_idle" not in vars(engine)


@pytest.mark.parametrize("what", ["paused", "ending"])
def test_an_engine_that_is_paused_or_ends_is_left_alone(core, config, gpu, what):
    """Its weights may be exchanged, or its GPU given back."""
    from vllm.v1.core.sched.interface import PauseState

    config.cache_config.kv_cache_memory_bytes = 5 * GIB
    engine = start(core, config, gpu)
    if what == "paused":
        engine.scheduler.pause_state = PauseState.PAUSED_ALL
    else:
        engine.shutdown_state = core.EngineShutdownState.REQUESTED
    engine._process_input_queue()
    assert gpu.sizes() == [[]] * PIECES


def test_a_capture_that_fails_ends_the_deferred_ones_and_nothing_else(core, config, gpu, log, tmp_path):
    """Said once; batches go on without graphs, and the next start measures."""
    start(core, config, gpu)._process_input_queue()
    again(config, gpu)
    engine = start(core, config, gpu)
    gpu.failing = 1
    engine._process_input_queue()
    engine._process_input_queue()
    said = "batches of some sizes go on without graphs until the next start: size 32: RuntimeError: CUDA out of memory"
    assert [line for line in log() if "without graphs" in line] == [said]
    assert gpu.sizes() == [[]] * PIECES
    assert kept(tmp_path) == []
    assert core.inductor == ["cuda:0"] * 2
    assert engine.worker.model_runner.cudagraph_manager.dispatch(2, 20, None, 0).cg_mode.name == "NONE"


def test_an_engine_without_a_loop_has_everything_at_the_start(core, config, gpu, log, tmp_path):
    """In the process of the program that uses it nobody would come by later; the size is kept and used all the same."""
    start(core, config, gpu, "EngineCore")
    assert (gpu.sizes(), kept(tmp_path), core.inductor) == ([SIZES] * PIECES, [".json"], ["cuda:0"])
    again(config, gpu)
    start(core, config, gpu, "EngineCore")
    assert config.cache_config.kv_cache_memory_bytes == MEASURED
    assert (gpu.sizes(), kept(tmp_path), core.inductor) == ([SIZES] * PIECES, [".json"], ["cuda:0"] * 2)
    assert gpu.warmed("FULL") == [24, 16, 8, 4, 2, 1]  # the first two keep theirs, as do the small ones
    assert "deferred-graphs (this process has no loop in which it would be idle)" in log()[-1]


@pytest.mark.parametrize("name", savings.ALL)
def test_each_saving_can_be_had_alone(core, config, gpu, log, monkeypatch, name):
    """It is the only one in the line, and the start has its graphs in the end."""
    monkeypatch.setenv(savings.SWITCH, name)
    config.cache_config.kv_cache_memory_bytes = None if name == savings.KV_SIZE else 5 * GIB
    start(core, config, gpu)._process_input_queue()
    if name == savings.KV_SIZE:
        again(config, gpu)
        start(core, config, gpu)._process_input_queue()
    said = [line for line in log() if line.startswith("savings of this start: ")]
    assert said[-1].startswith(f"savings of this start: {name}")
    assert [other for other in savings.ALL if other in said[-1]] == [name]
    assert gpu.sizes() == [SIZES] * PIECES


def several(core: Any, workers: list[Worker]) -> Any:
    """An engine core with some workers, as with tensor parallel."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    engine = engine_of(core, workers[0])
    engine.model_executor = MultiprocExecutor.__new__(MultiprocExecutor)
    engine.model_executor.collective_rpc = lambda function, args: [
        function(SimpleNamespace(worker=worker), *args) for worker in workers
    ]
    engine._initialize_kv_caches(engine.vllm_config)
    return engine


def test_all_ranks_measure_where_one_has_to(core, config, gpu, log, tmp_path):
    """A rank that measures captures graphs with the others; one that does not would leave it waiting for ever."""
    ranks = [Worker(config, gpu, rank=rank) for rank in (0, 1)]
    start(core, config, gpu)._process_input_queue()
    again(config, gpu)
    assert kept(tmp_path) == [".json"]
    engine = several(core, ranks)
    assert config.cache_config.kv_cache_memory_bytes is None
    assert kept(tmp_path) == [".json"]  # no marker of the rank that could have
    for worker in ranks:
        worker.determine_available_memory()
    engine._process_input_queue()
    assert "kv-size (another rank measures)" in log()[2]
    assert kept(tmp_path) == [".json"] * 2


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("parallel_config.worker_cls", "other.Worker", "the worker is other.Worker"),
        ("parallel_config.nnodes", 2, "several machines"),
    ],
)
def test_what_is_not_known_is_left_alone(core, config, gpu, log, monkeypatch, path, value, why):
    """In one line, and the start goes on as vLLM's own."""
    part, _, name = path.rpartition(".")
    monkeypatch.setattr(getattr(config, part), name, value)
    engine = start(core, config, gpu)
    assert log() == [f"nothing is saved of this start: {why}"]
    assert gpu.sizes() == [SIZES] * PIECES
    assert "weightkeeper_idle" not in vars(engine)


def test_an_error_of_ours_does_not_end_a_start(core, config, gpu, log, monkeypatch):
    """Whatever of vLLM is other than expected costs the savings, not the engine."""
    from weightkeeper import vllm_conditions, vllm_graphs, vllm_start

    def broken(*_: Any) -> None:
        raise AttributeError("not of this version")

    for module, name in (
        (vllm_conditions, "cannot_recall"), (vllm_conditions, "cannot_defer"), (vllm_graphs, "follow"),
        (vllm_start, "keep_frozen_after_capture"), (vllm_start, "postpone_inductor"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, broken)
    start(core, config, gpu)._process_input_queue()
    monkeypatch.undo()
    assert gpu.sizes() == [SIZES] * PIECES
    assert log()[-1].startswith("savings of this start: none; not: frozen-heap (AttributeError: not of this version), ")


CHANGES = [
    ("cache_config.gpu_memory_utilization", 0.5),
    ("cache_config.num_gpu_blocks_override", 100),
    ("model_config.max_model_len", 128),
    ("model_config.enforce_eager", True),
    ("scheduler_config.max_num_seqs", 7),
    ("scheduler_config.max_num_batched_tokens", 999),
    ("compilation_config.cudagraph_capture_sizes", [1, 2]),
    ("compilation_config.cudagraph_mode", "FULL"),
    ("load_config.load_format", "weightkeeper"),
    ("load_config.model_loader_extra_config", {"mode": "copy"}),
    ("parallel_config.world_size", 2),
    ("worker.rank", 1),
    ("worker.requested_memory", 1),
    ("worker.init_snapshot", SimpleNamespace(free_memory=140 * GIB, total_memory=80 * GIB)),
    ("runner.model_memory_usage", 2 * GIB),
    ("vllm_kv_size.driver_version", lambda: "590.2"),
    ("vllm_kv_size.weights_outside", lambda worker: True),
    ("vllm_kv_size.__version__", "0.0.0"),
    ("vllm_api.device_name", lambda rank: "GPU-5678"),
    ("vllm_api.device_text", lambda: "NVIDIA H100 9.0"),
    ("vllm_api.VLLM_VERSION", "0.0.0"),
    ("torch.__version__", "0.0.0"),
    ("torch.version.cuda", "99.9"),
    ("envs.compile_factors", lambda: {"VLLM_X": "1"}),
    ("config.compute_hash", lambda: "another"),
    ("environment.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("environment.PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ("environment.CUDA_MODULE_LOADING", "EAGER"),
    ("multimodal.skip_mm_profiling", True),
    ("multimodal.mm_ipc_gpu_memory_gb", 2),
    ("file", "model-00001-of-00002.safetensors"),
    ("file", "config.json"),
]


@pytest.mark.parametrize(("path", "value"), CHANGES, ids=[f"{path} {n}" for n, (path, _) in enumerate(CHANGES)])
def test_each_thing_that_the_size_depends_on_is_part_of_its_key(core, config, gpu, model, monkeypatch, path, value):
    """A start with another one of them does not find the size; with all as they were it does."""
    import torch
    from vllm import envs

    from weightkeeper import vllm_api, vllm_kv_size

    worker = Worker(config, gpu)
    multimodal = {"skip_mm_profiling": False, "mm_ipc_gpu_memory_gb": 0}
    monkeypatch.setattr(vllm_kv_size, "_plain", lambda _: multimodal)
    vllm_kv_size.of(worker).keep(123)
    assert vllm_kv_size.of(worker).recall().nbytes == 123
    part, _, name = path.rpartition(".")
    owners = {
        "worker": worker, "runner": worker.model_runner, "vllm_kv_size": vllm_kv_size, "vllm_api": vllm_api,
        "torch": torch, "torch.version": torch.version, "envs": envs,
    }  # fmt: skip
    if path == "file":
        status = (model / value).stat()
        os.utime(model / value, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif part == "environment":
        monkeypatch.setenv(name, value)
    elif part == "multimodal":
        multimodal[name] = value
    elif part == "config":
        monkeypatch.setattr(type(config), name, lambda self: value())
    else:
        monkeypatch.setattr(owners[part] if part in owners else getattr(config, part), name, value)
    other = vllm_kv_size.of(worker).recall()
    monkeypatch.undo()
    assert other.nbytes == 0
    assert other.why == "no good start of this configuration is known"


def test_multimodal_limits_are_read_from_their_config(config):
    """Field by field, those that vLLM's own key leaves out among them."""
    from vllm.config.multimodal import MultiModalConfig

    from weightkeeper import vllm_kv_size

    one, other = MultiModalConfig(), MultiModalConfig(skip_mm_profiling=True)
    assert vllm_kv_size._plain(one) != vllm_kv_size._plain(other)
    assert "limit_per_prompt" in vllm_kv_size._plain(one)


DEFER = [
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallel"),
    ("parallel_config.data_parallel_size", 2, "data parallel"),
    ("parallel_config.enable_expert_parallel", True, "expert parallel"),
    ("parallel_config.enable_dbo", True, "batches are split (enable-dbo)"),
    ("speculative_config", object(), "speculative decoding"),
    ("lora_config", object(), "LoRA"),
    ("kv_transfer_config", object(), "a KV connector"),
    ("model_config.enable_sleep_mode", True, "sleep mode"),
    ("model_config.enforce_eager", True, "no graphs are wanted (enforce-eager)"),
    ("profiler_config.profiler", "torch", "a profiler"),
]


@pytest.mark.parametrize(("path", "value", "why"), DEFER)
def test_graphs_are_not_deferred_where_more_happens_between_steps(core, config, gpu, monkeypatch, path, value, why):
    """Each condition in words."""
    from weightkeeper import vllm_conditions

    worker = Worker(config, gpu)
    assert vllm_conditions.cannot_defer(worker) == ""
    assert vllm_conditions.cannot_spare_warm_ups(worker) == ""
    part, _, name = path.rpartition(".")
    monkeypatch.setattr(getattr(config, part) if part else config, name, value)
    assert vllm_conditions.cannot_defer(worker) == why


@pytest.mark.parametrize(
    "name", ["is_hybrid", "has_inner_state", "is_multimodal_model", "is_encoder_decoder", "use_mla"]
)
def test_graphs_are_not_deferred_for_models_of_other_kinds(core, config, gpu, monkeypatch, name):
    """With a state, an encoder, images or a compressed cache."""
    from weightkeeper import vllm_conditions

    monkeypatch.setattr(type(config.model_config), name, property(lambda self: True))
    assert vllm_conditions.cannot_defer(Worker(config, gpu)) != ""


def test_a_setting_that_a_version_lacks_speaks_against(core, config, gpu, monkeypatch):
    """It is another version than those that are known."""
    from weightkeeper import vllm_conditions

    monkeypatch.setattr(vllm_conditions, "_LATER", (("model_config.is_new", False, "new"),))
    assert vllm_conditions.cannot_defer(Worker(config, gpu)) == "this vLLM has no model_config.is_new"


@pytest.mark.parametrize(
    "variable", ["VLLM_ENABLE_STARTUP_PLAN", "VLLM_GPU_SYNC_CHECK", "VLLM_USE_BREAKABLE_CUDAGRAPH"]
)
def test_variables_of_vllm_speak_against(core, config, gpu, monkeypatch, variable):
    """vLLM's own plan would keep a size for which not all graphs were counted."""
    from weightkeeper import vllm_conditions

    monkeypatch.setenv(variable, "warn" if variable == "VLLM_GPU_SYNC_CHECK" else "1")
    assert vllm_conditions.cannot_defer(Worker(config, gpu)) == f"{variable} is set"
    if variable == "VLLM_ENABLE_STARTUP_PLAN":
        assert vllm_conditions.cannot_recall(Worker(config, gpu)) == f"{variable} is set"


def test_the_heap_stays_frozen_after_the_capture(core, monkeypatch):
    """vLLM thaws it and collects all of it; what was alive during the capture stays for good anyway."""
    from vllm.v1.worker.gpu import model_runner

    from weightkeeper import vllm_start

    gc.unfreeze()
    with model_runner.freeze_gc_for_cudagraph_capture():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    vllm_start.keep_frozen_after_capture(True)
    with model_runner.freeze_gc_for_cudagraph_capture():
        assert not gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert gc.isenabled()
    vllm_start.keep_frozen_after_capture(False)
    assert model_runner.freeze_gc_for_cudagraph_capture is vllm_start._freeze_for_capture


def test_nothing_is_done_on_the_cpu(monkeypatch):
    """vLLM for the CPU has no such graphs; neither its classes nor the garbage collector are touched."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from weightkeeper import saving

    monkeypatch.setenv(savings.SWITCH, "all")
    before = EngineCore._initialize_kv_caches, EngineCoreProc._process_input_queue, gc.get_freeze_count()
    saving.install()
    after = EngineCore._initialize_kv_caches, EngineCoreProc._process_input_queue, gc.get_freeze_count()
    assert after == before


def test_a_server_has_its_own_switch(core, config, gpu, log, monkeypatch):
    """It may be forked from a process that was started with another one."""
    monkeypatch.setenv(savings.SWITCH, "none")
    start(core, config, gpu)._process_input_queue()
    assert (log(), gpu.sizes(), core.inductor) == ([], [SIZES] * PIECES, ["cuda:0"])
    assert gpu.calls.count("empty_cache") > PIECES


@pytest.mark.parametrize(("ranks", "switch", "saves"), [(1, "default", True), (2, "default", False), (2, "all", True)])
def test_by_default_only_what_was_compared_is_saved(core, config, gpu, log, monkeypatch, ranks, switch, saves):
    """Tokens were compared on one GPU; on several who asks has all of it."""
    from weightkeeper import vllm_api

    monkeypatch.setattr(vllm_api, "VLLM_VERSION", "0.30.0")
    monkeypatch.setenv(savings.SWITCH, switch)
    monkeypatch.setattr(config.parallel_config, "world_size", ranks)
    start(core, config, gpu)._process_input_queue()
    if saves:
        assert any(line.startswith("savings of this start: ") for line in log())
    else:
        (said,) = log()
        assert said.startswith("nothing is saved of this start: by default only on one GPU")
        assert said.endswith("WEIGHTKEEPER_SAVINGS=all saves here, too")


@pytest.mark.parametrize(
    ("version", "given"), [("0.30.0", None), ("0.30.0", " "), ("0.32.0", None), ("0.32.0", "none")]
)
def test_a_server_of_the_launcher_saves_by_default(core, monkeypatch, caplog, version, given):
    """With a vLLM that was compared; with another one it is said how to have it all the same, unless it was decided."""
    from weightkeeper import saving, vllm_api

    monkeypatch.setattr(vllm_api, "VLLM_VERSION", version)
    monkeypatch.setattr(saving.logger, "propagate", True)
    monkeypatch.setenv(savings.SWITCH, given or "")
    if given is None:
        monkeypatch.delenv(savings.SWITCH)
    with caplog.at_level(logging.INFO, saving.logger.name):
        saving.begin()
    assert os.environ[savings.SWITCH] == (given if given == "none" else "default")
    assert savings.wanted(os.environ, version) == (savings.ALL if version == "0.30.0" else ())
    assert ("WEIGHTKEEPER_SAVINGS=all saves" in caplog.text) == (version == "0.32.0" and given is None)


@pytest.mark.parametrize("name", ["prepare", "decide", "started", "settle", "capture_next", "leave", "finish"])
def test_what_workers_are_asked_reaches_them_by_its_name(name):
    """vLLM's executor pickles functions for workers that are processes of their own; ours go as names."""
    import cloudpickle

    from weightkeeper import worker_savings

    function = getattr(worker_savings, name)
    pickled = cloudpickle.dumps(function)
    assert len(pickled) < 100
    assert cloudpickle.loads(pickled) is function


def test_mapped_weights_are_told_from_others(core, config, gpu):
    """By what our loader leaves on the model: they are not in this process's accounts of the GPU."""
    from weightkeeper import vllm_kv_size
    from weightkeeper.mapped_loader import MappedLoader

    worker = Worker(config, gpu)
    assert not vllm_kv_size.weights_outside(worker)
    worker.model_runner.model.load_weights = MappedLoader.__new__(MappedLoader)._refuse_weights
    assert vllm_kv_size.weights_outside(worker)


def test_the_drivers_version_is_read_from_the_kernel(tmp_path, monkeypatch):
    """Else from NVML; and where neither tells, the size is not used."""
    from weightkeeper import vllm_kv_size

    ended = []
    library = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: b"590.2",
        nvmlShutdown=lambda: ended.append(True),
    )  # fmt: skip
    file = tmp_path / "version"
    monkeypatch.setattr(vllm_kv_size, "_DRIVER", file)
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13.3\n"
    )
    assert vllm_kv_size.driver_version() == "580.159.04"
    file.unlink()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pynvml", library)
        assert (vllm_kv_size.driver_version(), ended) == ("590.2", [True])
        library.nvmlSystemGetDriverVersion = lambda: (_ for _ in ()).throw(OSError("GPU is lost"))
        with pytest.raises(RuntimeError, match="the driver's version cannot be told: GPU is lost"):
            vllm_kv_size.driver_version()
    with pytest.raises(RuntimeError, match="the driver's version cannot be told"):
        vllm_kv_size.driver_version()


def test_a_heap_is_not_frozen_where_somebody_else_will(core, monkeypatch):
    """A process that imports with the collector off collects and freezes at the end of its imports."""
    from weightkeeper import saving

    gc.unfreeze()
    gc.disable()
    try:
        saving.install()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
    saving.install()
    assert gc.get_freeze_count() > 1000


def test_none_does_nothing(monkeypatch):
    """The switch turns all of it off, on a GPU as well."""
    from vllm.v1.engine.core import EngineCore

    from weightkeeper import saving, vllm_api

    monkeypatch.setenv(savings.SWITCH, "none")
    monkeypatch.setattr(vllm_api, "is_cuda", lambda: True)
    before, frozen = EngineCore._initialize_kv_caches, gc.get_freeze_count()
    saving.install()
    assert (EngineCore._initialize_kv_caches, gc.get_freeze_count()) == (before, frozen)
