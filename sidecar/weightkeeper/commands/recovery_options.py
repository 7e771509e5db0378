"""Options of the recovery commands, and what they come to."""

import contextlib
import errno
import importlib.util
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from weightkeeper import engine_config
from weightkeeper.errors import ConfigError

SECONDS = click.FloatRange(min=0, min_open=True)
PATH = click.Path(path_type=Path)

LOAD_SECONDS = 60.0
"""Of throughput, and as many for comparison, where nothing else is said and an agent works."""

AGENT_PACKAGES = ("openai", "tenacity")

DISK_FAULTS = (errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS)
FILE_FAULTS = (errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EPERM)
"""Of a file where one is named; a process that may not be signalled is refused in the same way."""

NOT_TAKEN = ("model", "host", "port", "uds", "load-format", "model-loader-extra-config", "served-model-name")
"""Of a config file: the benchmark has its own."""


def _together(*options: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


run = _together(
    click.option("--model", type=PATH, help="Local checkpoint; else that of --config."),
    click.option("--config", type=PATH, help="vLLM's config file, for the options of all engines."),
    click.option("--project", type=PATH, help="Directory of a compose project that is up: measure its containers "
                 "instead. Its engine is restarted many times, and left as it was found."),
    click.option("--restart-docker", default="", metavar="COMMAND", help="With --project: what restarts the Docker "
                 "engine, and all containers with it, for the scenario docker-restart."),
    click.option("--eager", is_flag=True, help="enforce-eager for all engines."),
    click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Another one of vLLM's options. On "
                 "a GPU, gpu-memory-utilization has to leave room for what holds weights besides."),
    click.option("--no-agent", "has_agent", is_flag=True, flag_value=False, default=True, help="Restarts alone: no "
                 "agent works, and nothing is said of its work. A sample ends with the first right completion."),
    click.option("--together", is_flag=True, help="Start sidecar, vLLM's daemon and the uncounted first engine at the "
                 "same time: saves a minute or more on a machine with cold caches, and they have to fit beside each "
                 "other."),
    click.option("-n", "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Of each scenario."),
    click.option("--scenarios", "names", metavar="A,B,…", help="Only these, and the baseline."),
    click.option("--seed", default=0, show_default=True, type=int, help="Of the order."),
    click.option("--limit", "limit_s", default=280.0, show_default=True, type=SECONDS, help="Seconds for each start."),
    click.option("--time", "seconds", default=86_400.0, show_default=True, type=SECONDS,
                 help="Seconds for everything: no sample is begun that would probably not end in time."),
    click.option("--throughput", "load_s", type=click.FloatRange(0), show_default="60, without an agent 0",
                 help="Seconds of load after one start of each scenario, and as many for comparison; 0 for none."),
    click.option("--throughput-of", "loaded", metavar="A,B,…", help="Only after these scenarios; else after all."),
    click.option("--clients", default=8, show_default=True, type=click.IntRange(1), help="That load at the same time."),
    click.option("--steps", default=12, show_default=True, type=click.IntRange(3), help="Of the agent's job."),
    click.option("--tokens", default=32, show_default=True, type=click.IntRange(1), help="Of each of its answers; of "
                 "the completion, without an agent."),
    click.option("--out", type=PATH, help="Directory for logs and configurations; a new one here by default."),
    click.option("--json", "file", type=PATH, help="The result; a new file here by default."),
    click.option("--server", hidden=True, help="Command in place of vLLM's program."),
    click.option("--application", hidden=True, default="", help="Module in place of vLLM's server in the launcher."),
)  # fmt: skip

agent = _together(
    click.option("--directory", required=True, type=PATH, help="Of its state and of the ledger."),
    click.option("--url", default="http://127.0.0.1:8000/v1", show_default=True, help="Of the API."),
    click.option("--model", required=True, help="As the server names it."),
    click.option("--job", default="inventory", show_default=True, help="Name of the job."),
    click.option("--steps", default=12, show_default=True, type=click.IntRange(1), help="Of the job."),
    click.option("--tokens", default=32, show_default=True, type=click.IntRange(1), help="Of each answer, at most."),
    click.option("--timeout", "timeout_s", default=60.0, show_default=True, type=SECONDS,
                 help="Seconds for each read of an answer."),
    click.option("--patience", "patience_s", default=600.0, show_default=True, type=SECONDS,
                 help="Seconds after which a step without an answer ends the agent."),
    click.option("--wrong", is_flag=True, hidden=True),
)  # fmt: skip


def scenarios(names: str | None, known: Sequence[Any], baseline: str) -> tuple[list[Any], list[Any]]:
    """Those that were asked for, with the baseline, and the others."""
    asked = set(names_of(names) or {each.name for each in known})
    check_names("--scenarios", asked, known)
    asked.add(baseline)
    return [each for each in known if each.name in asked], [each for each in known if each.name not in asked]


def check_names(option: str, asked: Collection[str], known: Sequence[Any]) -> None:
    if unknown := set(asked) - {each.name for each in known}:
        raise ConfigError(
            f"{option}: {', '.join(sorted(unknown))} unknown; there are {', '.join(each.name for each in known)}"
        )


def names_of(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    if not (names := frozenset(name.strip() for name in text.split(",")) - {""}):
        raise ConfigError("no name of a scenario is given; leave the option out for all of them")
    return names


def model_and_options(
    model: Path | None, config: Path | None, eager: bool, given: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """The checkpoint, and vLLM's options for all engines."""
    values = engine_config.read(config) if config else {}
    if model is None and not values.get("model"):
        raise ConfigError("which model? Give --model PATH, or --config with vLLM's config file")
    path = model or Path(str(values["model"]))
    found = {name: value for name, value in values.items() if name not in NOT_TAKEN}
    if eager:
        found["enforce-eager"] = True
    for text in given:
        name, equals, value = text.partition("=")
        if name in NOT_TAKEN:
            raise ConfigError(f"--option {text}: the benchmark sets {name} itself")
        try:
            found[name] = yaml.safe_load(value) if equals else True
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {text}: the value cannot be read: {error}") from error
    return path, found


def check_agent_packages() -> None:
    """Find out before anything is started that the agent could not be."""
    missing = [name for name in AGENT_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the agent needs what is not here: the Python package {' and '.join(missing)}; install "
            "`weightkeeper[recovery]`, or give --no-agent to measure restarts alone"
        )


def check_writable(option: str, file: Path) -> None:
    """Find out before hours of measuring that a file has no place."""
    directory = file.resolve().parent
    if file.is_dir():
        raise ConfigError(f"{option} {file}: is a directory; give a file")
    if not directory.is_dir():
        raise ConfigError(f"{option} {file}: its directory is not there; make it, or give another {option}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror} in its directory; give another {option}") from error


def check_page(page: Path, runs: Sequence[Path]) -> None:
    """Find out whether a page has a place, and takes none of a run."""
    check_writable("-o", page)
    if page.suffix == ".json" or any(page.exists() and run.exists() and page.samefile(run) for run in runs):
        raise ConfigError(f"-o {page}: is the name of a run, and the page is HTML; give another one, such as run.html")


@contextlib.contextmanager
def disk_faults(place: Path) -> Iterator[None]:
    """Tell what a disk refuses while work goes on, as an error with the place and the remedy."""
    remedy = "what is done so far is kept; make room, or give another place"
    try:
        yield
    except sqlite3.Error as error:
        raise ConfigError(f"{place}: {error}; {remedy}") from error
    except OSError as error:
        if error.errno not in DISK_FAULTS and not (error.filename and error.errno in FILE_FAULTS):
            raise
        raise ConfigError(f"{error.filename or place}: {error.strerror}; {remedy}") from error
