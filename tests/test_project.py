"""Reading a compose project: what takes part, what Compose makes of it, and where the engines' config files lie."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightkeeper.errors import ComposeError, ConfigError
from weightkeeper.supervisor import arguments, compose, place, project, sources, variables
from weightkeeper.supervisor.compose import Compose
from weightkeeper.supervisor.settings import named
from weightkeeper.supervisor.stop import Stop

has_compose = pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode,
    reason="no Docker CLI with Compose here",
)

PROJECT = """
name: test
services:
  engine:
    image: engine:1
    command: vllm serve --config /config/engine.yaml --seed ${SEED:-0}
    env_file: [engine.env]
    volumes: ["./config:/config:ro"]
    labels: {weightkeeper.supervise: "true"}
  sidecar:
    image: sidecar:1
    volumes: ["./config:/config:ro"]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "engine.yaml").write_text("model: /model\nmax_model_len: 2048\n")
    (tmp_path / "engine.env").write_text("LEVEL=one\n")
    (tmp_path / "compose.yaml").write_text(PROJECT)
    return tmp_path


@pytest.fixture
def fake_docker(tmp_path, monkeypatch):
    """Puts a shell script in the place of the docker program."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n[ "$2" = version ] && exit 0\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    compose._program.cache_clear()
    yield install
    compose._program.cache_clear()


# --- config files in commands


@pytest.mark.parametrize(
    ("definition", "path", "is_read"),
    [
        ({"command": ["vllm", "serve", "--config", "/c/e.yaml"]}, "/c/e.yaml", True),
        ({"command": ["vllm", "serve", "--config=/c/e.yaml"]}, "/c/e.yaml", False),
        ({"command": ["serve", "--config=/c/a.yaml", "--config", "/c/b.yaml"]}, "/c/b.yaml", True),
        ({"entrypoint": ["vllm", "serve"], "command": ["--config", "/c/e.yaml"]}, "/c/e.yaml", True),
        ({"entrypoint": ["vllm", "serve", "--config", "/c/e.yaml"], "command": None}, "/c/e.yaml", True),
        ({"command": ["bash", "-c", "exec vllm serve \\\n  --config '/c/e.yaml' # mine"]}, "/c/e.yaml", True),
        ({"entrypoint": ["/bin/sh", "-ec"], "command": ["vllm serve --config /c/e.yaml"]}, "/c/e.yaml", True),
        ({"command": ["bash", "-e", "-c", "vllm serve --config=/c/e.yaml"]}, "/c/e.yaml", False),
        ({"command": ["weightkeeper", "engine", "--", "--config", "/c/$$x.yaml"]}, "/c/$x.yaml", True),
    ],
)
def test_the_config_file_is_found_in_every_form_of_a_command(definition, path, is_read):
    """List, string, entrypoint, shell; both spellings, and whether vLLM reads it."""
    assert arguments.config(arguments.words(definition)) == arguments.Named(path, is_read)


@pytest.mark.parametrize(
    "command",
    [None, [], ["vllm", "serve", "/model"], ["--config"], ["--config="], ["--configuration", "x"],
     ["bash", "-c", "unclosed ' --config x"]],
)  # fmt: skip
def test_a_command_without_a_config_file_has_none(command):
    """Nothing is guessed."""
    assert arguments.config(arguments.words({"command": command})) is None


MOUNTS = {
    "working_dir": "/srv",
    "tmpfs": ["/scratch:size=1m"],
    "volumes": [
        {"type": "bind", "source": "/host/config", "target": "/config"},
        {"type": "bind", "source": "/host/inner", "target": "/config/inner/"},
        {"type": "bind", "source": "/host/one.yaml", "target": "/one.yaml"},
        {"type": "bind", "source": "/host/srv", "target": "/srv"},
        {"type": "volume", "source": "data", "target": "/data"},
    ],
    "configs": [{"source": "named"}, {"source": "named", "target": "/etc/named.yaml"}, {"source": "inline"}],
}
SECTIONS = {"configs": {"named": {"file": "/host/named.yaml"}, "inline": {"content": "x"}}}


@pytest.mark.parametrize(
    ("inside", "outside", "is_single"),
    [
        ("/config/engine.yaml", "/host/config/engine.yaml", False),
        ("/config/a/../b/engine.yaml", "/host/config/b/engine.yaml", False),
        ("/config/inner/engine.yaml", "/host/inner/engine.yaml", False),
        ("engine.yaml", "/host/srv/engine.yaml", False),
        ("/one.yaml", "/host/one.yaml", True),
        ("/named", "/host/named.yaml", True),
        ("/etc/named.yaml", "/host/named.yaml", True),
    ],
)
def test_a_path_is_translated_through_the_mounts(inside, outside, is_single):
    """The longest mount counts, and a mount of one file is told from one of a directory."""
    assert arguments.place(inside, MOUNTS, SECTIONS) == arguments.Place(Path(outside), "", is_single)


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (
            "/data/e.yaml",
            "/data/e.yaml: in a volume, out of our sight; bind-mount a directory of the project",
        ),
        ("/scratch/e.yaml", "/scratch/e.yaml: in a tmpfs, out of our sight; bind-mount a directory of the project"),
        ("/inline", "/inline: in a config, out of our sight; bind-mount a directory of the project"),
        ("/configs/e.yaml", "/configs/e.yaml: part of the image, it never changes; mount a directory to edit it"),
        ("$FILE", "$FILE: only the container knows this name; write it without a variable"),
    ],
)
def test_a_path_that_cannot_be_seen_has_a_reason(inside, reason):
    """What is not watched is said, with what would help."""
    assert arguments.place(inside, MOUNTS, SECTIONS) == arguments.Place(None, reason)


def test_a_relative_path_without_a_working_directory_is_refused():
    """The image's own one is not known."""
    assert arguments.place("engine.yaml", {}, {}).reason.startswith("engine.yaml: no absolute path;")


# --- snapshots


def test_only_the_label_makes_an_engine():
    """Its value has to be true; services without it keep no config file."""
    given = {"command": ["--config", "/config/engine.yaml"]}
    labels = {"a": {"weightkeeper.supervise": "true"}, "b": {"weightkeeper.supervise": "false"}, "c": {}}
    services = {name: given | {"labels": value} for name, value in labels.items()} | {"d": given}
    snapshot = project.snapshot({"name": "test", "services": services})
    assert [engine.name for engine in snapshot.engines] == ["a"]
    assert all(service.config is None for service in snapshot.services.values())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "empty; vLLM refuses an empty config file, remove --config instead"),
        ("model: a\n b: c\n", "mapping values are not allowed here"),
        ("seed: 1\nseed: 2\n", "the key 'seed' is given twice"),
        ("when: 2026-13-01\n", "month must be in 1..12"),
        ("a: " + "[" * 5000, "not readable as YAML"),
        ("\x00", "not readable as YAML"),
        (None, "no such file; put it back or correct the path"),
    ],
)  # fmt: skip
def test_a_bad_config_file_is_a_fault_of_one_line(tmp_path, content, fault):
    """Whatever lies there, the project can be read, and the fault names the file."""
    path = tmp_path / "engine.yaml"
    if content is not None:
        path.write_text(content)
    definition = {
        "labels": {"weightkeeper.supervise": "true"},
        "command": ["--config", "/config/engine.yaml"],
        "volumes": [{"type": "bind", "source": str(tmp_path), "target": "/config"}],
    }
    config = project.snapshot({"name": "test", "services": {"engine": definition}}).services["engine"].config
    assert config.values is None
    assert config.fault.startswith(str(path))
    assert fault in config.fault
    assert "\n" not in config.fault


# --- the launcher's environment files


def launched(directory: Path, *options: str, mounted: str | None = None) -> project.Snapshot:
    """A project with one engine behind a launcher with these options; `directory` is mounted at /config."""
    volumes = [{"type": "bind", "source": mounted or str(directory), "target": "/config" + ("/a.env" * bool(mounted))}]
    definition = {
        "labels": {"weightkeeper.supervise": "true"},
        "command": ["weightkeeper", "engine", *options, "--", "m", "--env-file", "/config/not-ours.env"],
        "volumes": volumes,
    }
    return project.snapshot({"name": "test", "services": {"engine": definition}})


def test_every_environment_file_of_the_launcher_is_read_in_its_order(tmp_path):
    """In both spellings, several times; what follows `--` is the server's."""
    (tmp_path / "a.env").write_text("# mine\nA=1\nexport B='two'\n")
    (tmp_path / "b.env").write_text("B=3\n")
    snapshot = launched(tmp_path, "--env-file", "/config/a.env", "--env-file=/config/b.env")
    files = snapshot.services["engine"].env_files
    assert [(file.path.name, file.values) for file in files] == [
        ("a.env", {"A": "1", "B": "two"}),
        ("b.env", {"B": "3"}),
    ]
    assert variables.merged(files) == {"A": "1", "B": "3"}
    assert snapshot.config_files == {tmp_path / "a.env", tmp_path / "b.env"}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "no such file; put it back or correct the path"),
        (b"A=1\nHF_TOKEN hf_secret\n", "line 2: expected NAME=VALUE"),
        (b"A=\xff\n", "not UTF-8: invalid start byte at byte 2; save it as UTF-8"),
        (b"#" * (1024 * 1024 + 1), "over 1048576 bytes; the launcher does not read it"),
    ],
    ids=["absent", "no assignment", "bytes", "huge"],
)
def test_a_bad_environment_file_is_a_fault_without_a_value(tmp_path, content, fault):
    """It names the file, in one line, and keeps the engine as it is."""
    if content is not None:
        (tmp_path / "a.env").write_bytes(content)
    engine = launched(tmp_path, "--env-file", "/config/a.env").services["engine"]
    assert engine.env_files[0].values is None
    assert engine.fault.startswith(str(tmp_path / "a.env")) and fault in engine.fault
    assert "\n" not in engine.fault and "hf_secret" not in engine.fault


def test_an_environment_file_that_cannot_be_seen_is_said(tmp_path):
    """As a config file is: in the image it never changes, and a file mounted alone is not seen after a rename."""
    assert launched(tmp_path, "--env-file", "/etc/a.env").notices[1:] == (
        "engine: its env file is not watched: /etc/a.env: part of the image, it never changes; mount a directory to"
        " edit it",
    )
    (tmp_path / "a.env").write_text("A=1\n")
    alone = launched(tmp_path, "--env-file", "/config/a.env", mounted=str(tmp_path / "a.env"))
    assert alone.notices[1].startswith(f"engine mounts the single file {tmp_path}/a.env: after a save by rename")


def test_a_yaml_fault_has_line_and_column(tmp_path):
    """Enough to find it in an editor."""
    (tmp_path / "engine.yaml").write_text("model: a\nseed: [1\nport: 2\n")
    config = project.read_config(tmp_path / "engine.yaml")
    assert config.fault == f"{tmp_path}/engine.yaml, line 3 column 5: expected ',' or ']', but got ':'"


def test_what_a_service_uses_of_configs_is_part_of_it():
    """An inline config that changes is a change of the service that mounts it, and of no other."""

    def read(content: str) -> project.Snapshot:
        services = {"engine": {"configs": [{"source": "c"}]}, "sidecar": {}}
        return project.snapshot({"name": "t", "services": services, "configs": {"c": {"content": content}}})

    one, other = read("a"), read("b")
    assert one.services["engine"] != other.services["engine"]
    assert one.services["sidecar"] == other.services["sidecar"]


# --- sources


def test_every_file_that_takes_part_is_found(tmp_path):
    """Compose files, what they include and extend, environment and label files; through anchors, merges and tags."""
    (tmp_path / "compose.yaml").write_text(
        """
include:
  - plain.yaml
  - path: [in/one.yaml, in/two.yaml]
    env_file: in/.env
x-base: &base
  env_file: base.env
services:
  a:
    <<: *base
    command: !override ["x"]
  b:
    env_file: [one.env, {path: two.env, required: false}]
    label_file: labels.env
    extends: {file: more/base.yaml, service: x}
  c:
    <<: [*base]
    extends: {service: a}
"""
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.yaml").write_text("services: {x: {env_file: inner.env}}\n")
    (tmp_path / "plain.yaml").write_text("include: [compose.yaml, deep.yaml]\n")
    found = sources.find(Compose(tmp_path))
    relative = {str(path.relative_to(tmp_path)) for path in found.files}
    assert relative == {
        ".env", "plain.yaml", "deep.yaml", "in/one.yaml", "in/two.yaml", "in/.env", "base.env", "one.env", "two.env",
        "labels.env", "more/base.yaml", "more/inner.env", *sources.MAIN_FILES, *sources.OVERRIDE_FILES,
    }  # fmt: skip
    assert found.notices == ()


def test_given_files_replace_the_default_ones(tmp_path):
    """As for Compose."""
    given = Compose(tmp_path, (tmp_path / "a.yaml", tmp_path / "b.yaml"), (tmp_path / "x.env",))
    assert sources.find(given).files == {tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "x.env"}


def test_compose_file_in_the_environment_file_counts(tmp_path):
    """COMPOSE_FILE in .env, with quotes or without."""
    for text in ("COMPOSE_FILE=a.yaml:b.yaml\n", 'A=1\nexport COMPOSE_FILE="a.yaml:b.yaml"  # both\n'):
        (tmp_path / ".env").write_text(text)
        assert sources.find(Compose(tmp_path)).files == {tmp_path / name for name in (".env", "a.yaml", "b.yaml")}
        assert sources.default_files(Compose(tmp_path)) == (tmp_path / "a.yaml", tmp_path / "b.yaml")


def test_a_name_with_a_variable_is_said(tmp_path):
    """It cannot be watched; whoever edits it has to know."""
    (tmp_path / "compose.yaml").write_text("services: {a: {env_file: '${WHICH}.env'}}\n")
    assert sources.find(Compose(tmp_path)).notices == (
        f"{tmp_path}/compose.yaml: ${{WHICH}}.env is not watched, its name has a variable",
    )


@pytest.mark.parametrize("text", ["{", "- a\n- b\n", "services: [1]\n", "services: {a: 1, b: null}\n", "\x00"])
def test_a_broken_compose_file_is_still_watched(tmp_path, text):
    """It is the one that has to be edited next."""
    (tmp_path / "compose.yaml").write_text(text)
    assert tmp_path / "compose.yaml" in sources.find(Compose(tmp_path)).files


# --- Compose itself


@has_compose
def test_compose_reads_compose(directory):
    """The snapshot has what Compose resolves, and the values of the engine's config file."""
    snapshot = project.read(Compose(directory))
    assert snapshot.name == "test"
    engine = snapshot.services["engine"]
    assert engine.definition["environment"] == {"LEVEL": "one"}
    assert engine.config == project.ConfigFile(
        directory / "config" / "engine.yaml", {"model": "/model", "max-model-len": 2048}
    )
    assert snapshot.services["sidecar"].config is None
    assert snapshot.notices == ()


@has_compose
def test_only_the_environment_file_counts(directory, monkeypatch):
    """What the supervisor was started with does not reach the project, what `.env` has does."""
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", "other")
    snapshot = project.read(Compose(directory))
    assert (snapshot.name, snapshot.services["engine"].definition["command"][-1]) == ("test", "0")
    (directory / ".env").write_text("SEED=8\n")
    assert project.read(Compose(directory)).services["engine"].definition["command"][-1] == "8"


@has_compose
def test_comments_and_order_in_an_environment_file_change_nothing(directory):
    """Compose's own hash may differ; the values do not."""
    (directory / "engine.env").write_text("A=1\nB=2\n")
    before = project.read(Compose(directory))
    (directory / "engine.env").write_text("# mine\nB=2\nA='1'\n")
    assert project.read(Compose(directory)) == before


@has_compose
def test_an_override_replaces_the_command(directory):
    """The file of the overriding command is the one that is read."""
    (directory / "config" / "other.yaml").write_text("model: /other\n")
    (directory / "compose.override.yaml").write_text(
        "services: {engine: {command: !override ['serve', '--config', '/config/other.yaml']}}\n"
    )
    assert project.read(Compose(directory)).services["engine"].config.values == {"model": "/other"}


@has_compose
def test_a_variable_that_is_not_set_is_a_notice(directory):
    """Compose puts nothing in its place, in silence for whoever reads no standard error."""
    (directory / "compose.yaml").write_text(PROJECT.replace("${SEED:-0}", "$SEED"))
    assert project.read(Compose(directory)).notices == (
        'The "SEED" variable is not set. Defaulting to a blank string.',
    )


@has_compose
def test_the_other_spelling_is_read_and_warned_of(directory):
    """vLLM takes `--config=FILE` and ignores it."""
    (directory / "compose.yaml").write_text(PROJECT.replace("--config /", "--config=/"))
    snapshot = project.read(Compose(directory))
    assert snapshot.services["engine"].config.values["max-model-len"] == 2048
    assert snapshot.notices == (
        "engine: vLLM ignores `--config=/config/engine.yaml`; write two arguments, `--config /config/engine.yaml`",
    )


@has_compose
def test_a_mount_of_a_single_file_is_said(directory):
    """After a save by rename such an engine sees the old file."""
    (directory / "compose.yaml").write_text(
        PROJECT.replace('["./config:/config:ro"]', '["./config/engine.yaml:/config/engine.yaml:ro"]', 1)
    )
    assert project.read(Compose(directory)).notices == (
        f"engine mounts the single file {directory}/config/engine.yaml: after a save by rename it sees the old one"
        " until it is restarted; mount the directory",
    )


@has_compose
def test_a_broken_project_carries_what_compose_said(directory):
    """Command, exit code and both streams."""
    (directory / "compose.yaml").write_text("services: {engine: {image: 1\n")
    with pytest.raises(ComposeError) as caught:
        project.read(Compose(directory))
    error = caught.value
    assert error.command == ["docker", "compose", "--project-directory", str(directory), "config", "--format", "json"]
    assert (error.returncode, error.stdout) == (1, "")
    assert error.stderr
    assert error.stderr.splitlines()[-1].strip() in str(error)


def has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_compose_has_a_time_limit(directory, fake_docker, monkeypatch):
    """A program that hangs is ended with everything it started."""
    fake_docker(f"echo half; sleep 1000 & echo $! >{directory}/pid; wait")
    monkeypatch.setattr(compose, "CONFIG_SECONDS", 3.0)
    with pytest.raises(ComposeError, match="not done in 3 s") as caught:
        Compose(directory).config()
    assert (caught.value.returncode, caught.value.stdout) == (None, "half\n")
    child = Path("/proc", (directory / "pid").read_text().strip(), "stat")
    deadline = time.monotonic() + 10  # a killed process takes a moment to be gone
    while not has_ended(child):
        assert time.monotonic() < deadline, "the program's child is still running"
        time.sleep(0.01)


def test_compose_sees_a_clean_environment(directory, fake_docker, monkeypatch):
    """Three variables, not one more."""
    fake_docker(f"env >{directory}/env; echo '{{}}'")
    monkeypatch.setenv("DOCKER_HOST", "unix:///x.sock")
    monkeypatch.setenv("SECRET", "x")
    assert Compose(directory).config() == ({}, ())
    names = {line.split("=")[0] for line in (directory / "env").read_text().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "HOME", "DOCKER_HOST"}


def test_a_recreation_is_finished_before_the_end(directory, fake_docker):
    """Between the old container and the new one nobody lets go."""
    fake_docker(f"sleep 1; echo done >{directory}/done")
    stop = Stop()
    stop.set()
    Compose(directory).up("engine", stop)
    assert (directory / "done").read_text() == "done\n"


def test_a_recreation_that_does_not_end_is_left_in_time(directory, fake_docker, monkeypatch):
    """Docker would kill the supervisor after ten seconds anyway."""
    fake_docker("sleep 1000")
    monkeypatch.setattr(compose, "LEAVE_SECONDS", 0.5)
    stop = Stop()
    stop.set()
    with pytest.raises(ComposeError, match="not done when the supervisor had to end"):
        Compose(directory).up("engine", stop)


def test_recreating_names_one_service_and_builds_nothing(directory, fake_docker):
    """The words of the command, for those who want to repeat it."""
    fake_docker(f'echo "$*" >{directory}/words')
    given = Compose(directory, (directory / "a.yaml",), (directory / "x.env",), "mine")
    given.up("engine", Stop())
    assert (directory / "words").read_text() == (
        f"compose --project-directory {directory} --file {directory}/a.yaml --env-file {directory}/x.env"
        " --project-name mine up --detach --no-deps --no-build engine\n"
    )


def test_options_are_relative_to_the_project(tmp_path):
    """In a container the working directory says nothing."""
    assert named(tmp_path, (Path("a.yaml"), Path("/b.yaml")), (Path("x.env"),), None) == Compose(
        tmp_path, (tmp_path / "a.yaml", Path("/b.yaml")), (tmp_path / "x.env",)
    )
    with pytest.raises(ConfigError, match="no such directory"):
        named(tmp_path / "gone", (), (), None)


# --- where we run

CONTAINER = "4f" * 32
MOUNTINFO = f"""\
22 1 0:20 / / rw - overlay overlay rw
30 22 8:1 /srv/my\\040project /srv/my\\040project ro - ext4 /dev/sda1 rw
31 22 8:1 /srv/engine.yaml /config/engine.yaml ro - ext4 /dev/sda1 rw
32 22 8:1 /var/lib/docker/containers/{CONTAINER}/hostname /etc/hostname rw - ext4 /dev/sda1 rw
"""


def test_the_own_container_is_known_from_its_mounts():
    """A host name may be anything."""
    assert place.own_container(MOUNTINFO) == CONTAINER
    assert place.own_container("22 1 0:20 / / rw - overlay overlay rw\n") is None


def test_mount_points_are_read_as_paths():
    """Blanks are written as octal numbers."""
    assert place.mount_points(MOUNTINFO) == {
        Path("/"), Path("/srv/my project"), Path("/config/engine.yaml"), Path("/etc/hostname"),
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_file_that_is_a_mount_of_its_own_is_found(tmp_path):
    """A real bind mount, in a mount namespace of its own."""
    (tmp_path / "source.yaml").touch()
    (tmp_path / "engine.yaml").touch()
    (tmp_path / "plain.yaml").touch()
    script = (
        "import sys; from pathlib import Path; from weightkeeper.supervisor import place\n"
        "print(*place.single_mounts(map(Path, sys.argv[1:])))"
    )
    files = [str(tmp_path / name) for name in ("engine.yaml", "plain.yaml")]
    mount = f"mount --bind {tmp_path}/source.yaml {tmp_path}/engine.yaml"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-c", script, *files],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{tmp_path}/engine.yaml\n", "")


def bind(source: str, destination: str) -> dict[str, str]:
    return {"Type": "bind", "Source": source, "Destination": destination}


def test_one_path_on_both_sides_is_accepted():
    """The project itself, or a directory above it."""
    place.check_same_path(Path("/srv/p"), [bind("/srv/p", "/srv/p"), bind("/x", "/run/x")])
    place.check_same_path(Path("/srv/p"), [bind("/srv", "/srv")])


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ([], "/srv/p is not mounted here; add the volume /srv/p:/srv/p:ro"),
        (
            [bind("/srv", "/srv"), bind("/home/me/p", "/srv/p")],
            "/srv/p is /home/me/p on the host; Compose needs it at one path on both sides:"
            " mount /home/me/p:/home/me/p:ro and use --project-directory /home/me/p",
        ),
    ],
)
def test_another_path_outside_is_refused_with_the_mount_to_add(mounts, message):
    """Compose would make host directories out of our paths."""
    with pytest.raises(ConfigError) as caught:
        place.check_same_path(Path("/srv/p"), mounts)
    assert str(caught.value) == message


LABELS = {
    "com.docker.compose.project": "mine",
    "com.docker.compose.project.working_dir": "{}",
    "com.docker.compose.project.config_files": "{0}/compose.yaml,{0}/compose.gpu.yaml",
}


def test_files_and_name_that_were_given_by_hand_are_adopted(directory):
    """`docker compose -f a -f b -p mine up`: the supervisor reads the same project."""
    labels = {key: value.format(directory) for key, value in LABELS.items()}
    both = (directory / "compose.yaml", directory / "compose.gpu.yaml")
    assert place.adopted(Compose(directory), labels) == Compose(directory, both, (), "mine")
    told = Compose(directory, (directory / "c.yaml",), (), "told")
    assert place.adopted(told, labels) == told


def test_files_that_compose_finds_itself_are_left_to_it(directory):
    """A new override file takes part then."""
    labels = {key: value.format(directory) for key, value in LABELS.items()}
    labels["com.docker.compose.project.config_files"] = str(directory / "compose.yaml")
    assert place.adopted(Compose(directory), labels) == Compose(directory, (), (), "mine")


def test_another_project_s_labels_are_not_adopted(directory):
    """A supervisor may belong to one project and watch another."""
    labels = {key: value.format("/elsewhere") for key, value in LABELS.items()}
    assert place.adopted(Compose(directory), labels) == Compose(directory)


def test_the_supervisor_imports_neither_torch_nor_vllm_nor_the_keeper():
    """It runs in a small image, and stands beside the rest of the package."""
    script = (
        "import json, sys; import weightkeeper.commands.supervise, weightkeeper.commands.restart\n"
        "import weightkeeper.commands.history, weightkeeper.commands.plan; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"torch", "vllm", "numpy", "safetensors"} & set(loaded)
    ours = {name for name in loaded if name.startswith("weightkeeper.") and name.count(".") == 1}
    assert ours == {
        "weightkeeper.command_options", "weightkeeper.commands", "weightkeeper.engine_config", "weightkeeper.errors",
        "weightkeeper.harmless", "weightkeeper.launcher", "weightkeeper.layout", "weightkeeper.memory",
        "weightkeeper.metrics",
        "weightkeeper.options", "weightkeeper.protocol", "weightkeeper.quantities", "weightkeeper.sockets",
        "weightkeeper.supervisor",
    }  # fmt: skip
    # What a launcher says, and how it reads its environment files: values and a parser, nothing that runs.
    assert {name.removeprefix("weightkeeper.launcher.") for name in loaded if ".launcher." in name} == {
        "environment", "messages", "reading",
    }  # fmt: skip
