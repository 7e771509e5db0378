"""The program as a whole, also where an image leaves packages out."""

import subprocess
import sys
import textwrap

import pytest

from weightkeeper.cli import COMMANDS

BLOCK = """
    import sys
    for package in ("docker", "watchfiles", "torch", "vllm"):
        sys.modules[package] = None
    from weightkeeper.cli import main
    sys.argv = ["weightkeeper", *sys.argv[1:]]
    main()
"""


def program(*arguments: str) -> subprocess.CompletedProcess:
    """The program in an image with neither the supervisor's packages nor vLLM."""
    command = [sys.executable, "-c", textwrap.dedent(BLOCK), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_lists_every_command_where_packages_are_missing():
    """The sidecar's image has no Docker SDK, the supervisor's has no torch."""
    result = program("--help")
    assert result.returncode == 0, result.stderr
    assert all(f"  {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_where_packages_are_missing(command):
    """And says which package it needs."""
    result = program(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("command", ["supervise", "restart"])
def test_a_command_without_its_packages_names_one_and_the_place_to_run_it(command):
    """Exit 2, no traceback."""
    result = program(command, "engine", "--cause", "x")
    assert result.returncode == 2
    assert "needs the Python package" in result.stderr
    assert "run it in the supervisor's container" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_command_is_refused():
    """With the word."""
    result = program("serv")
    assert result.returncode == 2
    assert "serv" in result.stderr
