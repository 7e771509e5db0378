"""When vLLM is asked to load its compiled code as one file, and what is said of it."""

import os

import pytest

from weightkeeper import savings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM is imported here

NAME = "VLLM_USE_MEGA_AOT_ARTIFACT"


@pytest.fixture
def torch_is(monkeypatch):
    """Have vLLM take torch for another version, on a GPU."""
    import torch

    from weightkeeper import vllm_api

    for name in (NAME, "VLLM_USE_AOT_COMPILE", "VLLM_USE_STANDALONE_COMPILE", "VLLM_DISABLE_COMPILE_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_api, "is_cuda", lambda: True)
    monkeypatch.setenv(savings.SWITCH, "all")
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


@pytest.mark.parametrize(
    ("version", "asked"),
    [("2.9.1", None), ("2.10.0", "1"), ("2.11.0+cu130", "1"), ("2.12.0", None), ("2.13.0+cu130", None)],
)
def test_it_is_asked_for_where_vllm_can_and_does_not_by_itself(torch_is, version, asked):
    """From torch 2.12 on it is vLLM's own default; before 2.10 there is none."""
    from weightkeeper import saving

    torch_is(version)
    saving.begin()
    assert os.environ.get(NAME) == asked


@pytest.mark.parametrize(
    ("name", "value"),
    [(NAME, "0"), ("VLLM_USE_AOT_COMPILE", "0"), ("VLLM_DISABLE_COMPILE_CACHE", "1"), (savings.SWITCH, "kv-size")],
)
def test_what_the_user_has_decided_stays(torch_is, monkeypatch, name, value):
    """Their variable, a compile cache that is off, or savings without this one."""
    from weightkeeper import saving

    torch_is("2.11.0")
    monkeypatch.setenv(name, value)
    saving.begin()
    assert os.environ.get(NAME) in (None, "0")


def test_a_process_that_only_imports_does_not_decide(torch_is, monkeypatch):
    """Servers are forked from it, perhaps with other savings than it has."""
    import gc

    from weightkeeper import saving

    torch_is("2.11.0")
    gc.disable()
    try:
        saving.install()
    finally:
        gc.enable()
    assert NAME not in os.environ


def test_why_there_is_none_is_said(torch_is, monkeypatch):
    """By vLLM's configuration and its variables; nothing where it is used."""
    from types import SimpleNamespace

    from vllm.config.compilation import CompilationMode

    from weightkeeper import vllm_artifact

    def config(eager: bool, mode: CompilationMode):
        return SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=eager), compilation_config=SimpleNamespace(mode=mode)
        )

    compiled = config(False, CompilationMode.VLLM_COMPILE)
    torch_is("2.11.0")
    assert vllm_artifact.why_not(config(True, CompilationMode.NONE)) == "nothing is compiled (enforce-eager)"
    assert vllm_artifact.why_not(config(False, CompilationMode.NONE)) == "the model is not compiled"
    assert vllm_artifact.why_not(compiled) == f"{NAME} is 0, or torch is older than 2.10.0"
    monkeypatch.setenv(NAME, "1")
    assert vllm_artifact.why_not(compiled) == ""
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    assert vllm_artifact.why_not(compiled) == "VLLM_USE_AOT_COMPILE is off"


def test_a_vllm_that_was_not_compared_is_told(torch_is, monkeypatch, caplog):
    """Nothing is saved then, and how to have it all the same is in the log; who has decided is told nothing."""
    import logging

    from weightkeeper import saving, vllm_api

    torch_is("2.11.0")
    monkeypatch.setattr(vllm_api, "VLLM_VERSION", "0.31.0")
    monkeypatch.setattr(saving.logger, "propagate", True)
    with caplog.at_level(logging.INFO, saving.logger.name):
        monkeypatch.delenv(savings.SWITCH)
        saving.begin()
        told = caplog.text
        monkeypatch.setenv(savings.SWITCH, "none")
        saving.begin()
    assert "with vLLM 0.31.0, whose tokens were not compared on a GPU; WEIGHTKEEPER_SAVINGS=all saves" in told
    assert caplog.text == told
    assert NAME not in os.environ
