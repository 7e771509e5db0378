"""What may be done on a GPU machine before a fork, by the driver's own word. `make test-gpu`"""

import os
import subprocess
import sys

import pytest
from gpu_machine import REHEARSING, WHY_NOT

from weightkeeper.launcher.warming import CAREFUL, SINGLE_THREADED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REHEARSING, reason="needs the GPU's driver")]

LOOKED = """
import torch
from vllm.third_party import pynvml
pynvml.nvmlInit()
assert pynvml.nvmlDeviceGetCount() > 0
"""

COMPUTED = """
import os
child = os.fork()
if child == 0:
    print("the child computed", int(torch.ones(7, device="cuda").sum()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""

SAID = """
import ctypes
ctypes.CDLL("libcuda.so.1")
from weightkeeper.launcher import warming
print("unfit:", warming.unfit(), flush=True)
"""


def told(script: str) -> list[str]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    words = [sys.executable, "-c", script]
    environment = os.environ | SINGLE_THREADED | CAREFUL
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_a_process_that_looked_for_gpus_may_be_forked():
    """NVML leaves a thread and an open device, and the child computes all the same."""
    assert told(LOOKED + SAID + COMPUTED) == ["unfit: None", "the child computed 7"]


def test_a_process_that_initialized_cuda_may_not():
    """Whoever did it: torch, or somebody else with the driver."""
    for call in ('ctypes.CDLL("libcuda.so.1").cuInit(0)', 'import torch; torch.ones(1, device="cuda")'):
        assert told(f"import ctypes\n{call}\n{SAID}") == ["unfit: the imports initialized CUDA, which no fork survives"]
