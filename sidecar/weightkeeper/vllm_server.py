"""vLLM's server as the launcher's application: import it, check its arguments, run it on a given socket.

vLLM's names on the server's side, for 0.30 to 0.33, are here and in the modules beside it (`vllm_draining`,
`vllm_forks`, `vllm_imports`, `vllm_tokenizer`); those of its workers are in `vllm_api`. Nothing of the server is made
anew: arguments go through vLLM's parser and then to what `vllm serve` itself would call.
"""

import contextlib
import functools
import gc
import io
import itertools
import logging
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pydantic

from weightkeeper import checkpoint, engine_config, saving, vllm_draining, vllm_forks, vllm_imports, vllm_tokenizer
from weightkeeper.errors import CheckpointError, ConfigError

READ_BY_THE_LAUNCHER = (
    "--config", "--host", "--port", "--uds", "--shutdown-timeout", "--ssl-certfile", "--ssl-keyfile", "--ssl-cert-reqs",
)  # fmt: skip
"""Options that the launcher reads for itself, by their full names."""

READING_SAFETENSORS = ("auto", "safetensors", "weightkeeper")
"""Load formats that read such files where there are some."""

UNREADABLE = frozenset({
    "cut", "dangling_link", "header_json", "lfs_pointer", "link_loop", "missing", "missing_shard", "not_a_file",
    "unreadable",
})  # fmt: skip
"""Codes of faults of a file that nobody can read; of others vLLM may make something."""

logger = logging.getLogger("vllm.weightkeeper")

_is_warm = False
"""Whether this process or the one it is forked from was warmed."""


def warm(arguments: list[str]) -> None:
    """Import all that a server with these arguments needs, its model's own module too. No GPU is touched.

    Raises:
        ImportError: this vLLM is not one of those that can be served.
    """
    global _is_warm
    gc.disable()  # nothing of what is imported ends, so there is nothing to collect
    try:
        vllm_imports.everything()
        try:
            args = _checked(arguments)
        except ConfigError as error:
            logger.info("weightkeeper: the model's own modules are not imported before the fork: %s", error)
        else:
            vllm_imports.model(args)
            vllm_tokenizer.load(args)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to, and so copy, every page of this
    _is_warm = True


def check(arguments: list[str]) -> None:
    """Refuse what a server with these arguments would refuse. No GPU is touched.

    Raises:
        ConfigError: with vLLM's own words, or with the way to run what cannot be forked.
    """
    logging.disable(logging.WARNING)  # the server will say it
    args = _checked(arguments)
    _refuse_abbreviations(arguments)
    if _is_warm:
        _refuse_unforked(args)
        vllm_forks.prefer_fork()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers import launcher
    from vllm.usage.usage_lib import UsageContext

    with _in_own_words():
        if args.tool_parser_plugin:
            launcher.ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            launcher.ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        launcher.validate_api_server_args(args)
        AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    _refuse_broken(args.model, args.load_format)


def serve(arguments: list[str], listener: socket.socket) -> None:
    """Run vLLM's server on `listener`, which is bound, until it is stopped. Engine core and workers are forked, too."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    sys.argv = ["vllm", "serve", *arguments]  # vLLM looks for options in it
    launcher.create_server_socket = launcher.create_server_unix_socket = lambda *_, **__: listener
    # at its end vLLM looks for who else has the port and finds the launcher, which is right to have it
    launcher.find_process_using_port = lambda port: None
    vllm_draining.install()
    saving.begin()
    if _is_warm:
        vllm_forks.settle_in(listener)
    cli_env_setup()
    ServeSubcommand.cmd(_parse(arguments))
    if _is_warm:
        vllm_forks.end()


def _checked(arguments: list[str]) -> Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _in_own_words():
            return _parse(arguments)
    except SystemExit as error:
        lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
        raise ConfigError(lines[-1] if lines else f"vLLM's parser ended with {error.code}") from error


@contextlib.contextmanager
def _in_own_words() -> Iterator[None]:
    """Turn what vLLM raises at options into a ConfigError with its words."""
    try:
        yield
    except pydantic.ValidationError as error:
        said = [each["msg"].removeprefix("Value error, ") for each in error.errors(include_url=False)]
        raise ConfigError("; ".join(said)) from error
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, ImportError, OSError) as error:
        raise ConfigError(str(error.args[0] if isinstance(error, KeyError) else error) or repr(error)) from error


def _refuse_abbreviations(arguments: list[str]) -> None:
    """Refuse an option that vLLM's parser would complete and the launcher would miss, here and in the config file.

    Raises:
        ConfigError: with the option's full name.
    """
    options = itertools.takewhile(lambda word: word != "--", arguments)
    given = {word.partition("=")[0]: word.partition("=")[0] for word in options if word.startswith("--")}
    if "--config" in arguments:
        path = arguments[arguments.index("--config") + 1]
        given |= {f"--{key}": f"{Path(path).name}: {key}" for key in engine_config.read(path)}
    for option, shown in given.items():
        name = option.replace("_", "-")
        full = next((full for full in READ_BY_THE_LAUNCHER if full != name and full.startswith(name)), None)
        if full is not None:
            raise ConfigError(f"{shown} is an abbreviation of {full}, which the launcher has to read; write it in full")


def _refuse_broken(model: str, load_format: str) -> None:
    """Refuse a model of safetensors files of which vLLM could not read one.

    Raises:
        ConfigError: with each such file.
    """
    if load_format not in READING_SAFETENSORS or not Path(model).is_dir():
        return
    try:
        checkpoint.open_checkpoint(model)
    except CheckpointError as error:
        if faults := [str(fault) for fault in error.faults if fault.code in UNREADABLE]:
            raise ConfigError("; ".join(faults)) from error


def _refuse_unforked(args: Namespace) -> None:
    """Refuse what vLLM runs in processes of its own making.

    Raises:
        ConfigError: with the option and the remedy.
    """
    given = {
        "--headless": args.headless,
        "--grpc": getattr(args, "grpc", False),
        "--api-server-count": (args.api_server_count or 1) > 1,
        "--data-parallel-size": args.data_parallel_size > 1,
        "--data-parallel-rank": args.data_parallel_rank is not None,
        "--data-parallel-external-lb": args.data_parallel_external_lb,
        "--data-parallel-hybrid-lb": args.data_parallel_hybrid_lb,
        "--data-parallel-multi-port-external-lb": args.data_parallel_multi_port_external_lb,
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(_unforked(option))


def _unforked(what: str) -> str:
    return f"{what}: a server with it cannot be forked from a process that has its imports; start with --no-prefork"


@functools.cache
def _parser() -> ArgumentParser:
    """vLLM's parser of `vllm serve`. Made once, since it takes 0.1 s."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def _parse(arguments: list[str]) -> Namespace:
    """As `vllm serve` takes its arguments."""
    from vllm import logger as vllm_logger
    from vllm.entrypoints.cli.serve import ServeSubcommand

    args = _parser().parse_args(["serve", *arguments])
    if hasattr(vllm_logger, "configure_logging_from_args"):  # since 0.32
        vllm_logger.configure_logging_from_args(args)
    ServeSubcommand().validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    return args
