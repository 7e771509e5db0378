"""What a run is as data, and the numbers made of it."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from weightkeeper.cli import program
from weightkeeper.errors import ConfigError
from weightkeeper.recovery import comparing, report, result, rows, table
from weightkeeper.recovery.check import Pause, Verdict
from weightkeeper.recovery.levels import Levels, thinned
from weightkeeper.recovery.result import FORMAT, Run, Sample, Scenario, Skipped
from weightkeeper.recovery.subject import Machine, Subject
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
        "subject": Subject("tiny", 1000, {"max-model-len": 64}, 3, 8), "skipped": (),
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


@pytest.mark.parametrize("name", ["samples", "scenarios", "skipped"])
def test_a_run_without_what_it_has_measured_is_none(tmp_path, name):
    """Also one that has measured nothing yet says so; and so does the schema."""
    file = tmp_path / "run.json"
    result.write(file, run("1"))
    whole = json.loads(file.read_bytes())
    file.write_text(json.dumps({each: value for each, value in whole.items() if each != name}))
    with pytest.raises(ConfigError, match=f"missing required field `{name}`"):
        result.read(file)
    assert name in result.schema()["$defs"]["Run"]["required"]


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
    assert rows_of(text, "mapped")[0] == [
        "mapped", "1 of 1", "10.00 / 10.00 / 10.00", "9.90", "10.00", "10.50 / 10.50 / 10.50", "3.00× / 3.00× / 3.00×",
    ]  # fmt: skip
    assert "- copy: no GPU" in text
    assert "The deliberately wrong agent was NOT CAUGHT" in text
    assert joined.is_passed is False


def rows_of(text: str, name: str) -> list[list[str]]:
    """Cells of the rows that begin with a name, of all tables."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] == name]


def test_parts_that_are_not_whole_are_told():
    """Which, how many samples they have, and why no more; a whole one is not named."""
    whole = run("1", sample("disk", 1, 30.0))
    others = {
        "killed": msgspec.structs.replace(run("killed", sample("disk", 1, 30.0)), ended="running"),
        "left": msgspec.structs.replace(run("left"), ended="interrupted", message="Ctrl-C"),
    }
    joined = join([whole, *others.values()])
    told = [
        "part killed has 1 samples of 2 rounds that were asked for: it was killed, or goes on",
        "part left has 0 samples of 2 rounds that were asked for: it was interrupted (Ctrl-C)",
    ]
    text = "\n".join(table.lines(joined))
    assert "Not whole:\n" + "\n".join(f"- {line}" for line in told) in text
    assert all(f"<li>{line}</li>" in report.page(joined) for line in told)
    assert "Not whole" not in "\n".join(table.lines(join([whole])))
    assert "Not whole" not in report.page(join([whole]))


def test_ratios_are_to_vllms_own_cache_as_well():
    """Where it ran, pair by pair within a round."""
    taken = (("disk", 1, 30.0), ("ipc_cache", 1, 20.0), ("reload", 1, 2.0), ("ipc_cache", 2, 30.0), ("reload", 2, 2.0))
    text = "\n".join(table.lines(join([run("1", *(sample(*each) for each in taken))])))
    assert rows_of(text, "scenario")[0][-2:] == ["times faster than disk", "times faster than ipc_cache"]
    assert rows_of(text, "reload")[0][-2:] == ["15.00× / 15.00× / 15.00×", "10.00× / 12.50× / 15.00×"]
    assert rows_of(text, "disk")[0][-1] == "0.67× / 0.67× / 0.67×"


def test_what_did_not_come_out_right_is_counted_and_named():
    """By scenario, with the first message; none of it is in a median."""
    samples = [sample("disk", 1, 30.0), sample("mapped", 1, 9.0), sample("mapped", 2, 1.0, "wrong")]
    samples += [Sample("mapped", number, 9, "failed", f"message {number}\nlog") for number in (3, 4)]
    text = "\n".join(table.lines(join([run("1", *samples)])))
    assert "Not right:\n- mapped: 1 wrong, 2 failed; round 3: message 3\n" in text + "\n"
    assert rows_of(text, "mapped")[0][1:3] == ["1 of 4", "9.00 / 9.00 / 9.00"]


def test_what_holders_cost_is_told():
    """Beyond the weights as well, where only one of them tells these."""
    mib = 1 << 20
    ours = result.Held("weightkeeper", 9.0, 1, 35_000_000, (), 13_752 * mib, 13_752 * mib, 15_575 * mib)
    theirs = result.Held("vLLM's daemon", 12.0, 1, 2_265 * mib, ("libcuda", "libtorch"), None, 14_388 * mib)
    scenarios = [Scenario(held.name, "t", "d", held=held) for held in (ours, theirs)]
    text = "\n".join(table.lines(join([run("1", sample("disk", 1, 30.0), scenarios=tuple(scenarios))])))
    assert rows_of(text, "weightkeeper")[-1][1:6] == [
        "9.0 s",
        "13,752.0 MiB",
        "13,752.0 MiB",
        "+0.00 %",
        "15,575.0 MiB",
    ]
    assert rows_of(text, "vLLM's daemon")[-1][2:6] == ["–", "14,388.0 MiB", "+4.62 %", "–"]
    assert "Memory of all holders is that of weightkeeper and vLLM's daemon as far as they ran" in text


def test_a_holder_that_is_the_only_one_needs_no_word():
    """What all holders hold is what it holds."""
    alone = Scenario("reload", "t", "d", held=result.Held("weightkeeper", 9.0, 1, 35_000_000, (), 1 << 30, None))
    found = join([run("1", sample("reload", 1, 3.0), scenarios=(alone,))])
    assert "all holders" in "\n".join(table.lines(found))
    assert rows.holders_note(found) == ""


def test_phases_of_all_scenarios_are_in_the_order_of_a_start():
    """Those that one scenario alone has stand between what is before and behind them."""
    disk = {"old engine gone": 1.0, "server imported": 2.0, "weights there": 3.0, "answered": 4.0}
    reload = {"old engine gone": 1.0, "fork": 0.1, "map": 0.2, "answered": 0.3}
    assert rows.in_order([disk, reload]) == [
        "old engine gone", "fork", "map", "server imported", "weights there", "answered",
    ]  # fmt: skip


def test_parts_with_and_without_an_agent_are_no_one_result():
    """Nor are those with other savings."""
    for more in ({"has_agent": False}, {"savings": "kv-size"}):
        other = run("2", subject=Subject("tiny", 1000, {"max-model-len": 64}, 3, 8, **more))
        with pytest.raises(ConfigError, match=f"subject {next(iter(more)).replace('_', ' ')} is "):
            join([run("1"), other])


def test_two_results_are_compared():
    """What differs between their machines and settings, and their medians with the ratio."""
    one = join([run("1", sample("disk", 1, 30.0), sample("mapped", 1, 10.0))])
    other = join([run("2", sample("disk", 1, 15.0), machine="another processor")])
    lines = list(comparing.lines(one, other))
    assert "- processor: a processor / another processor" in lines
    assert not any("max-model-len" in line for line in lines)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert cells[1] == ["disk", "29.90 / 14.90 / 0.50", "30.00 / 15.00 / 0.50", "30.50 / 15.50 / 0.51"]
    assert cells[2][2] == "10.00 / – / –"


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
