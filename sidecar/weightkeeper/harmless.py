"""vLLM's environment variables that cannot change a weight. Every other one that is set is part of the fingerprint."""

_ROWS = {
    "says where things lie, who may call or what is logged": (
        "VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_CONFIGURE_LOGGING", "VLLM_DO_NOT_TRACK",
        "VLLM_HOST_IP", "VLLM_LOGGING_COLOR", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM", "VLLM_LOG_STATS_INTERVAL", "VLLM_LOG_MODEL_INSPECTION", "VLLM_NO_USAGE_STATS",
        "VLLM_PLUGINS", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_RPC_TIMEOUT", "VLLM_SERVER_DEV_MODE",
        "VLLM_USAGE_SOURCE", "VLLM_USAGE_STATS_SERVER",
    ),
    "says how processes start, time out and end": (
        "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "VLLM_ENABLE_STARTUP_PLAN",
    ),
    "shapes the KV cache, threads, sampling or a compile cache, which come after the weights": (
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_DISABLE_COMPILE_CACHE", "VLLM_USE_MEGA_AOT_ARTIFACT",
    ),
    "is one that vLLM sets by itself in some of its processes": (
        "VLLM_DIST_IDENT", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
        "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
        "VLLM_USE_AOT_COMPILE", "VLLM_USE_BREAKABLE_CUDAGRAPH",
    ),
}  # fmt: skip

HARMLESS: dict[str, str] = {name: reason for reason, names in _ROWS.items() for name in names}
"""Variable → why."""
