"""One real vLLM engine in one process, for tests: reads a JSON request on standard input, prints a JSON answer.

With `--listen SOCKET` it imports vLLM once and forks an engine for each connection, which brings the engine's standard
streams as descriptors and its environment as JSON; the exit status goes back over it.

Request: `model`, `load_format`, `extra` (loader extra config), `prompts`, `max_tokens`, `options` (vLLM's own),
`repack` (False switches the CPU's repacking off for a disk load, as zero-copy does), `hold` (keep running until
standard input ends, and answer each further line, `{}` or `{"write": true}`, which writes into a mapped weight),
`blind` (believe the keeper's receipts whatever the files hold: a negative control that no setting of the product has),
`break_build` (fail after the skeleton), `stall` (say STALLED there, and wait for ever).
Answer, one line that begins with RESULT: `tokens`, `logprobs`, `parameter_bytes` (all, those on the shared mapping, the
largest), `mapped` (bytes and proportional set size of the mapping, read from /proc/self/smaps), `blocks` (of the KV
cache), `fingerprint` (what it asked the keeper for), `pid`, `namespaces`.

With WEIGHTKEEPER_TEST_DEVICE=cuda the engines compute on the GPU.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback

ON_GPU = os.environ.get("WEIGHTKEEPER_TEST_DEVICE") == "cuda"
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
if not ON_GPU:
    SETTINGS |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ.update(SETTINGS)

MAPPING = "/memfd:weightkeeper"
EXTENTS: list[tuple[int, int]] = []
"""First address and end of each mapping that the loader made."""
ASKED: dict[str, str] = {}
"""The fingerprint that the loader sent."""


def main() -> int:
    request = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    from weightkeeper import identity, mapped_loader, vllm_api

    if request.get("blind"):
        mapped_loader.digests = lambda _, known: identity.Digests({file.name: file.blake3 for file in known}, ())
    if request.get("break_build"):
        mapped_loader.bind = broken
    if request.get("stall"):
        mapped_loader.bind = stalled
    mapped_loader.open_mapping = recording(mapped_loader.open_mapping)
    unpacked = contextlib.nullcontext() if request.get("repack", True) else vllm_api.without_cpu_repacking()
    options = {"enforce_eager": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    with unpacked:
        llm = LLM(
            request["model"],
            load_format=request.get("load_format", "auto"),
            model_loader_extra_config=request.get("extra", {}),
            max_model_len=request.get("max_model_len", 256),
            **(options | request.get("options", {})),
        )
    sampling = SamplingParams(temperature=0, max_tokens=request.get("max_tokens", 24), logprobs=1, ignore_eos=True)
    answer(llm, sampling, request["prompts"])
    if request.get("hold"):
        for line in sys.stdin:
            if json.loads(line).get("write"):
                write(model_of(llm))
            answer(llm, sampling, request["prompts"])
    return 0


def answer(llm, sampling, prompts: list[str]) -> None:
    """Compute, and print the result."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    result = {
        "tokens": [list(output.token_ids) for output in outputs],
        "text": [output.text for output in outputs],
        "logprobs": [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ],
        "parameter_bytes": parameter_bytes(model) if (model := model_of(llm)) else None,
        "mapped": mapped(),
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "fingerprint": ASKED,
        "pid": os.getpid(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "ipc", "net", "uts", "mnt")},
    }
    print("RESULT", json.dumps(result), flush=True)


def model_of(llm):
    """The model of this process; None where there are several ranks, which are elsewhere."""
    worker = getattr(llm.llm_engine.model_executor, "driver_worker", None)
    return worker.worker.model_runner.model if worker else None


def recording(open_mapping):
    """`open_mapping`, with what it asked for and the extent of what it mapped noted."""

    def opened(session, fields, *rest, **named):
        ASKED.update(fields)
        mapping = open_mapping(session, fields, *rest, **named)
        start, nbytes = mapping.extent
        EXTENTS.append((start, start + nbytes))
        return mapping

    return opened


def stalled(*_: object, **__: object) -> None:
    print("STALLED", flush=True)
    signal.pause()


def write(model) -> None:
    """Write into a parameter on the mapping; whoever survives that says so."""
    import torch

    target = next(p for p in model.parameters() if any(start <= p.data_ptr() < stop for start, stop in ranges()))
    target.data.fill_(1)
    if ON_GPU:
        torch.cuda.synchronize()
    print("WRITTEN", flush=True)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("binding was broken on purpose")


def ranges() -> list[tuple[int, int]]:
    """Address ranges of the shared mapping: on the CPU by the kernel's account."""
    if ON_GPU:
        return EXTENTS
    with open("/proc/self/maps") as maps:
        lines = [line.split()[0].split("-") for line in maps if MAPPING in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in lines]


def parameter_bytes(model) -> dict[str, int]:
    shared = ranges()
    every = {id(parameter): parameter for parameter in model.parameters()}.values()
    inside = [p for p in every if any(start <= p.data_ptr() < stop for start, stop in shared)]
    return {
        "all": sum(p.nbytes for p in every),
        "shared": sum(p.nbytes for p in inside),
        "largest": max(p.nbytes for p in every),
    }


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


def listen(path: str) -> None:
    """Fork an engine for each connection until standard input ends."""
    # the worker is the heaviest part of a start
    if ON_GPU:
        import vllm.v1.worker.gpu_worker
    else:
        import vllm.v1.worker.cpu_worker  # noqa: F401
    import torch
    from vllm import LLM  # noqa: F401

    if threading.active_count() != 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        sys.exit(f"{threading.active_count()} threads after the imports ({names}); a fork would hang")
    if torch.cuda.is_initialized():
        sys.exit("CUDA is initialized after the imports; no forked engine could use it")
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([server, woken, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        if woken in ready:
            woken.recv(4096)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with children.pop(ended[0]) as connection, contextlib.suppress(OSError):
                    connection.sendall(json.dumps(os.waitstatus_to_exitcode(ended[1])).encode())
        if server in ready:
            connection, _ = server.accept()
            environment, streams, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                become(json.loads(environment), streams)
            for stream in streams:
                os.close(stream)
            children[pid] = connection
            connection.sendall(f"{pid}\n".encode())


def load(channel: int) -> int:
    """Be a keeper's real loader instead of an engine (see forked_loader.py)."""
    from weightkeeper import loader

    sys.argv = ["weightkeeper.loader", *json.loads(os.environ.pop("LOADER_ARGUMENTS")), "--channel", str(channel)]
    return loader.main()


def close_streams(kept: int) -> None:
    """Close what belongs to the parent's own dialogues, and nothing of a driver."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (
                int(name) > 2
                and int(name) != kept
                and os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "pipe:"))
            ):
                os.close(int(name))


def become(environment: dict[str, str], streams: list[int]) -> None:
    """Be the forked engine; does not return."""
    code = 1
    try:
        channel = os.dup(streams.pop()) if len(streams) == 4 else -1
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        close_streams(channel)
        os.environ.clear()
        os.environ.update(environment | SETTINGS)
        sys.stdin, sys.stdout, sys.stderr = (open(n, "r" if n == 0 else "w", closefd=False) for n in range(3))  # noqa: SIM115
        code = main() if channel < 0 else load(channel)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--listen"]:
        listen(sys.argv[2])
    else:
        main()
