"""The agent under test and the check on its work."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from recovery_runs import ENVIRONMENT, ForkedAgent, Standin, standin

from weightkeeper.cli import program
from weightkeeper.commands.recovery_options import disk_faults
from weightkeeper.errors import AnswerCutError, ConfigError, LedgerError, NoAnswerError
from weightkeeper.recovery import agent
from weightkeeper.recovery.answers import Answer, checked
from weightkeeper.recovery.asking import Client
from weightkeeper.recovery.check import Verdict, check, pauses_of
from weightkeeper.recovery.ledger import Ledger
from weightkeeper.recovery.state import Event, Job, State, alone

STEPS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with standin(tmp_path_factory.mktemp("standin"), token=0.001) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: Standin, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job, done without an interruption."""
    settings = settings_of(server, tmp_path_factory.mktemp("reference"))
    agent.run(settings)
    return job_of(settings)


def settings_of(server: Standin, directory: Path, **more) -> agent.Settings:
    return agent.Settings(directory, server.url, "local", **({"steps": STEPS, "tokens": 8, "patience_s": 20} | more))


def job_of(settings: agent.Settings) -> Job:
    state = State(settings.directory / agent.STATE_FILE)
    job = state.job(settings.job)
    state.close()
    return job


def verdict_of(settings: agent.Settings, reference: Job) -> Verdict:
    ledger = Ledger(settings.directory / agent.LEDGER_FILE)
    verdict = check(job_of(settings), ledger.effects(settings.job), reference)
    ledger.close()
    return verdict


def test_an_uninterrupted_job_passes(server, reference, tmp_path):
    """Two runs of one job are equal, with one side effect a step and one try each."""
    settings = settings_of(server, tmp_path)
    agent.run(settings)
    verdict = verdict_of(settings, reference)
    assert verdict.passed and verdict.faults == ()
    assert (verdict.steps, verdict.length, verdict.effects, verdict.tries) == (STEPS, STEPS, STEPS, STEPS)
    assert (verdict.cut, verdict.failed, verdict.errors) == (0, 0, {})
    assert 0 < verdict.usual <= verdict.longest.seconds


def test_a_finished_job_is_not_done_again(server, reference, tmp_path):
    """A second start asks nothing and has no effect."""
    settings = settings_of(server, tmp_path)
    agent.run(settings)
    before = len(server.asked())
    agent.run(settings)
    assert len(server.asked()) == before
    assert verdict_of(settings, reference).passed
    assert [event.kind for event in job_of(settings).events[-2:]] == ["resumed", "finished"]


def test_every_question_depends_on_all_answers_before(reference):
    """Another, a missing or a repeated answer makes the next question another one."""
    answers = [step.answer for step in reference.steps]
    asked = {agent.question("inventory", 4, given) for given in (
        answers[:4], answers[1:4], [*answers[:3], answers[2]], [Answer("x", (), "stop"), *answers[1:4]],
    )}  # fmt: skip
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        ("abort", "cut", "finish_reason is abort, after 4 of 8 tokens"),
        ("short", "cut", "4 of 8 tokens, and no stop"),
        ("cut", "cut", None),
        ("torn", None, None),
        ("500", "failed", "answered 500"),
        ("hang", "failed", "Timeout"),
    ],
)
@pytest.mark.parametrize("number", [0, 1], ids=["whole", "stream"])
def test_what_is_no_result_is_asked_again(server, reference, tmp_path, trouble, kind, text, number):
    """Cut answers and failures of any form, whole and streamed, cost a try and change nothing."""
    server.trouble(*[""] * number, trouble)
    settings = settings_of(server, tmp_path, timeout_s=0.3)
    agent.run(settings)
    verdict = verdict_of(settings, reference)
    assert verdict.passed, verdict.faults
    assert verdict.tries == STEPS + 1
    (event,) = [event for event in job_of(settings).events if event.kind in ("cut", "failed")]
    assert event.step == number
    assert kind is None or event.kind == kind
    assert text is None or text in event.detail


def test_what_the_server_will_never_answer_ends_the_agent(server, tmp_path):
    """A model that is not there is no reason to ask again."""
    server.trouble("404")
    with pytest.raises(ConfigError, match=r"answered 404: .*is 'local' a model of this server\?"):
        agent.run(settings_of(server, tmp_path))


def test_patience_has_an_end(tmp_path):
    """Where nobody answers, the agent ends with the cause; what is done stays."""
    settings = agent.Settings(tmp_path, "http://127.0.0.1:9/v1", "local", patience_s=0.2)
    with pytest.raises(NoAnswerError, match=r"http://127\.0\.0\.1:9/v1: ConnectError"):
        agent.run(settings)
    (step,) = job_of(settings).steps
    assert step.tries >= 2 and step.answer is None and not step.effected


def test_an_answer_is_told_from_half_of_one():
    """By its end, its length and its token ids."""
    assert checked("a", [1, 2], "length", 2, 2) == Answer("a", (1, 2), "length")
    assert checked("a", [], "stop", 1, 2).finish_reason == "stop"
    for reason, ids, count in (("abort", [1, 2], 2), (None, [1, 2], 2), ("length", [1], 1), ("error", [], 2),
                               ("stop", [1], 2)):  # fmt: skip
        with pytest.raises(AnswerCutError):
            checked("a", ids, reason, count, 2)


def test_a_job_goes_on_with_the_numbers_it_was_begun_with(server, tmp_path):
    """Other steps or tokens are refused, by name."""
    agent.run(settings_of(server, tmp_path))
    with pytest.raises(ConfigError, match="the job inventory was begun with 8 steps of 8 tokens, not 9 of 8"):
        agent.run(settings_of(server, tmp_path, steps=9))


def test_a_directory_that_cannot_be_used_is_named(server, tmp_path):
    """A file in its place, and files that are no databases: an error with the remedy, and nothing is asked."""
    (tmp_path / "file").touch()
    for name in (agent.STATE_FILE, agent.LEDGER_FILE):
        directory = tmp_path / f"with {name}"
        directory.mkdir()
        (directory / name).write_bytes(b"no database" * 1000)
    asked = len(server.asked())
    for directory, text in (
        (tmp_path / "file", "file: File exists; what is done so far is kept"),
        (tmp_path / f"with {agent.STATE_FILE}", f"{agent.STATE_FILE}: file is not a database; give a directory that"),
        (tmp_path / f"with {agent.LEDGER_FILE}", f"{agent.LEDGER_FILE}: file is not a database; give a directory that"),
    ):
        command = ["recovery", "agent", "--directory", str(directory), "--url", server.url, "--model", "local"]
        done = CliRunner().invoke(program, command)
        assert isinstance(done.exception, ConfigError) and text in str(done.exception)
    assert len(server.asked()) == asked


def test_a_refused_signal_is_no_fault_of_a_disk(tmp_path):
    """Only what names a file, or can be of a disk alone, is told as one."""
    with pytest.raises(PermissionError), disk_faults(tmp_path):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    for error in (PermissionError(errno.EPERM, "no", "a file"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        with pytest.raises(ConfigError, match="make room, or give another place"), disk_faults(tmp_path):
            raise error


def test_two_agents_never_work_on_one_job(server, tmp_path):
    """The second one is refused while the first one lives."""
    with alone(tmp_path / agent.STATE_FILE), pytest.raises(ConfigError, match="another agent works on it"):
        agent.run(settings_of(server, tmp_path))


def test_the_ledger_has_each_effect_once(tmp_path):
    """A key has one effect; without a key there is one for each call; a key of another effect is refused."""
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.record("job", 0, "note", "k") is True
    assert ledger.record("job", 0, "note", "k") is False
    with pytest.raises(LedgerError, match="the key k belongs to step 0 of job"):
        ledger.record("job", 1, "note", "k")
    ledger.record("job", 1, "note", None)
    ledger.record("job", 1, "note", None)
    assert [(effect.key, effect.step) for effect in ledger.effects("job")] == [("k", 0), (None, 1), (None, 1)]
    assert ledger.repeats() == 1
    ledger.close()


def die_after(owner: type, method: str, number: int) -> None:
    """SIGKILL this process at the end of the n-th call of a method."""
    plain, left = getattr(owner, method), [number]

    def dying(self, *args, **named):
        result = plain(self, *args, **named)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, dying)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(State, "begin"), (State, "step"), (State, "asked"), (Client, "ask"), (State, "answered"), (Ledger, "record"),
     (State, "effected"), (State, "finish")],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_an_agent_that_dies_behind_any_of_its_steps_goes_on(server, reference, tmp_path, owner, method):
    """After each commit and each call outside, each agent gets one of them further than the one before it."""
    settings = settings_of(server, tmp_path)
    number = 1 if method in ("begin", "finish") else 3
    assert ForkedAgent(settings, before=lambda: die_after(owner, method, number)).wait() == -signal.SIGKILL
    assert ForkedAgent(settings).wait() == 0
    verdict = verdict_of(settings, reference)
    assert verdict.passed, verdict.faults
    repeats = [event.kind for event in job_of(settings).events].count("repeat")
    assert repeats == (1 if owner is Ledger else 0)


def test_an_agent_killed_at_random_moments_finishes_its_job(server, reference, tmp_path):
    """`kill -9` twelve times, at moments that are drawn; nothing is lost and nothing had twice."""
    draw = random.Random(5)
    settings = settings_of(server, tmp_path)
    for _ in range(12):
        running = ForkedAgent(settings)
        time.sleep(draw.uniform(0.0, 0.12))
        running.kill()
    assert ForkedAgent(settings).wait() == 0
    verdict = verdict_of(settings, reference)
    assert verdict.passed, verdict.faults
    assert len({event.pid for event in job_of(settings).events}) > 3


def test_a_lost_server_is_a_pause_and_nothing_else(reference, tmp_path):
    """The server is killed while it answers, and comes back: the job is whole, the pause is told."""
    with standin(tmp_path / "server", token=0.01, start=0.5) as server:
        settings = settings_of(server, tmp_path / "agent")
        running = ForkedAgent(settings)
        while not len(server.asked()) >= 4:
            time.sleep(0.002)
        killed = time.monotonic()
        server.kill()
        server.start()
        back = time.monotonic()
        assert running.wait() == 0
    verdict = verdict_of(settings, reference)
    assert verdict.passed, verdict.faults
    assert verdict.failed >= 1 and sum(verdict.errors.values()) == verdict.failed
    assert verdict.longest.start < killed and verdict.longest.start + verdict.longest.seconds > back
    assert verdict.longest.seconds >= back - killed > verdict.usual


def test_a_wrong_agent_passes_as_long_as_nothing_happens(server, reference, tmp_path):
    """What finds it in the next tests is the interruption."""
    settings = settings_of(server, tmp_path)
    assert ForkedAgent(settings, wrong=True).wait() == 0
    assert verdict_of(settings, reference).passed


def test_a_wrong_agent_that_is_killed_is_caught(server, reference, tmp_path):
    """It begins again, and the world has its effects twice."""
    settings = settings_of(server, tmp_path)
    running = ForkedAgent(settings, wrong=True)
    ledger = wait_for_effects(tmp_path, 3)
    running.kill()
    assert ForkedAgent(settings, wrong=True).wait() == 0
    done = list(ledger.effects("inventory"))
    ledger.close()
    verdict = verdict_of(settings, reference)
    assert not verdict.passed
    assert set(verdict.repeated) >= {0, 1, 2} and len(done) == verdict.effects > STEPS
    assert verdict.faults[0].startswith("the side effects of steps 1, 2, 3")


def test_a_wrong_agent_takes_half_an_answer_for_a_whole_one(server, reference, tmp_path):
    """The answer that was cut short and all that follow are not those of the uninterrupted job."""
    server.trouble("", "", "abort")
    settings = settings_of(server, tmp_path)
    assert ForkedAgent(settings, wrong=True).wait() == 0
    verdict = verdict_of(settings, reference)
    assert not verdict.passed
    assert verdict.different == tuple(range(2, STEPS))
    assert "the answers of steps 3, 4, 5, 6, 7, 8 are not those of the uninterrupted job" in verdict.faults


def wait_for_effects(directory: Path, count: int) -> Ledger:
    deadline = time.monotonic() + 60
    while not (directory / agent.LEDGER_FILE).exists():
        assert time.monotonic() < deadline
    ledger = Ledger(directory / agent.LEDGER_FILE)
    while len(list(ledger.effects("inventory"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ledger


def test_the_check_names_everything_that_is_wrong(reference):
    """A job that was never begun, and one with a lost step."""
    verdict = check(None, [], reference)
    assert verdict.faults == (
        "the job is not finished", "0 of 8 steps have an answer",
        "the side effects of steps 1, 2, 3, 4, 5, 6, 7, 8 were never had",
    )  # fmt: skip
    verdict = check(Job("inventory", STEPS, reference.steps[1:], reference.events, True), [], reference)
    assert "7 of 8 steps have an answer" in verdict.faults


def test_a_longer_job_is_a_reference_for_a_shorter_one(server, reference, tmp_path):
    """They begin alike, and only the shorter one's steps count."""
    settings = settings_of(server, tmp_path, steps=3)
    agent.run(settings)
    verdict = verdict_of(settings, reference)
    assert verdict.passed and (verdict.steps, verdict.length) == (3, 3)


def test_pauses_lie_between_answers():
    """The first one counts from the beginning, whatever lies between."""
    events = [
        Event(1.0, 1, -1, "started"), Event(1.5, 1, 0, "asked"), Event(2.0, 1, 0, "answered"),
        Event(3.0, 1, 1, "failed"), Event(9.0, 2, -1, "resumed"), Event(9.5, 2, 1, "answered"),
    ]  # fmt: skip
    assert [(pause.start, pause.seconds, pause.step) for pause in pauses_of(events)] == [(1.0, 1.0, 0), (2.0, 7.5, 1)]


def test_the_command_does_a_job(server, reference, tmp_path):
    """As a program, from its own process."""
    command = [sys.executable, "-m", "weightkeeper.cli", "recovery", "agent", "--directory", str(tmp_path)]
    command += ["--url", server.url, "--model", "local", "--steps", str(STEPS), "--tokens", "8"]
    subprocess.run(command, env=ENVIRONMENT, check=True, timeout=60)
    assert verdict_of(replace(settings_of(server, tmp_path)), reference).passed
