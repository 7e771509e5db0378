"""What a run is as data, and the numbers made of it."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from weightkeeper.cli import program
from weightkeeper.errors import ConfigError
from weightkeeper.recovery import comparing, result, table
from weightkeeper.recovery.check import Pause, Verdict
from weightkeeper.recovery.levels import Levels, thinned
from weightkeeper.recovery.result import FORMAT, Machine, Run, Sample, Scenario, Skipped, Subject
from weightkeeper.recovery.summary import MEASURES, Summary, join, ratio, summary

RIGHT = MEASURES["first right completion"]


def verdict(seconds: float = 1.0, passed: bool = True) -> Verdict:
    return Verdict(passed, () if passed else ("lost",), 3, 3, (), 3, (), (), 3, 0, 0, {}, Pause(-0.1, seconds, 1), 0.1)


def sample(scenario: str, number: int, right_s: float, outcome: str = "right") -> Sample:
    return Sample(
        scenario, number, 1, outcome, gone_s=0.1, health_s=right_s - 0.1, first_s=right_s, right_s=right_s,
        agent=verdict(right_s + 0.5),
    )  # fmt: skip


def run(name: str, *samples: Sample, machine: str = "a processor", **more) -> Run:
    scenarios = dict.fromkeys(one.scenario for one in samples)
    return Run(**{
        "format": FORMAT, "id": name, "command": ("weightkeeper",), "started": "2030-01-02T03:04:05Z", "seconds": 60.0,
        "ended": "whole", "rounds": 2, "seed": 0, "baseline": "disk",
        "machine": Machine(machine, 2, 1 << 34, "6.1", "3.11", {"vllm": "0.32"}),
        "subject": Subject("tiny", 1000, {"max-model-len": 64}, 3, 8),
        "scenarios": tuple(Scenario(each, each, "described") for each in scenarios), "samples": samples,
    } | more)  # fmt: skip


def test_least_median_and_most():
    """Of what was measured; nothing where nothing was."""
    assert summary([3.0, None, 1.0, 2.0]) == Summary(3, 1.0, 2.0, 3.0)
    assert summary([1.0, 2.0]) == Summary(2, 1.0, 1.5, 2.0)
    assert summary([None]) is None


def test_ratios_are_taken_pair_by_pair():
    """Within one round of one part, and only where both came out right."""
    taken = (("disk", 1, 30.0), ("mapped", 1, 10.0), ("disk", 2, 40.0), ("mapped", 2, 8.0), ("disk", 3, 50.0))
    one = run("1", *(sample(*each) for each in taken), sample("mapped", 3, 1.0, "wrong"))
    other = run("2", sample("disk", 1, 60.0), sample("mapped", 1, 10.0))
    joined = join([one, other])
    assert ratio(joined.samples, "mapped", "disk", RIGHT) == Summary(3, 3.0, 5.0, 6.0)
    assert joined.held("mapped", RIGHT) == Summary(3, 8.0, 10.0, 10.0)
    assert ratio(joined.samples, "disk", "disk", RIGHT) == Summary(4, 1.0, 1.0, 1.0)
    assert ratio(joined.samples, "copy", "disk", RIGHT) is None
    assert joined.is_passed is False


def test_parts_become_one_result():
    """What one part has skipped and another one measured is measured; the baseline comes first."""
    skipped = (Skipped("mapped", "mapped", "was not asked for"), Skipped("copy", "copy", "no GPU"))
    one = run("1", sample("reload", 1, 2.0), sample("disk", 1, 30.0), skipped=skipped)
    joined = join([one, run("2", sample("mapped", 1, 10.0), sample("disk", 1, 30.0))])
    assert [each.name for each in joined.scenarios] == ["disk", "reload", "mapped"]
    assert [each.name for each in joined.skipped] == ["copy"]
    assert joined.is_passed


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (run("2", machine="another processor"), "machine processor is a processor and another processor"),
        (run("2", subject=Subject("tiny", 1000, {"max-model-len": 65}, 3, 8)), "subject options is "),
        (run("2", baseline="ipc_cache"), "the baseline is disk and ipc_cache"),
    ],
    ids=["machine", "options", "baseline"],
)
def test_what_is_no_part_of_it_is_refused(other, text):
    """Another machine, other options; the message says what differs, and what to use."""
    with pytest.raises(ConfigError, match=f"{text}.*; `weightkeeper recovery compare`"):
        join([run("1"), other])


def test_the_same_run_counts_once():
    """Given twice, it would look like more samples than there are."""
    with pytest.raises(ConfigError, match="the same run was given twice"):
        join([run("1"), run("1")])


def test_a_run_outlives_its_file(tmp_path):
    """Written and read again it is the same; the file is replaced as a whole."""
    file = tmp_path / "run.json"
    before = run("1", sample("disk", 1, 30.0))
    result.write(file, run("0"))
    result.write(file, before)
    assert result.read(file) == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "truncated"), (b"{}", "missing required field `format`"), (b'{"format": "other"}', "Invalid enum value"),
        (None, "No such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_run_is_refused(tmp_path, content, text):
    """By name, with what to give instead."""
    file = tmp_path / "run.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.json: .*{text}.*; give the JSON of `weightkeeper recovery run`"):
        result.read(file)


def test_the_schema_describes_every_field():
    """Each struct has its description, and a written run has no field that the schema does not name."""
    schema = result.schema()
    named = schema["$defs"]
    assert all(each["description"] for each in named.values())
    written = json.loads(msgspec.json.encode(run("1", sample("disk", 1, 30.0))))
    assert written.keys() == named["Run"]["properties"].keys()
    assert written["samples"][0].keys() == named["Sample"]["properties"].keys()
    for name in written["samples"][0]:
        if name not in ("scenario", "round", "outcome", "memory", "message"):
            assert f"{name}" in named["Sample"]["description"], name


def test_the_table_tells_everything():
    """Every scenario, what was skipped and why, and a control that failed."""
    joined = join([run("1", sample("disk", 1, 30.0), sample("mapped", 1, 10.0),
                       skipped=(Skipped("copy", "copy", "no GPU"),),
                       control=result.Control(False, verdict()))])  # fmt: skip
    text = "\n".join(table.lines(joined))
    assert "| mapped   | 1 of 1 | 0.10 / 0.10 / 0.10 | 9.90 / 9.90 / 9.90" in text
    assert "3.00× / 3.00× / 3.00×" in text
    assert "- copy: no GPU" in text
    assert "The deliberately wrong agent was NOT CAUGHT" in text
    assert joined.is_passed is False


def test_two_results_are_compared():
    """What differs between their machines and settings, and their medians with the ratio."""
    one = join([run("1", sample("disk", 1, 30.0), sample("mapped", 1, 10.0))])
    other = join([run("2", sample("disk", 1, 15.0), machine="another processor")])
    lines = list(comparing.lines(one, other))
    assert "- processor: a processor / another processor" in lines
    assert not any("max-model-len" in line for line in lines)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[1] == ["disk", "29.90 / 14.90 / 0.50", "30.00 / 15.00 / 0.50", "30.50 / 15.50 / 0.51"]
    assert rows[2][2] == "10.00 / – / –"


def test_levels_are_thinned_out_and_keep_their_peak():
    """At most so many, with the first and the highest among them."""
    found = [(float(at), 5) for at in range(1000)]
    found[777] = (777.0, 9)
    kept = thinned(found, 60)
    assert len(kept) <= 60 and kept[0] == (0.0, 5) and (777.0, 9) in kept
    assert thinned(found[:3], 60) == found[:3]


def test_levels_are_looked_at_until_the_end():
    """From the first moment on, with their time from the interruption."""
    values = iter(range(1, 10**6))
    levels = Levels(lambda: next(values), 0.001)
    while levels.peak < 5:
        pass
    levels.end()
    last = levels.peak
    assert levels.peak == last
    assert levels.since(0.0)[0].nbytes == 1


def test_the_command_prints_the_schema(tmp_path: Path):
    """As JSON, for whoever reads results with another program."""
    answer = CliRunner().invoke(program, ["recovery", "schema"], catch_exceptions=False)
    assert answer.exit_code == 0
    assert json.loads(answer.output)["$ref"] == "#/$defs/Run"
