"""One real vLLM engine in one process, for tests: reads a JSON request on standard input, prints a JSON answer.

Request: `model`, `load_format`, `extra` (loader extra config), `prompts`, `max_tokens`, `repack` (False switches the
CPU's repacking off for a disk load, as zero-copy does), `hold` (keep running until standard input ends).
Answer, one line that begins with RESULT: `tokens`, `logprobs`, `parameter_bytes` (all, and those on the shared
mapping), `mapped` (bytes and proportional set size of the mapping, read from /proc/self/smaps).
"""

import contextlib
import json
import os
import sys

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

MAPPING = "/memfd:weightkeeper"


def main() -> None:
    request = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    from weightkeeper import vllm_api

    unpacked = contextlib.nullcontext() if request.get("repack", True) else vllm_api.without_cpu_repacking()
    with unpacked:
        llm = LLM(
            request["model"],
            load_format=request.get("load_format", "auto"),
            model_loader_extra_config=request.get("extra", {}),
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=request.get("max_model_len", 256),
            kv_cache_memory_bytes=64 << 20,
            **request.get("options", {}),
        )
    sampling = SamplingParams(temperature=0, max_tokens=request.get("max_tokens", 24), logprobs=1, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(request["prompts"], sampling, use_tqdm=False)]
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    print(
        "RESULT",
        json.dumps(
            {
                "tokens": [list(output.token_ids) for output in outputs],
                "text": [output.text for output in outputs],
                "logprobs": [
                    [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
                    for output in outputs
                ],
                "parameter_bytes": parameter_bytes(model),
                "mapped": mapped(),
                "pid": os.getpid(),
            }
        ),
        flush=True,
    )
    if request.get("hold"):
        sys.stdin.read()


def ranges() -> list[tuple[int, int]]:
    """Address ranges of the shared mapping, by the kernel's account."""
    with open("/proc/self/maps") as maps:
        lines = [line.split()[0].split("-") for line in maps if MAPPING in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in lines]


def parameter_bytes(model) -> dict[str, int]:
    shared = ranges()
    every = {id(parameter): parameter for parameter in model.parameters()}.values()
    inside = [p for p in every if any(start <= p.data_ptr() < stop for start, stop in shared)]
    return {"all": sum(p.nbytes for p in every), "shared": sum(p.nbytes for p in inside)}


def mapped() -> dict[str, int]:
    """Bytes of the shared mapping: its size and this process's proportional share of what is resident."""
    totals = {"Size": 0, "Pss": 0, "Rss": 0, "Anonymous": 0}
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name = line.split(":")[0]
            if "-" in line.split()[0] and not line[0].isupper():
                inside = MAPPING in line
            elif inside and name in totals:
                totals[name] += int(line.split()[1]) * 1024
    return totals


if __name__ == "__main__":
    main()
