"""Files as git and editors of other systems leave them: a branch checked out, line ends changed."""

import shutil
from collections.abc import Iterator

import pytest
from stand import ENGINE, Stand, run, until

pytestmark = pytest.mark.docker

OVERRIDE = "services:\n  engine:\n    environment:\n      EXTRA: {extra}\n"
RECREATED = "engine healthy S after recreate"


@pytest.fixture
def repository(prepared: Stand) -> Iterator[Stand]:
    """A supervised project in a repository with a second branch, in which each of its four files is another."""
    if shutil.which("git") is None:
        pytest.skip("there is no git on this machine")
    override = prepared.directory / "compose.override.yaml"
    override.write_text(OVERRIDE.format(extra="one"))
    git(prepared, "init", "--quiet", "--initial-branch", "main")
    commit(prepared, "first")
    git(prepared, "checkout", "--quiet", "-b", "other")
    prepared.engine_yaml.write_text(ENGINE.replace("2048", "1024"))
    prepared.compose_yaml.write_text(prepared.compose_yaml.read_text().replace("-one", "-two"))
    (prepared.directory / "engine.env").write_text("A=1\nB=3\n")
    override.write_text(OVERRIDE.format(extra="two"))
    commit(prepared, "second")
    git(prepared, "checkout", "--quiet", "main")
    prepared.up()
    prepared.supervise()
    before = prepared.start_of("sidecar"), prepared.start_of("unlabelled")
    yield prepared
    assert (prepared.start_of("sidecar"), prepared.start_of("unlabelled")) == before


def git(stand: Stand, *arguments: str) -> str:
    return run("git", "-C", stand.directory, "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments)


def commit(stand: Stand, message: str) -> None:
    git(stand, "add", "--all")
    git(stand, "-c", "commit.gpgsign=false", "commit", "--quiet", "--message", message)


def values(stand: Stand) -> tuple[str, set[str]]:
    """What the running engine has from the four files."""
    names = ("LEVEL", "B", "EXTRA")
    environment = {one for one in stand.inspect()["Config"]["Env"] if one.partition("=")[0] in names}
    return stand.options()["max-model-len"], environment


def test_a_checkout_of_four_files_is_one_recreation_and_so_is_the_way_back(repository):
    """compose.yaml, its override, engine.env and engine.yaml: one plan, one other container, on record."""
    assert len(git(repository, "diff", "--name-only", "main", "other").split()) == 4
    before = repository.start_of()
    git(repository, "checkout", "--quiet", "other")
    there = "recreate engine: environment B EXTRA LEVEL; engine.yaml max-model-len 2048 → 1024"
    until(lambda: repository.messages()[-1:] == [RECREATED], lambda: repository.log.read_text())
    middle = repository.start_of()
    assert middle[0] != before[0]
    assert values(repository) == ("1024", {"LEVEL=two", "B=3", "EXTRA=two"})
    git(repository, "checkout", "--quiet", "main")
    back = "recreate engine: environment B EXTRA LEVEL; engine.yaml max-model-len 1024 → 2048"
    repository.only(there, RECREATED, back, RECREATED)
    after = repository.start_of()
    assert values(repository) == ("2048", {"LEVEL=one", "B=2", "EXTRA=one"})
    assert [(one["action"], one["result"], one["before"], one["after"]) for one in repository.history()] == [
        ("recreate", "healthy", before[0], middle[0]),
        ("recreate", "healthy", middle[0], after[0]),
    ]


def test_a_checkout_that_leaves_the_files_as_they_were_is_nothing(repository):
    """To the other branch and back before anything comes to rest: no action, the same container and server."""
    before, generation = repository.start_of(), repository.engine()["generation"]
    git(repository, "checkout", "--quiet", "other")
    git(repository, "checkout", "--quiet", "main")
    repository.only()
    assert (repository.start_of(), repository.engine()["generation"]) == (before, generation)
    assert repository.history() == []


def test_line_ends_of_another_system_are_nothing(repository):
    """LF to CRLF in all four files, and back: said once each way; the same container and server."""
    before, generation = repository.start_of(), repository.engine()["generation"]
    files = [repository.directory / name for name in git(repository, "diff", "--name-only", "main", "other").split()]
    texts = {file: file.read_bytes() for file in files}
    nothing = "nothing to do: compose.override.yaml, compose.yaml, engine.env, engine.yaml changed, no value did"
    for count, end in ((1, b"\r\n"), (2, b"\n")):
        for file, text in texts.items():
            file.write_bytes(text.replace(b"\n", end))
        until(lambda count=count: repository.messages() == [nothing] * count, lambda: repository.log.read_text())
    assert (repository.start_of(), repository.engine()["generation"]) == (before, generation)
    assert repository.history() == []


def test_comments_and_order_in_all_files_are_nothing(repository):
    """The same values in another order, with comments: said once; the same container and server."""
    before, generation = repository.start_of(), repository.engine()["generation"]
    repository.engine_yaml.write_text("max-model-len: 2048  # tokens\n\n'model': \"/model\"\n")
    (repository.directory / "engine.env").write_text("# both\nB=2\nA=1\n")
    head, _, services = (
        repository.compose_yaml.read_text().partition("volumes:\n  sockets:\n")[0].partition("services:")
    )
    repository.compose_yaml.write_text(f"# shared\nvolumes:\n  sockets:  # here\n{head}services:  # three{services}")
    override = repository.directory / "compose.override.yaml"
    override.write_text("# mine\nservices: {engine: {environment: [EXTRA=one]}}\n")
    nothing = "nothing to do: compose.override.yaml, compose.yaml, engine.env, engine.yaml changed, no value did"
    repository.only(nothing)
    assert (repository.start_of(), repository.engine()["generation"]) == (before, generation)
    assert repository.history() == []
