"""The page of a result: whole without a network, with plots that show something, in a real browser."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from recovery_runs import ENVIRONMENT

from weightkeeper.cli import program
from weightkeeper.errors import ConfigError
from weightkeeper.recovery import plots, report, result
from weightkeeper.recovery.check import Pause, Verdict
from weightkeeper.recovery.result import FORMAT, Level, Memory, Moment, Run, Sample, Scenario, Skipped
from weightkeeper.recovery.subject import Gpu, Machine, Subject
from weightkeeper.recovery.summary import Result, join

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAYS = {"disk": (30.0, "plain disk start"), "mapped": (12.0, "mapped start"), "reload": (1.5, "reload by the launcher")}
PLOTS = ("samples", "phases", "timeline", "memory", "throughput")


def verdict(seconds: float) -> Verdict:
    return Verdict(
        True, (), 12, 12, (), 12, (), (), 14, 0, 2, {"nobody there": 2}, Pause(-0.2, seconds, 4), 0.3
    )  # fmt: skip


def sample(name: str, number: int, seconds: float) -> Sample:
    moments = [Moment(at, kind, step, 7) for at, kind, step in (
        (-1.0, "started", -1), (-0.2, "answered", 3), (0.1, "failed", 4), (seconds, "answered", 4),
        (seconds + 0.3, "answered", 5), (seconds + 0.4, "finished", -1),
    )]  # fmt: skip
    return Sample(
        name, number, number, "right", "", 0.5, seconds - 0.4, seconds, seconds,
        {"old engine gone": 0.5, "weights there": seconds / 2, "answered": seconds / 2 - 0.5}, {"reading": 1.0},
        Memory("device", 14_000_000_000, 20_000_000_000, 34_000_000_000,
               (Level(0.0, 34_000_000_000), Level(1.0, 14_000_000_000), Level(seconds, 34_000_000_000))),
        verdict(seconds + 0.2), tuple(moments),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Run:
    """Three scenarios, three rounds, a sample that is wrong, one that failed, one scenario that was not measured."""
    samples = [sample(name, number, seconds + number) for number in (1, 2, 3) for name, (seconds, _) in WAYS.items()]
    samples += [Sample("mapped", 4, 10, "failed", "no <answer> & more"), Sample("reload", 4, 11, "wrong", right_s=2.0)]
    held = result.Held("weightkeeper", 9.0, 1, 16_000_000, (), 14_000_000_000, 14_003_000_000, 15_000_000_000)
    load = result.Throughput(8, 900.0, 1000.0, 60.0, 60.0, tuple(range(120)))
    scenarios = tuple(
        Scenario(name, title, "described", True, held if name == "mapped" else None, load if name != "reload" else None)
        for name, (_, title) in WAYS.items()
    )
    gpu = Gpu("a GPU", "GPU-1", 1 << 37)
    machine = Machine(
        "a processor", 16, 1 << 37, "6.1", "3.12", {"vllm": "0.30"}, (gpu,), "570", 1_200_000_000.0, 9_000_000_000.0
    )
    subject = Subject("a-model", 14_400_000_000, {"max-model-len": 2048}, 12, 32)
    skipped = Skipped("ipc_cache", "vLLM's ipc_cache", "needs <0.30>")
    return Run(
        FORMAT, "part1", ("weightkeeper", "recovery", "run"), "2030-01-02T03:04:05Z", 600.0, "whole", 4, 0, "disk",
        machine, subject, scenarios, (skipped,), tuple(samples), verdict(0.5), result.Control(True, verdict(1.0)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def joined(run: Run) -> Result:
    return join([run])


@pytest.fixture(scope="module")
def file(joined: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "recovery.html"
    report.write(path, report.page(joined))
    return path


def test_the_page_says_first_what_matters(file):
    """How long the work stood still, with what it is compared to, and whether the check itself was checked."""
    text = file.read_text()
    assert ("An agent whose engine was lost went on after 3.70 s (reload by the launcher) instead of 32.20 s (disk), "
            "8.7 times shorter; medians of 3 interruption(s).") in text  # fmt: skip
    assert 'class="good">was caught</span>' in text


def test_the_page_tells_everything(file):
    """Every scenario, what was not measured, what went wrong, the command; text of others is escaped."""
    text = file.read_text()
    for name, (_, _) in WAYS.items():
        assert f"<td>{name}</td>" in text
    assert "needs &lt;0.30&gt;" in text and "no &lt;answer&gt; &amp; more" in text
    assert "<code>weightkeeper recovery run</code>" in text
    assert "<code>max-model-len: 2048</code>" in text
    assert "14.4 GB of weights; read at 1.2 GB a second from the disk, 9.0 GB a second from the page cache" in re.sub(
        r"\s+", " ", text
    )
    assert "<td>3 of 4</td>" in text


def test_the_page_needs_nothing_from_outside(file):
    """No address in it is fetched, and there is no script; page and JSON are small."""
    text = file.read_text()
    fetched = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"|@import|<script', text)
    assert fetched == []
    assert file.stat().st_size < 400_000


def test_the_same_result_gives_the_same_page(joined, file):
    """So that a page in a repository changes only with its numbers."""
    assert report.page(joined) == file.read_text()


def test_ids_are_unique(file):
    """Several plots in one page do not take each other's clip paths and markers."""
    ids = re.findall(r'\bid="([^"]+)"', file.read_text())
    assert len(ids) == len(set(ids)) > 100
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', file.read_text()))
    assert used <= set(ids)


def test_a_result_without_samples_has_a_page(run):
    """An interrupted run can be looked at, too."""
    page = report.page(join([msgspec.structs.replace(run, samples=(), scenarios=(), reference=None, control=None)]))
    assert "Not enough samples came out right to compare anything." in page
    assert page.count("<figure>") == 0


def test_the_headline_counts_both_medians(run):
    """A part more has more samples of the baseline alone."""
    disk = tuple(one for one in run.samples if one.scenario == "disk")
    more = msgspec.structs.replace(run, id="part2", samples=disk)
    assert report.headline(join([run, more])).endswith("medians of 3 and 6 interruption(s).")


def test_a_page_takes_no_run_s_place(run, tmp_path):
    """Whatever is said with -o, what was measured stays."""
    file = tmp_path / "run.json"
    result.write(file, run)
    link = tmp_path / "page.html"
    link.symlink_to(file)
    before = file.read_bytes()
    for target, text in (
        (file, "is the name of a run"), (link, "is the name of a run"), (tmp_path, "is a directory"),
        (tmp_path / "none" / "page.html", "its directory is not there"), (Path("/proc/page.html"), "/proc/page.html: "),
    ):  # fmt: skip
        done = CliRunner().invoke(program, ["recovery", "report", str(file), "-o", str(target)])
        assert isinstance(done.exception, ConfigError) and text in str(done.exception)
    assert file.read_bytes() == before


def test_scenarios_are_in_order(joined):
    """The baseline on top, and then the slowest first; the sample that is shown is the middle one."""
    assert plots.measured(joined) == ["disk", "mapped", "reload"]
    assert plots.typical(joined, "mapped").right_s == 14.0


def test_the_command_makes_a_page_of_parts(run, tmp_path):
    """From several files; the table is printed as well."""
    parts = []
    for name in ("one", "two"):
        parts.append(tmp_path / f"{name}.json")
        result.write(parts[-1], msgspec.structs.replace(run, id=name))
    page = tmp_path / "page.html"
    command = [sys.executable, "-W", "error", "-m", "weightkeeper.cli", "recovery", "report", *map(str, parts)]
    done = subprocess.run([*command, "-o", str(page)], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| disk     | 6 of 6 |" in done.stdout
    assert "part two" in page.read_text()


@pytest.mark.skipif(not CHROMIUM and not os.environ.get("CI"), reason="there is no Chromium here")
def test_a_browser_shows_the_page(file):
    """In headless Chromium, without a network: no error in its console, and each plot has marks of some size."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_context(offline=True).new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(request.url))
        page.goto(file.as_uri())
        drawn = page.evaluate(DRAWN)
        fits = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=file.with_suffix(".png"), full_page=True)
        browser.close()
    assert said == []
    assert drawn.keys() == set(PLOTS)
    for name, (width, height, marks, texts) in drawn.items():
        assert width > 600 and height > 150, name
        assert marks > 5 and texts > 5, name
    assert fits


DRAWN = """() => Object.fromEntries([...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const seen = element => { const b = element.getBoundingClientRect(); return b.width + b.height > 2; };
  const marks = [...svg.querySelectorAll('path, use')].filter(seen).length;
  const texts = [...svg.querySelectorAll('text')].filter(seen).length;
  return [svg.getAttribute('aria-label'), [box.width, box.height, marks, texts]];
}))"""
