"""One real vLLM engine in one process, for tests: reads a JSON request on standard input, prints a JSON answer.

With `--listen SOCKET` it imports vLLM once and forks an engine for each connection, which brings the engine's standard
streams as descriptors and its environment as JSON; the exit status goes back over it.

Request: `model`, `load_format`, `extra` (loader extra config), `prompts`, `max_tokens`, `repack` (False switches the
CPU's repacking off for a disk load, as zero-copy does), `hold` (keep running until standard input ends), `blind`
(believe the keeper's receipts whatever the files hold: a negative control that no setting of the product has),
`break_build` (fail after the skeleton).
Answer, one line that begins with RESULT: `tokens`, `logprobs`, `parameter_bytes` (all, and those on the shared
mapping), `mapped` (bytes and proportional set size of the mapping, read from /proc/self/smaps).
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

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(SETTINGS)

MAPPING = "/memfd:weightkeeper"


def main() -> None:
    request = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    from weightkeeper import identity, mapped_loader, vllm_api

    if request.get("blind"):
        mapped_loader.digests = lambda _, known: identity.Digests({file.name: file.blake3 for file in known}, ())
    if request.get("break_build"):
        mapped_loader.bind = broken
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
    worker = getattr(llm.llm_engine.model_executor, "driver_worker", None)  # with several ranks they are elsewhere
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
                "parameter_bytes": parameter_bytes(worker.worker.model_runner.model) if worker else None,
                "mapped": mapped(),
                "pid": os.getpid(),
            }
        ),
        flush=True,
    )
    if request.get("hold"):
        sys.stdin.read()


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("binding was broken on purpose")


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


def listen(path: str) -> None:
    """Fork an engine for each connection until standard input ends."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  the heaviest part of a start
    from vllm import LLM  # noqa: F401

    if threading.active_count() != 1:
        sys.exit(f"{threading.active_count()} threads after the imports; a fork would hang")
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
            environment, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                become(json.loads(environment), streams)
            for stream in streams:
                os.close(stream)
            children[pid] = connection
            connection.sendall(f"{pid}\n".encode())


def become(environment: dict[str, str], streams: list[int]) -> None:
    """Be the forked engine; does not return."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 512)
        os.environ.clear()
        os.environ.update(environment | SETTINGS)
        sys.stdin, sys.stdout, sys.stderr = (open(n, "r" if n == 0 else "w", closefd=False) for n in range(3))  # noqa: SIM115
        main()
        code = 0
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
