"""The tokenizer of the model to be served, loaded before the fork, and loaded again after it where its files changed.

It is 0.3 to 1 s of a start each time, and vLLM makes four of it: one, one more in search of a chat template, and two
copies for its threads.
"""

import copy
import functools
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger("vllm.weightkeeper")

Receipt = tuple[str, int, int, int, int]
"""Name, bytes, times of change in nanoseconds of content and of file, and inode."""

MAX_FILES = 10_000

_loaded: tuple[Path, tuple[Receipt, ...]] | None = None


def load(args: Namespace) -> None:
    """Have vLLM's own caches hold the tokenizer that these arguments name, where it lies in a directory."""
    global _loaded
    name = args.tokenizer or args.model
    directory = Path(name)
    if args.trust_remote_code or args.skip_tokenizer_init or args.enable_prompt_embeds or not directory.is_dir():
        return
    receipts = of_directory(directory)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no thread of its own
    try:
        _load(args, name)
        _loaded = directory, receipts
    except Exception as error:  # the server says it better
        logger.info("weightkeeper: the tokenizer of %s is not loaded before the fork: %s", directory, error)
        _forget(tokenizers=True)
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]


def _load(args: Namespace, name: str) -> None:
    from vllm.renderers import hf
    from vllm.tokenizers import registry

    revision = args.tokenizer_revision or args.revision
    tokenizer = registry.cached_get_tokenizer(
        name,
        runner_type="generate",
        tokenizer_mode=args.tokenizer_mode,
        revision=revision,
        trust_remote_code=False,
    )
    code = args.code_revision if args.tokenizer in (None, args.model) else None
    hf._try_get_processor_chat_template(tokenizer, revision=revision, code_revision=code, trust_remote_code=False)
    _forget(tokenizers=False)
    spares = [copy.deepcopy(tokenizer) for _ in range(args.renderer_num_workers + 1)]
    hf.maybe_make_thread_pool = functools.partial(
        _make_thread_pool, hf.maybe_make_thread_pool, _origin(tokenizer), spares
    )


def _make_thread_pool(made: Any, origin: object, spares: list[Any], tokenizer: Any, copies: int = 1) -> Any:
    """vLLM's function of that name, with copies that were made before the fork where it is this tokenizer's."""
    from vllm.tokenizers import hf

    if _loaded is None or _origin(tokenizer) is not origin:
        return made(tokenizer, copies)
    hf.copy = SimpleNamespace(copy=copy.copy, deepcopy=lambda of: spares.pop() if spares else copy.deepcopy(of))
    try:
        return made(tokenizer, copies)
    finally:
        hf.copy = copy


def _origin(tokenizer: Any) -> object:
    """What vLLM's copies of one tokenizer have in common: the one below, which it wraps."""
    reduced = tokenizer.__reduce__()
    return reduced[1][0] if reduced[1] else tokenizer


def renew() -> None:
    """After the fork: keep what was loaded only if its files are as they were."""
    global _loaded
    if _loaded is not None and of_directory(_loaded[0]) != _loaded[1]:
        logger.info("weightkeeper: the tokenizer's files in %s changed and are read again", _loaded[0])
        _forget(tokenizers=True)
        _loaded = None


def of_directory(directory: Path) -> tuple[Receipt, ...]:
    """The files of a directory that are no weights; links are followed. Empty where it cannot be read."""
    found: list[Receipt] = []
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name)[:MAX_FILES]:
            if entry.is_file() and not entry.name.endswith((".safetensors", ".bin", ".pt", ".gguf")):
                status = entry.stat()
                found.append((entry.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    except OSError:
        return ()
    return tuple(found)


def _forget(tokenizers: bool) -> None:
    """Empty vLLM's caches of what it read from a model's directory; those of its tokenizer only where asked."""
    kept = () if tokenizers else ("cached_get_tokenizer", "cached_get_processor")
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.tokenizers", "vllm.transformers_utils", "vllm.renderers")):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, functools._lru_cache_wrapper) and attribute not in kept:
                    value.cache_clear()
    if tokenizers:
        from vllm.renderers import hf

        hf._PROCESSOR_CHAT_TEMPLATES.clear()
