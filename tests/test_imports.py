"""The direction in which modules import each other, and what each process must never load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightkeeper

PACKAGE = Path(weightkeeper.__file__).parent

LAYERS = [
    {"errors", "layout", "phases", "quantities", "doctor_report", "threads", "harmless", "nvml"},
    {"engine_config", "options", "verified", "memory", "files", "vllm_messages", "patience"},
    {"protocol", "safetensors_header", "weight_set"},
    {"checkpoint", "frames", "sockets", "fingerprint", "doctor_trial", "doctor_probe", "doctor_causes"},
    {"changes", "hashing", "room", "doctor_facts", "doctor_process"},
    {"identity", "channel", "listening", "accepting", "holding", "child", "dialing"},
    {"store", "retry_key", "client", "metrics", "receipts", "note"},
    {"sessions", "loading", "loads", "publishing", "adopting", "offering"},
    {"keeper"},
    {"slots", "tensors", "digest", "vllm_api", "guard"},
    {"capture", "restore", "mapping", "adapt", "budget", "verify", "doctor"},
    {"packed", "conditions"},
    {"publisher"},
    {"rank_loader", "mapped_loader"},
    {"ranks"},
    {"savings", "kv_size", "bulk_capture", "vllm_conditions", "vllm_start"},
    {"vllm_deferred", "vllm_kv_size"},
    {"vllm_graphs"},
    {"worker_savings"},
    {"vllm_idle"},
    {"saving"},
    {"loader", "plugin", "supervisor", "recovery", "launcher", "vllm_binding", "vllm_imports", "vllm_tokenizer"},
    {"vllm_draining", "vllm_forks"},
    {"vllm_server"},
    {"command_options", "commands"},
    {"cli"},
]
"""A module imports from its own layer and those before it."""

WITHOUT_TORCH = [
    "keeper",
    "client",
    "loader",
    "cli",
    "supervisor",
    "checkpoint",
    "identity",
    "commands.engine",
    "commands.serve",
    "commands.supervise",
    "commands.doctor",
    "commands.verify",
    "commands.recovery",
    "recovery.agent",
    "launcher.loop",
    "launcher.template",
    "doctor_trial",
    "doctor_probe",
]


def layer(module: str) -> int:
    for number, names in enumerate(LAYERS):
        if module in names:
            return number
    raise AssertionError(f"weightkeeper.{module} has no layer in this test; give it one")


def imported(file: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "weightkeeper":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weightkeeper."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("weightkeeper.")}
    return found - {"__version__"}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    """checkpoint → loader → memory → keeper → protocol → client → plugin: nothing imports what comes after it."""
    module = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module in ("__init__", "__main__"):
        return
    later = {name for name in imported(file) if layer(name) > layer(module)}
    assert not later, f"{module} imports {later}, which come after it"


def test_vllm_is_named_in_the_modules_that_are_named_for_it():
    """What is private of vLLM's workers is in vllm_api, what is of its server in vllm_server and those beside it."""
    naming = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "vllm" for name in names):
                naming.append(file.name)
    of_server = {
        "vllm_binding.py",
        "vllm_draining.py",
        "vllm_forks.py",
        "vllm_imports.py",
        "vllm_server.py",
        "vllm_tokenizer.py",
    }
    of_start = {"vllm_conditions.py", "vllm_deferred.py", "vllm_graphs.py", "vllm_idle.py", "vllm_kv_size.py"}
    assert set(naming) == {"vllm_api.py", *of_server, *of_start, "vllm_start.py"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_small_processes_load_neither_torch_nor_vllm(module):
    """The keeper, the client, the supervisor and the loader's first half start without them."""
    script = f"import sys, weightkeeper.{module}; print(sorted({{'torch', 'vllm', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
