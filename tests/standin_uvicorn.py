"""A stand-in for vLLM's server with its real HTTP server: uvicorn, which leaves by `vllm_draining` as vLLM's does.

At SIGTERM it does what vLLM 0.32 does: it stops its engine, in a thread, and its HTTP server when that has ended.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import types
from contextlib import nullcontext

import uvicorn
import uvloop

from weightkeeper import vllm_draining

ENGINE = "vllm.v1.engine.async_llm"
DRAIN_SECONDS = 10


class Engine:
    """vLLM's AsyncLLM. Its `shutdown` is drained before; a request that comes behind it gets status 500."""

    vllm_config = types.SimpleNamespace(shutdown_timeout=DRAIN_SECONDS)
    is_stopped = False

    def shutdown(self) -> None:
        self.is_stopped = True


class Server(uvicorn.Server):
    """One that leaves signals to others, as vLLM's."""

    def capture_signals(self) -> nullcontext:
        return nullcontext()


def warm(arguments: list[str]) -> None:
    pass


def check(arguments: list[str]) -> None:
    pass


def serve(arguments: list[str], listener: socket.socket) -> None:
    package, *_ = ENGINE.split(".")
    sys.modules[package] = types.ModuleType(package)
    sys.modules[ENGINE] = types.ModuleType(ENGINE)
    sys.modules[ENGINE].AsyncLLM = Engine
    vllm_draining.install()
    uvloop.run(_serve(Engine(), listener))  # as vLLM does


async def _serve(engine: Engine, listener: socket.socket) -> None:
    async def answer(scope: dict, receive, send) -> None:
        await asyncio.sleep(0.002)  # an engine that computes, so that requests are in flight when it is to stop
        status = 500 if engine.is_stopped else 200
        body = json.dumps({"pid": os.getpid()}).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = Server(uvicorn.Config(answer, interface="asgi3", lifespan="off", log_level="critical"))
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    serving = loop.create_task(server.serve(sockets=[listener]))
    await asked.wait()
    await loop.run_in_executor(None, engine.shutdown)
    server.should_exit = True
    await serving
