"""Tests on a real GPU: where they can run, and what they measured, told at the end.

`make test-gpu` runs them. With WEIGHTKEEPER_REHEARSE=1 and vLLM for the CPU, everything that does not need the GPU
itself runs on the CPU, so that a fault of the tests shows before a GPU is taken.
"""

from collections.abc import Callable
from pathlib import Path

import gpu_machine
import pytest

from weightkeeper.recovery import machine
from weightkeeper.recovery.gpu import Gpu

told: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu_machine.WHY_NOT:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=gpu_machine.WHY_NOT))


def pytest_report_header() -> str:
    return f"machine: {machine.said(machine.facts())}"


def pytest_terminal_summary(terminalreporter) -> None:
    if told:
        terminalreporter.section("measured")
        for line in told:
            terminalreporter.write_line(line)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a number that the run should show, with the test's name."""
    return lambda text: told.append(f"{request.node.name}: {text}")


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU, through NVML; a test that asks for it is left out in a rehearsal."""
    if gpu_machine.GPU is None:
        pytest.skip("a rehearsal on the CPU: this needs the GPU itself")
    return gpu_machine.GPU
