"""Which modules a vLLM server needs, and their import before it is forked."""

import contextlib
import importlib
import json
import logging
import os
import signal
import warnings
from argparse import Namespace
from collections.abc import Iterable, Sequence

from weightkeeper.launcher.warming import fork, unfit

logger = logging.getLogger("vllm.weightkeeper")

TRIAL_SECONDS = 60
"""For the import of one module in a trial."""

SERVER = (
    "uvloop",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
"""Of every server from 0.30 on. One that is missing means that this vLLM cannot be served here."""

WORKER = {
    "cpu": "vllm.v1.worker.cpu_worker",
    "cuda": "vllm.v1.worker.gpu_worker",
    "rocm": "vllm.v1.worker.gpu_worker",
    "xpu": "vllm.v1.worker.xpu_worker",
}
"""The worker's module by vLLM's name of the platform."""

LATE = (
    "multiprocessing.popen_fork",
    "multiprocessing.resource_tracker",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.protocols.websockets.websockets_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "fastapi.staticfiles",
    "jinja2.ext",
    "prometheus_fastapi_instrumentator",
    "model_hosting_container_standards.common.custom_code_ref_resolver",
    "model_hosting_container_standards.sagemaker",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router",
    "vllm.entrypoints.serve.instrumentator",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.instrumentator.offline_docs",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.sagemaker.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.entrypoints.serve.utils.orca_metrics",
    "vllm.entrypoints.serve.utils.sse_keep_alive",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.online.fp8",
    "vllm.model_executor.layers.quantization.online.int8",
    "vllm.model_executor.layers.quantization.online.mxfp4",
    "vllm.model_executor.layers.quantization.online.mxfp8",
    "vllm.model_executor.layers.quantization.online.nvfp4",
    "vllm.renderers.hf",
    "vllm.tokenizers.hf",
    "vllm.transformers_utils.chat_templates.registry",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.zentorch_sdpa",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.metrics.reader",
    "vllm.v1.pool.flash_maxsim",
    "vllm.v1.worker.startup_plan",
)
"""What vLLM's processes import only while they start, found by looking at what a forked server imported on the way to
its first answer. A version that has no such module does without."""

LATE_ON_GPU = (
    "torch._dynamo.eval_frame",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "triton.backends.nvidia.compiler",
    "triton.compiler",
    "vllm.compilation.backends",
    "vllm.compilation.caching",
    "vllm.compilation.compiler_interface",
    "vllm.compilation.cuda_graph",
    "vllm.compilation.passes.pass_manager",
    "vllm.compilation.piecewise_backend",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.vllm_flash_attn",
)
"""As LATE, on a GPU."""


_unfit_since: list[str] = []
"""Of this process: after which import nothing could be forked from it any more, and why."""


def everything() -> None:
    """Import what every server on this platform needs.

    Raises:
        ImportError: this vLLM is not one of those that can be served.
    """
    with contextlib.suppress(ImportError):  # vLLM does without it as well
        import setproctitle

        setproctitle.getproctitle()  # it finds where titles go only before the environment is another
    _look("vLLM's base")  # which comes with this module
    for name in SERVER:
        importlib.import_module(name)
        _look(name)
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    _look("the plugins")
    if (worker := WORKER.get(current_platform.device_name)) is not None:
        importlib.import_module(worker)
        _look(worker)
    if _unfit_since:
        logger.warning("weightkeeper: since the import of %s: %s", *_unfit_since)
    elif current_platform.is_cpu():
        _late(LATE)
        _kernels()
    else:
        _late(_harmless(LATE + LATE_ON_GPU))
        _keys()


def _look(name: str) -> None:
    """Note which import it was that made this process unfit for a fork."""
    if not _unfit_since and (reason := unfit()) is not None:
        _unfit_since.extend((name, reason))


def _late(names: Iterable[str]) -> None:
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except ImportError as error:
            logger.debug("weightkeeper: not imported before the fork: %s: %s", name, error)
        except Exception as error:  # a module that is of no use here may fail as it likes
            logger.info("weightkeeper: not imported before the fork: %s: %s: %s", name, type(error).__name__, error)


def _harmless(names: Sequence[str]) -> list[str]:
    """Those whose import leaves a process that can be forked; the others are named in the log.

    Tried in a child, since what an import did cannot be taken back: FlashInfer, say, may initialize CUDA.
    """
    harmless: list[str] = []
    left = list(names)
    while left:
        count, reason = _tried(left)
        harmless += left[:count]
        if count < len(left):
            logger.warning("weightkeeper: %s is imported only after the fork: %s", left[count], reason)
        left = left[count + 1 :]
    return harmless


def _tried(names: Sequence[str]) -> tuple[int, str]:
    """How many of these, from the first on, are harmless together, and what is wrong with the next."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            _try(names, writing)
        finally:
            os._exit(0)  # whatever an import raised, this process must not go on as a second template
    os.close(writing)
    with open(reading) as told:
        count, _, reason = told.read().rpartition("\n")[2].partition(" ")
    os.waitpid(child, 0)
    return int(count), reason


def _try(names: Sequence[str], writing: int) -> None:
    """In the child: import one after the other; the last line written is what `_tried` gives back."""
    for number, name in enumerate(names):
        os.write(writing, f"\n{number} it ended the process, crashed or took over {TRIAL_SECONDS} s".encode())
        signal.alarm(TRIAL_SECONDS)
        _late((name,))
        if (reason := unfit()) is not None:
            os.write(writing, f"\n{number} {reason}".encode())
            return
    os.write(writing, f"\n{len(names)} ".encode())


def model(args: Namespace) -> None:
    """Import the model's module, and have its class registered as vLLM would after looking at it in a subprocess."""
    from vllm.model_executor.models import registry

    models = registry.ModelRegistry.models
    for name in _architectures(args):
        if isinstance(found := models.get(name), registry._LazyRegisteredModel):
            models[name] = registry._RegisteredModel.from_model_cls(found.load_model_cls())


def _architectures(args: Namespace) -> list[str]:
    """Names in the model's config.json; none where it has another form or is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    path = os.path.join(args.model, "config.json")
    if not os.path.isdir(args.model):
        cached = try_to_load_from_cache(args.model, "config.json", revision=args.revision, cache_dir=args.download_dir)
        path = cached if isinstance(cached, str) else path
    try:
        with open(path, "rb") as stream:
            found = json.load(stream).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _kernels() -> None:
    """Put the CPU's own kernels in the place of Triton's, for which vLLM searches all modules in each worker."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    register = getattr(platform, "register_triton_kernel_overrides", None)  # since 0.32
    if register is not None:
        register()
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def _keys() -> None:
    """Have torch and Triton hash their own files, which they do once a process to look into caches of compiled code."""
    for module, name in (
        ("torch._inductor.codecache", "torch_key"),
        ("triton.compiler.compiler", "triton_key"),  # which of the two depends on Triton's version
        ("triton.runtime.cache", "triton_key"),
    ):
        with contextlib.suppress(ImportError, AttributeError, OSError):
            getattr(importlib.import_module(module), name)()
