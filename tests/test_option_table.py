"""The table of vLLM's options, against the options that the installed vLLM really has and against the fingerprint."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weightkeeper
from weightkeeper.supervisor import options
from weightkeeper.supervisor.options import ALIASES, ROWS, UNKNOWN, effect
from weightkeeper.supervisor.options.container import CONTAINER
from weightkeeper.supervisor.options.reload import RELOAD
from weightkeeper.supervisor.options.weights import WEIGHTS

SCRIPT = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser as make
from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
print(json.dumps([action.option_strings for action in make(Parser())._actions]))
"""

OPTION_OF = {
    "cache_dtype": "kv-cache-dtype",
    "runner_type": "runner",
    "convert_type": "convert",
    "backend": "attention-backend",
    "target_modules": "lora-target-modules",
    "method": "speculative-config",
    "limit_per_prompt": "limit-mm-per-prompt",
    "linear_backend_per_quant": "kernel-config",
}
"""Field of vLLM's configuration → the option that sets it, where the two have different names."""

NO_OPTION = {"word_embeddings_untied_by_checkpoint"}
"""Fields that vLLM reads off the checkpoint."""


@pytest.fixture(scope="module")
def options_of_vllm() -> list[list[str]]:
    """The spellings of each option of `vllm serve`."""
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [each for each in found if each and "--help" not in each]


@pytest.mark.vllm
def test_every_spelling_of_every_option_has_a_row(options_of_vllm):
    """An option without one would count as one that shapes weights, and cost a load."""
    spellings = {text.lstrip("-") for each in options_of_vllm for text in each}
    assert "max-model-len" in spellings
    assert {text for text in spellings if effect(text) is UNKNOWN} == set()


@pytest.mark.vllm
def test_every_row_is_an_option(options_of_vllm):
    """A misspelled row would never match."""
    spellings = {text.lstrip("-") for each in options_of_vllm for text in each}
    assert ROWS.keys() - spellings == set()
    assert ALIASES.keys() - spellings == set()


@pytest.mark.vllm
def test_an_alias_is_another_spelling_of_its_option(options_of_vllm):
    """By vLLM's own parser."""
    together = [{text.lstrip("-") for text in each} for each in options_of_vllm]
    for alias, option in ALIASES.items():
        assert any({alias, option} <= each for each in together), alias


def test_an_option_has_one_row():
    """In one of the three tables."""
    assert len(ROWS) == len(RELOAD) + len(WEIGHTS) + len(CONTAINER)


def test_every_row_has_a_reason():
    """The table is for people too."""
    assert all(each.reason and each.reason == each.reason.strip() for each in ROWS.values())


def test_what_the_fingerprint_covers_shapes_weights():
    """A field of it that a reload could change would end in a mismatch, and in a load from disk."""
    source = ast.parse((Path(weightkeeper.__file__).parent / "conditions.py").read_text())
    values = {}
    for node in source.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id in ("_FIELDS", "_MULTIMODAL_FIELDS"):
            values[target.id] = ast.literal_eval(node.value)
    fields = {name for _, _, names in values["_FIELDS"] for name in names} | set(values["_MULTIMODAL_FIELDS"])
    assert "tensor_parallel_size" in fields and "language_model_only" in fields
    shaping = {OPTION_OF.get(name, name.replace("_", "-")) for name in fields - NO_OPTION}
    assert shaping - WEIGHTS.keys() == set()


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("max-model-len", "reload"),
        ("no-enable-prefix-caching", "reload"),
        ("compilation-config.level", "reload"),
        ("gpu-memory-utilization", "reload"),
        ("device-memory-utilization", "reload"),
        ("port", "container"),
        ("tp", "weights"),
        ("no-enable-lora", "weights"),
        ("hf-overrides.rope_theta", "weights"),
        ("quantization", "weights"),
        ("model-loader-extra-config.fallback", "reload"),
        ("model-loader-extra-config.disk_load_format", "weights"),
        ("no-such-option", "weights"),
    ],
)
def test_what_a_change_asks_for(option, kind):
    """By its own row, by the row of its other spelling, or the safe way."""
    assert effect(option, None, "x").kind == kind


def test_an_unknown_option_says_so():
    """The reason is shown by `weightkeeper plan`."""
    assert effect("no-such-option") is options.UNKNOWN
