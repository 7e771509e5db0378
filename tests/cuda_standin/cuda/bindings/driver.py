"""`cuda.bindings.driver` for the processes of a test: FakeCuda, and trouble on request.

FAKE_CUDA is JSON: `fail` name of a call → error number, each time; `hang` and `die` the name of a call; `writable`
gives every mapping write access.
"""

import json
import os
import signal
import time

from fake_cuda import CUmemAccess_flags, CUresult, FakeCuda

PLAN = json.loads(os.environ.get("FAKE_CUDA", "{}"))


class Troubled(FakeCuda):
    def __getattribute__(self, name):
        if name == PLAN.get("hang"):
            time.sleep(600)
        if name == PLAN.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name in PLAN.get("fail", {}):
            return lambda *_: (CUresult(PLAN["fail"][name]), None)
        return super().__getattribute__(name)

    def cuMemSetAccess(self, address, nbytes, descriptions, count):
        if PLAN.get("writable"):
            descriptions[0].flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return super().cuMemSetAccess(address, nbytes, descriptions, count)


_fake = Troubled()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_fake, name)
