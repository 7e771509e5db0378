"""Options that leave the weights as they are: a new server on the same weights applies them."""

_GROUPS: dict[str, str] = {
    "what clients see": """
        served-model-name response-role chat-template chat-template-content-format trust-request-chat-template
        trust-request-mm-kwargs default-chat-template-kwargs return-tokens-as-token-ids enable-auto-tool-choice
        exclude-tools-when-tool-choice-none tool-call-parser tool-parser-plugin tool-strict-level tool-server
        enable-prompt-tokens-details enable-force-include-usage sse-keep-alive-interval
        enable-tokenizer-info-endpoint cohere-is-reasoning-model cohere-format anthropic-disabled-thinking-effort
        tokens-only enable-scale-out fingerprint-mode fingerprint-value reasoning-parser reasoning-parser-plugin
        reasoning-config io-processor-plugin enable-flash-late-interaction stream-interval
        enable-return-routed-experts return-sampling-mask aux-output-config watermark-config
        interleave-mm-strings enable-prompt-embeds""",
    "how the web server works": """
        api-server-count uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints
        allow-credentials allowed-origins allowed-methods allowed-headers api-key ssl-keyfile ssl-certfile
        ssl-ca-certs enable-ssl-refresh ssl-cert-reqs ssl-ciphers root-path middleware enable-request-id-headers
        disable-fastapi-docs h11-max-incomplete-event-size h11-max-header-count enable-offline-docs
        shutdown-timeout headless renderer-num-workers""",
    "what is logged and measured": """
        disable-log-stats aggregate-engine-logging enable-log-requests enable-log-outputs enable-log-deltas
        max-log-len log-error-stack enable-per-request-metrics enable-server-load-tracking logging-config log-level
        log-config-file show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces
        per-request-spec-decode-metrics kv-cache-metrics kv-cache-metrics-sample custom-histogram-buckets
        cudagraph-metrics enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details
        jit-monitor-mode jit-monitor-verbose profiler-config use-tqdm-on-load ray-workers-use-nsight
        enable-trace-replay""",
    "how a request becomes tokens, and tokens an answer": """
        tokenizer tokenizer-mode tokenizer-revision skip-tokenizer-init generation-config
        override-generation-config pooler-config structured-outputs-config logits-processors max-logprobs
        logprobs-mode use-fp64-gumbel seed hf-token allowed-local-media-path allowed-media-domains
        media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-hasher-algorithm
        mm-shm-cache-max-object-size-mb mm-processor-device mm-device-do-normalize mm-tensor-ipc
        mm-ipc-gpu-memory-gb video-pruning-rate video-pruning-method enable-mm-embeds skip-mm-profiling
        mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin""",
    "how much memory is used beside the weights": """
        gpu-memory-utilization kv-cache-memory-bytes num-gpu-blocks-override block-size mamba-block-size
        kv-offloading-size kv-offloading-backend enable-shm-tensor-arena offload-prefetch-step""",
    "the KV cache": """
        max-model-len enable-prefix-caching prefix-caching-hash-algo prefix-cache-retention-interval
        kv-sharing-fast-prefill swa-bounded-replay prefix-match-unit mamba-cache-mode
        enable-mamba-shared-prefix-checkpoint replayssm-buffer-len use-replayssm mamba-ssu-algorithm
        enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds disable-hybrid-kv-cache-manager
        dcp-kv-cache-interleave-size cp-kv-cache-interleave-size disable-sliding-window disable-cascade-attn
        kv-transfer-config kv-events-config ec-transfer-config ec-manager-config""",
    "which request runs when": """
        max-num-batched-tokens max-num-scheduled-tokens max-num-seqs max-num-active-seqs max-num-queued-reqs
        max-num-queued-tokens long-prefill-token-threshold long-prefill-token-threshold-adaptive
        scheduling-policy enable-chunked-prefill disable-chunked-mm-input scheduler-cls
        scheduler-reserve-full-isl watermark prefill-schedule-interval async-scheduling spec-tokens""",
    "how kernels are compiled, captured and chosen without touching the weights": """
        enforce-eager compilation-config cudagraph-capture-sizes max-cudagraph-capture-size optimization-level
        performance-mode ir-op-priority enable-flashinfer-autotune sparse-indexer-topk-backend
        specialize-active-lora""",
    "how processes are started and talk": """
        distributed-executor-backend master-addr master-port distributed-timeout-seconds
        cpu-distributed-timeout-seconds numa-bind numa-bind-nodes numa-bind-cpus data-parallel-address
        data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
        data-parallel-multi-port-external-lb dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
        dp-supervisor-probe-failure-threshold dcp-comm-backend enable-hc-sp enable-batch-sharded-sampling
        enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold dp-sync-interval
        disable-nccl-for-dp-synchronization disable-custom-all-reduce max-parallel-loading-workers
        worker-extension-cls enable-fault-tolerance fault-tolerance-config enable-nccl-comm-suspend
        fail-on-environ-validation""",
    "how fast the same files are read": """
        safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size
        pt-load-map-location""",
    "which adapters are there, inside what the layers were built for": """
        lora-modules default-mm-loras max-cpu-loras""",
    "what an engine does with its own memory while it sleeps; refused where weights are mapped": """
        enable-sleep-mode sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator
        weight-transfer-config""",
}  # fmt: skip

RELOAD: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Option → what it is about."""
