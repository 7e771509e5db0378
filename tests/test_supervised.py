"""What the supervisor reads off containers and files before it acts: programs, keepers, origins, its own record."""

import os
import stat
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from weightkeeper.errors import ConfigError
from weightkeeper.launcher.messages import Ended, EngineStatus
from weightkeeper.supervisor import apply, builds, images, keepers, origin, programs, project, variables
from weightkeeper.supervisor.alone import Alone
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.inside import Done
from weightkeeper.supervisor.launched import Launched, Replaced
from weightkeeper.supervisor.project import ConfigFile, Service
from weightkeeper.supervisor.state import Applied, State, of_service
from weightkeeper.supervisor.stop import Stop


@pytest.mark.parametrize(
    ("words", "called", "options"),
    [
        (["weightkeeper", "engine", "--", "m"], ["weightkeeper"], ("--", "m")),
        (["engine-entrypoint", "/opt/venv/bin/weightkeeper", "engine"], ["/opt/venv/bin/weightkeeper"], ()),
        (["python3", "-m", "weightkeeper.cli", "engine", "m"], ["python3", "-m", "weightkeeper.cli"], ("m",)),
        (["exec", "weightkeeper", "engine", "--name", "a"], ["weightkeeper"], ("--name", "a")),
    ],
)
def test_a_launcher_is_found_in_a_command(words, called, options):
    """Behind an entrypoint, by its path, as a module, in a script."""
    program = programs.find(words, "engine")
    assert (list(program.words), program.options) == (called, options)


@pytest.mark.parametrize("words", [[], ["weightkeeper"], ["vllm", "serve", "engine"], ["weightkeeper", "serve"]])
def test_another_program_is_none(words):
    """A word alone does not make one."""
    assert programs.find(words, "engine") is None


def test_a_command_for_the_same_container_has_its_name_and_its_sockets():
    """In either spelling; what follows `--` is the server's."""
    words = "weightkeeper engine --name a --socket-dir=/run/s -- --name other --no-control"
    program = programs.find(words.split(), "engine")
    assert program.command("engine-status", "--json") == [
        "weightkeeper", "engine-status", "--name", "a", "--socket-dir", "/run/s", "--json",
    ]  # fmt: skip
    assert not program.has("--no-control")


def test_an_option_that_is_given_several_times_has_all_its_values():
    """In both spellings and in order; the last one counts where there can be one."""
    words = "weightkeeper engine --env-file /a --name x --env-file=/b -- m --env-file /c"
    program = programs.find(words.split(), "engine")
    assert program.every("--env-file") == ("/a", "/b")
    assert (program.option("--env-file"), program.every("--state-dir"), program.option("--state-dir")) == ("/b", (), "")


def resolved(**engine: Any) -> dict[str, Any]:
    sockets = {"type": "volume", "source": "sockets", "target": "/run/weightkeeper"}
    config = {"type": "bind", "source": "/project", "target": "/config"}
    return {
        "name": "t",
        "services": {
            "engine": {"volumes": [sockets, config], "command": ["weightkeeper", "engine", "--", "m"], **engine},
            "sidecar": {
                "volumes": [sockets, config],
                "command": ["weightkeeper", "serve", "--config", "/config/engine.yaml"],
            },
        },
    }


def test_the_keeper_of_an_engine_is_the_one_whose_sockets_it_mounts():
    """With the config file that this keeper reads, seen from here."""
    whole = resolved()
    keeper = keepers.of_engine(whole["services"]["engine"], whole)
    assert (keeper.service, keeper.config) == ("sidecar", Path("/project/engine.yaml"))


@pytest.mark.parametrize(
    "engine",
    [
        {"volumes": []},
        {"volumes": [{"type": "volume", "source": "others", "target": "/run/weightkeeper"}]},
        {"environment": {"WEIGHTKEEPER_SOCKET_DIR": "/elsewhere"}},
    ],
)
def test_an_engine_with_other_sockets_has_no_keeper(engine):
    """Its weights are somebody else's."""
    whole = resolved(**engine)
    assert keepers.of_engine(whole["services"]["engine"], whole) is None


def test_the_policy_is_refuse_unless_the_label_says_swap():
    """An engine is never taken down by default."""
    assert keepers.policy({}) == keepers.policy({"labels": {keepers.POLICY_LABEL: "maybe"}}) == "refuse"
    assert keepers.policy({"labels": {keepers.POLICY_LABEL: "swap"}}) == "swap"


def test_a_launcher_without_a_control_socket_counts_as_none():
    """Nobody in there can be asked."""
    labels = {"labels": {project.LABEL: "true"}}
    for command, is_there in (("weightkeeper engine -- m", True), ("weightkeeper engine --no-control -- m", False)):
        whole = resolved(command=command.split(), **labels)
        assert (project.snapshot(whole).services["engine"].launcher is not None) is is_there


def test_a_keeper_has_the_variables_of_its_container_that_may_shape_weights():
    """A log level is none, and nothing of another program is one."""
    whole = resolved()
    whole["services"]["sidecar"]["environment"] = {
        "VLLM_USE_X": "$$1", "VLLM_LOGGING_LEVEL": "DEBUG", "HF_TOKEN": "t", "VLLM_UNSET": None,
    }  # fmt: skip
    assert keepers.of_engine(whole["services"]["engine"], whole).variables == {"VLLM_USE_X": "$1"}


def test_versions_are_read_off_labels():
    """An image without them, or with empty ones, is one of which nothing is known."""
    labels = {builds.VLLM_LABEL: "0.32.0", builds.TORCH_LABEL: "2.13.0", "other": "x"}
    assert builds.of_labels(labels) == builds.Build("0.32.0", "2.13.0")
    assert builds.of_labels({builds.VLLM_LABEL: ""}) == builds.of_labels(None) == builds.Build()


class Docker:
    """As far as it is asked about versions: labels of images by their name, and of the containers that run."""

    def __init__(self, images: dict[str, dict[str, str]], *running: dict[str, str]) -> None:
        self._images = images
        self.containers = SimpleNamespace(list=lambda filters: [SimpleNamespace(labels=labels) for labels in running])
        self.images = self

    def client(self) -> Any:
        return self

    def get(self, name: str) -> Any:
        if name not in self._images:
            raise ImageNotFound(f"no such image: {name}")
        return SimpleNamespace(labels=self._images[name])


def moved(**sidecar: Any) -> tuple[project.Snapshot, project.Snapshot]:
    """A project before and after its engine, and maybe its sidecar, got another image."""
    snapshots = []
    for image, change in (("a", {"image": "a"}), ("b", {"image": "a"} | sidecar)):
        whole = resolved(image=image, labels={project.LABEL: "true"})
        whole["services"]["sidecar"] |= change
        snapshots.append(project.snapshot(whole))
    return snapshots[0], snapshots[1]


def test_versions_of_a_keeper_are_those_of_what_runs():
    """Its tag may mean another image by now, or its definition was edited; without a container, the definition says."""
    images_here = {"a": {builds.VLLM_LABEL: "1"}, "b": {builds.VLLM_LABEL: "2"}}
    old, new = moved(image="b")
    asked = images.pairs(old, new, Docker(images_here, {builds.VLLM_LABEL: "0"}))
    assert asked == {"engine": builds.Pair(builds.Build("2"), builds.Build("0"))}
    asked = images.pairs(old, new, Docker(images_here))
    assert asked == {"engine": builds.Pair(builds.Build("2"), builds.Build("2"))}


def test_an_image_that_is_not_here_has_no_versions():
    """That is no error: Compose pulls it."""
    assert images.pairs(*moved(), Docker({}))["engine"] == builds.Pair(builds.Build(), builds.Build())


def test_docker_is_not_asked_where_no_image_changes():
    """Nor for an engine without a keeper."""
    old, new = moved()
    assert images.pairs(new, new, None) == {}
    alone = replace(new, services={**new.services, "engine": replace(new.services["engine"], keeper=None)})
    assert images.pairs(old, alone, None) == {}


def container(**config: Any) -> Any:
    labels = config.pop("Labels", {})
    ports = config.pop("Ports", {})
    attrs = {"Config": {"Env": [], "Labels": labels, **config}, "HostConfig": {"PortBindings": ports}}
    return SimpleNamespace(attrs=attrs, labels=labels)


def test_a_container_is_made_from_a_definition_where_composes_hashes_agree():
    """Where one side has none, there is nothing to compare."""
    service = Service("engine", {}, True, hash="a" * 64)
    assert origin.is_made_from(container(Labels={origin.HASH_LABEL: "a" * 64}), service)
    assert not origin.is_made_from(container(Labels={origin.HASH_LABEL: "b" * 64}), service)
    assert origin.is_made_from(container(), service)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"Env": ["TOKEN=other", "PATH=/bin"]}, "environment TOKEN"),
        ({"Env": ["TOKEN=t"], "Image": "b"}, "image b, not a"),
        ({"Env": ["TOKEN=t"], "Cmd": ["x", "$y"]}, "command"),
        ({"Env": ["TOKEN=t"], "Ports": {}}, "ports"),
        ({"Env": ["TOKEN=t"]}, "something that Docker does not show by name"),
    ],
)
def test_what_differs_is_named_and_no_value_of_a_variable_is_shown(config, text):
    """A token that differs is a name."""
    whole = {"Image": "a", "Cmd": ["x", "$z"], "Ports": {"80/tcp": [{"HostPort": "8080"}]}} | config
    ports = [{"published": "8080", "target": 80}]
    definition = {"image": "a", "command": ["x", "$$z"], "environment": {"TOKEN": "t"}, "ports": ports}
    assert origin.differences(container(**whole), Service("engine", definition, True)) == text


def test_what_was_applied_is_read_back_as_it_was(tmp_path):
    """With the config file's own text, so that a date stays a date; only we may read it."""
    text = b"model: /model\nrevision: 2026-01-01\n"
    config = project.parse_config(Path("/p/engine.yaml"), text)
    service = Service("engine", {"environment": {"HF_TOKEN": "t"}}, True, config, hash="h")
    state = State(tmp_path, "t")
    state.write({"engine": of_service(service, "2026", "key", {"name": "t"})})
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    read = State(tmp_path, "t").read()["engine"]
    assert (read.started, read.failed, read.good) == ("2026", "key", {"name": "t"})
    assert read.service(service) == service


def test_environment_files_that_were_applied_are_read_back_as_they_were(tmp_path):
    """Values and order; an older record, which has none, says nothing about those of now."""
    files = tuple(variables.parse(Path(f"/p/{name}.env"), f"A={name}\n".encode()) for name in "ba")
    service = Service("engine", {}, True, env_files=files)
    State(tmp_path, "t").write({"engine": of_service(service, "2026", "", {})})
    now = replace(service, env_files=files[:1])
    assert State(tmp_path, "t").read()["engine"].service(now) == service
    assert Applied({}).service(now).env_files == files[:1]


@pytest.mark.parametrize(
    ("started", "touched", "expected"),
    [
        ("2026-01-01T00:00:00Z", "2026-01-02", "old"),
        ("2026-01-03T00:00:00Z", "2026-01-02", "new"),
        ("2026-01-03T00:00:00Z", "2026-01-04", "old"),
    ],
)
def test_an_environment_file_that_was_edited_while_nobody_watched_counts_as_not_applied(
    tmp_path, monkeypatch, started, touched, expected
):
    """Unless the container was started since, and has read it: by its times against the container's start."""
    file = tmp_path / "a.env"
    file.write_text("A=new\n")
    moment = datetime.fromisoformat(f"{touched}T00:00:00+00:00").timestamp()
    times = SimpleNamespace(st_mtime_ns=int(moment * 1e9), st_ctime_ns=0)
    monkeypatch.setattr(Path, "stat", lambda path, **_: times)
    old = Service("engine", {}, True, env_files=(variables.parse(file, b"A=old\n"),))
    before = of_service(old, "2026-01-01T00:00:00Z", "", {})
    now = Service("engine", {}, True, env_files=(variables.parse(file, b"A=new\n"),))
    assert apply._as_read(now, before, started).env_files[0].values == {"A": expected}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"engine": {}}'])
def test_a_record_that_cannot_be_used_is_said_and_is_none(tmp_path, caplog, content):
    """What is there then counts as applied."""
    (tmp_path / "applied-t.json").write_text(content)
    assert State(tmp_path, "t").read() == {}
    assert "what is there now counts as applied" in caplog.text


def test_the_key_of_a_service_changes_with_its_definition_and_the_text_of_its_file():
    """A comment, too: whoever saves the file again wants it tried again."""
    path = Path("/p/engine.yaml")
    one = Service("engine", {"image": "a"}, True, ConfigFile(path, {"a": 1}, "", b"a: 1\n"))
    others = [
        Service("engine", {"image": "b"}, True, one.config),
        Service("engine", {"image": "a"}, True, ConfigFile(path, {"a": 1}, "", b"a: 1 # again\n")),
        Service("engine", {"image": "a"}, True, ConfigFile(path, None, "no such file")),
    ]
    assert len({one.key, *(other.key for other in others)}) == 4
    assert Service("engine", {"image": "a"}, True, ConfigFile(path, None, "", b"a: 1\n")).key == one.key
    with_env = replace(one, env_files=(variables.parse(path, b"A=1\n"),))
    assert len({one.key, with_env.key, replace(one, env_files=(variables.parse(path, b"A=1 #\n"),)).key}) == 3


@pytest.mark.parametrize(
    ("code", "errors", "is_refusal", "reason"),
    [
        (2, "2026 INFO x: y\nweightkeeper: max-model-len is 0\n set it\n", True, "max-model-len is 0; set it"),
        (2, "Usage: …\n\nError: No such option '--x'.\n", False, "Error: No such option '--x'."),
        (1, "weightkeeper: no launcher answers\n", False, "no launcher answers"),
        (137, "", False, "exit code 137"),
    ],
)
def test_why_a_program_inside_failed_is_its_own_line(code, errors, is_refusal, reason):
    """A setting that it refuses is told from an option that it does not know."""
    done = Done(code, "", errors)
    assert (done.is_refusal, done.reason) == (is_refusal, reason)


def told(state: str, generation: int, started_at: float, **more: Any) -> EngineStatus:
    return EngineStatus("e", "1", state, 0.0, started_at, 1, generation=generation, phases={"fork": 0.5}, **more)


def followed(before: EngineStatus, *statuses: EngineStatus) -> Replaced:
    """What becomes of a reload after which the launcher answers with these, one a look; in vain ends the waiting."""
    launched = Launched(None, None, Stop())
    left = list(statuses)
    launched.status = lambda: left.pop(0)
    return launched.follow(before, lambda _: "" if left else "in vain")


def test_a_server_is_followed_until_a_later_one_is_ready():
    """One of the generation before, or that is not ready, is not it."""
    before = told("ready", 5, 100.0)
    looks = told("ready", 5, 100.0), told("starting", 6, 100.0), told("ready", 6, 100.0)
    assert followed(before, *looks) == Replaced("healthy", "", {"fork": 0.5}, 6)
    assert followed(before, *looks[:2]) == Replaced("starting", "in vain")


def test_a_launcher_that_was_started_anew_counts_from_one():
    """Its first server has read the configuration as it is now; it is known by the launcher's start."""
    before = told("ready", 5, 100.0)
    assert followed(before, told("warming", 0, 200.0), told("ready", 1, 200.0)).result == "healthy"
    dead = [Ended(number, 9, 201.0, f"crash: exit code {number}", False) for number in (1, 2)]
    ended = followed(before, *(told("waiting", one.generation, 200.0, last_exit=one) for one in dead))
    assert ended == Replaced("exited", "with exit code 2", generation=2)


class NoContainers:
    """Docker, as far as it is asked."""

    def client(self) -> Any:
        return SimpleNamespace(containers=SimpleNamespace(list=lambda **_: self.found))

    def __init__(self, *found: Any) -> None:
        self.found = list(found)


def test_of_two_supervisors_the_second_refuses(tmp_path):
    """By the state directory, until the first is gone."""
    compose = Compose(tmp_path)
    first = Alone(tmp_path, compose, "t", NoContainers())
    with pytest.raises(ConfigError, match="another supervisor is at work on t; stop it first"):
        Alone(tmp_path, compose, "t", NoContainers())
    first.close()
    Alone(tmp_path, compose, "t", NoContainers()).close()


def test_two_projects_of_one_directory_can_each_have_one(tmp_path):
    """Their names were given by hand; nothing but the directory is shared."""
    (tmp_path / "compose.yaml").write_text("name: own\nservices: {}\n")
    one = Alone(tmp_path, Compose(tmp_path, name="a"), "a", NoContainers())
    Alone(tmp_path, Compose(tmp_path, name="b"), "b", NoContainers()).close()
    one.close()


def test_a_container_of_the_project_that_supervises_is_named(tmp_path):
    """It may have another state directory."""
    config = {"Entrypoint": ["supervisor-entrypoint"], "Cmd": ["weightkeeper", "supervise", "--state-dir", "/s"]}
    other = SimpleNamespace(id="f" * 64, name="t-supervisor-1", attrs={"Config": config})
    with pytest.raises(ConfigError, match="t-supervisor-1 supervises t already; stop it first"):
        Alone(tmp_path, Compose(tmp_path), "t", NoContainers(other))


def test_a_lock_goes_with_its_process(tmp_path):
    """A supervisor that was killed leaves nothing that has to be cleared away."""
    child = os.fork()
    if child == 0:
        Alone(tmp_path, Compose(tmp_path), "t", NoContainers())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    Alone(tmp_path, Compose(tmp_path), "t", NoContainers()).close()
