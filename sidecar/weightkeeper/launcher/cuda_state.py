"""Whether this process has initialized CUDA, by the driver's own word. Loads nothing and initializes nothing.

That a thread or an open device of NVIDIA's is there says nothing: its management library (NVML), with which vLLM looks
for GPUs before it forks, leaves both (seen on an H200, driver 580.159.04).
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what every call gives before cuInit()."""


def is_initialized(library: Callable[..., Any] = ctypes.CDLL) -> bool:
    """Whether cuInit() was called here. False also where the driver is not loaded.

    Args:
        library: gives a loaded library, as ctypes.CDLL does; raises OSError where it is not loaded.
    """
    try:
        driver = library("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
