"""vLLM with CUDA graphs, one start after the other, for the tests of what a start saves.

    python tests/gpu/savings_run.py REQUEST.json

The request: `model`, `options` of vLLM, and `runs`, a list of `name`, `environment`, and `processes` (whether the
engine core is a process of its own, with a loop that is idle; in this process otherwise, where the steps that it would
do are done between questions). Of each run NAME.json has the answer and NAME.log what it said.

Answer: `before`, `halfway` and `after` the deferred graphs, each with `single` (tokens of prompts that were asked one
by one) and `batch` (of 16 at once; empty with processes); `started` and `graphs` (pieces and whole ones, when it could
be asked and at the end), `blocks` (of the KV cache), `seconds` (until it could be asked).

vLLM is imported once and each run is forked, where the imports leave nothing that a fork does not survive.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LENGTHS = (5, 23, 100, 300)
"""In tokens, of the prompts that are asked one by one: batches of some sizes with prefills."""

BATCH = 16
TOKENS = 16
SAID = "weightkeeper: all graphs are there"
PATIENCE_S = 90


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (seed * 7919 + position * 104729) % 900 for position in range(length)]}


def ask(llm: Any, batch: bool = True) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def tokens(prompts: list[dict[str, list[int]]]) -> list[list[int]]:
        llm.reset_prefix_cache()
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]

    return {
        "single": [tokens([prompt(length, length)])[0] for length in LENGTHS],
        "batch": tokens([prompt(6 + number, number) for number in range(BATCH)]) if batch else [],
    }


def run(request: dict[str, Any], one: dict[str, Any], log: Path) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if one.get("processes") else "0"
    from vllm import LLM

    from weightkeeper import vllm_idle

    made = vllm_idle.Idle.__init__

    def driven(self: Any, engine: Any) -> None:
        made(self, engine)
        self.is_driven = True  # this program comes by

    vllm_idle.Idle.__init__ = driven
    begun = time.monotonic()
    llm = LLM(request["model"], **request["options"])
    seconds = time.monotonic() - begun
    try:
        return {"seconds": seconds} | answers(llm, one, log)
    finally:
        llm.llm_engine.engine_core.shutdown()


def answers(llm: Any, one: dict[str, Any], log: Path) -> dict[str, Any]:
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    if one.get("processes"):
        answer = {"before": ask(llm, batch=False)}
        deadline = time.monotonic() + PATIENCE_S
        while SAID not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        return answer | {"after": ask(llm, batch=False), "blocks": blocks}
    return {"blocks": blocks} | in_steps(llm)


def in_steps(llm: Any) -> dict[str, Any]:
    """Ask before, between and after what is left to be done."""
    from weightkeeper import vllm_graphs

    core = llm.llm_engine.engine_core.engine_core
    idle = vars(core).get("weightkeeper_idle")
    runner = core.model_executor.driver_worker.worker.model_runner
    manager = getattr(runner, "cudagraph_manager", None)
    answer: dict[str, Any] = {"before": ask(llm), "started": vllm_graphs.captured(manager)}
    steps = 0
    while idle is not None and idle._steps:
        idle._guarded(idle._steps[0])
        steps += 1
        if steps == 20:
            answer["halfway"] = ask(llm)
    return answer | {"after": ask(llm), "graphs": vllm_graphs.captured(manager)}


def child(path: Path, number: int) -> int:
    """One run, from its streams on."""
    request = json.loads(path.read_text())
    one = request["runs"][number]
    log = path.with_name(f"{one['name']}.log")
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.update(one["environment"])
    try:
        answer = run(request, one, log)
    except BaseException:
        traceback.print_exc()
        return 1
    path.with_name(f"{one['name']}.json").write_text(json.dumps(answer))
    return 0


def main() -> int:
    path = Path(sys.argv[1])
    if len(sys.argv) > 2:
        return child(path, int(sys.argv[2]))
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    from weightkeeper.launcher import warming

    forks = warming.unfit() is None
    codes = []
    for number in range(len(json.loads(path.read_text())["runs"])):
        if not forks:
            codes.append(subprocess.run([sys.executable, __file__, str(path), str(number)]).returncode)
        elif pid := os.fork():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            code = child(path, number)
            sys.stdout.flush()
            os._exit(code)
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
