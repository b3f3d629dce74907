"""What the headless commands say of a sweep, what they append to it, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.sweep.journals import (
    FOUR,
    cells,
    create,
    done,
    failed,
    finish,
    four,
)
from tilewright.cli.main import main as cli
from tilewright.cli.sweep import tables
from tilewright.cli.sweep.main import main
from tilewright.errors import ConfigError
from tilewright.evaluate.report.markdown import TableBlock as MarkdownTable
from tilewright.evaluate.report.markdown import parse_blocks
from tilewright.evaluate.sweep.journal import Added, SweepJournal

NAMES = FOUR
ROOT = Path(__file__).parents[3]


@pytest.fixture
def journal(tmp_path: Path) -> SweepJournal:
    return four(tmp_path / "pareto.jsonl")


def run(capsys: pytest.CaptureFixture[str], verb: str, *argv: object) -> str:
    """What a verb prints; all is well with it."""
    assert main([verb, *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def status(capsys: pytest.CaptureFixture[str], journal: SweepJournal, *argv: str) -> dict:
    return json.loads(run(capsys, "status", journal.path, "--json", *argv))


def appended(journal: SweepJournal, num_before: int) -> list[dict]:
    lines = journal.path.read_text().splitlines()
    return [json.loads(line) for line in lines[num_before:]]


def num_lines(journal: SweepJournal) -> int:
    return len(journal.path.read_text().splitlines())


def test_status_is_a_table_of_configurations(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, "status", journal.path).splitlines()
    assert lines[0] == "pareto.jsonl: plan pareto, not running"
    left = "10 of 16 cells done, 1 failed, 1 interrupted, 4 queued, about "
    assert lines[1].startswith(left) and lines[1].endswith(" left")
    titles = ["Configuration", "Done", "Top-1", "95", "%", "CI", "KL", "t/s/u", "Spr%", "TTFT"]
    assert lines[3].split() == [*titles, "MB", "Front"]
    first, second, third, fourth = (line.split() for line in lines[5:9])
    figures = ["97.7", "95.9-98.7", "0.0123", "80.0", "2.0", "81.2", "90", "front"]
    assert first == [NAMES[0], "4/4", *figures]
    assert second[:3] == [NAMES[1], "4/4", "91.8"] and second[5] == "120.0"
    assert third == [NAMES[2], "2/4", "failed", "58.6", *third[4:]] and third[-1] == "90"
    assert fourth == [NAMES[3], "0/4", "queued"]
    third_round = cells(NAMES[2])[2]
    assert lines[9] == ""
    reason = f"{NAMES[2]} performance-ci-1 round 2: failed: exit code 7 red"
    assert lines[10] == f"{third_round.id} {reason}"


def test_status_as_json_has_the_figures_unrounded(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status(capsys, journal)
    assert (found["plan"], found["is_running"], found["num_cells"]) == ("pareto", False, 16)
    assert found["statuses"] == {"done": 10, "failed": 1, "queued": 4, "interrupted": 1}
    assert found["estimated_seconds_left"] > 0
    row = found["rows"][0]
    assert row["top1"] == 100 * 500 / 512 and row["mb"] == 90.4 and row["speed"] == 80.0
    assert [each["front"] for each in found["rows"]] == ["front", "front", None, None]
    assert found["rows"][3]["mb"] is None  # what is only estimated is in no column of measured ones
    assert list(row) == [column.key for column in tables.CONFIGURATION_COLUMNS]


def test_status_of_cells(journal: SweepJournal, capsys: pytest.CaptureFixture[str]) -> None:
    rows = status(capsys, journal, "--cells")["rows"]
    assert [row["cell"] for row in rows] == list(journal.state.cells)
    by_id = {row["cell"]: row for row in rows}
    accuracy, first, second, third = (by_id[cell.id] for cell in cells(NAMES[2]))
    assert (accuracy["round"], accuracy["top1"], accuracy["speed"]) == (None, 100 * 300 / 512, None)
    assert (first["round"], first["speed"], first["ttft"]) == (1, 90.0, 81.25)
    assert (second["status"], second["seconds"], second["speed"]) == ("failed", 3.25, None)
    assert third["status"] == "interrupted"
    text = run(capsys, "status", journal.path, "--cells")
    assert f"{cells(NAMES[0])[0].id[:6]} {NAMES[0]}" in text


def test_what_runs_is_running_while_a_process_holds_the_sweep(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    with journal.hold():
        found = status(capsys, journal, "--cells")
        assert found["is_running"]
        assert found["statuses"]["running"] == 1 and "interrupted" not in found["statuses"]
        text = run(capsys, "status", journal.path)
        assert text.startswith("pareto.jsonl: plan pareto, running\n")


def test_a_finished_sweep_has_nothing_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:1])
    finish(journal, NAMES[0])
    text = run(capsys, "status", journal.path)
    assert text.startswith("s.jsonl: plan pareto, finished\n4 of 4 cells done\n")


@pytest.mark.parametrize(
    ("column", "order"),
    [
        ("top1", [0, 1, 2, 3]),
        ("speed", [1, 2, 0, 3]),
        ("kl", [0, 1, 2, 3]),
        ("name", [0, 2, 1, 3]),
        ("front", [0, 1, 2, 3]),
    ],
)
def test_status_is_sorted_by_any_column(
    column: str, order: list[int], journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = status(capsys, journal, "--sort", column)["rows"]
    assert [row["name"] for row in rows] == [NAMES[index] for index in order]


def test_sorting_in_reverse_keeps_what_is_unknown_last(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = status(capsys, journal, "--sort", "speed", "--reverse")["rows"]
    assert [row["speed"] for row in rows] == [80.0, 90.0, 120.0, None]
    rows = status(capsys, journal, "--reverse")["rows"]
    assert [row["name"] for row in rows] == list(NAMES[::-1])


def test_numbers_in_names_are_sorted_as_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", ["12.ff2=bfp8", "2.ff2=bfp8", "ff2=bfp8"])
    rows = status(capsys, journal, "--sort", "name")["rows"]
    assert [row["name"] for row in rows] == ["2.ff2=bfp8", "12.ff2=bfp8", "ff2=bfp8"]


def test_the_front_comes_with_what_is_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES)
    finish(journal, NAMES[0], num_top1=500, speed=80.0)
    finish(journal, NAMES[1], num_top1=499, speed=120.0)
    finish(journal, NAMES[2], num_top1=498, speed=120.0)
    finish(journal, NAMES[3], num_top1=100, speed=70.0)
    found = status(capsys, journal, "--pareto")
    assert [row["name"] for row in found["rows"]] == list(NAMES[:2])
    one, two = found["notes"]
    assert one.startswith(f"{NAMES[0]}: its top-1 is not distinguishable from {NAMES[1]}'s")
    assert two.startswith(f"{NAMES[2]}: tied with {NAMES[1]}: its top-1 is not distinguishable")
    text = run(capsys, "status", journal.path, "--pareto")
    assert one in text and two in text and NAMES[3] not in text


def test_equal_configurations_are_one_line_of_the_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:2])
    finish(journal, NAMES[0], effective_id="same", speed=80.0)
    finish(journal, NAMES[1], effective_id="same", speed=82.0)
    (row,) = status(capsys, journal, "--pareto")["rows"]
    assert row["name"] == f"{NAMES[0]}, {NAMES[1]}"
    assert [each["front"] for each in status(capsys, journal)["rows"]] == ["front", "front"]


def test_a_front_without_points_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:1])
    text = run(capsys, "status", journal.path, "--pareto")
    assert "no configuration has both a top-1 and a speed yet" in text


def test_each_model_has_its_own_front_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:1])
    other = cells(NAMES[0], model_name="Qwen2", model_hash="h2")
    ours = cells(NAMES[0])
    journal.append(*map(Added, other))
    journal.append(*(event for cell in ours for event in done(cell, num_top1=500, speed=90.0)))
    journal.append(*(event for cell in other for event in done(cell, num_top1=400, speed=50.0)))
    rows = status(capsys, journal)["rows"]
    expected = [f"{NAMES[0]} (SmolLM2-135M-Instruct)", f"{NAMES[0]} (Qwen2)"]
    assert [row["name"] for row in rows] == expected
    assert [row["front"] for row in rows] == ["front", "front"]
    assert len(tables.find_cells(journal.state, NAMES[0])) == 8
    assert len(tables.find_cells(journal.state, expected[1])) == 4


def test_markdown_is_the_same_table(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "status", journal.path, "--markdown", "--sort", "speed")
    table, rest = parse_blocks(text, name="status")
    assert isinstance(table, MarkdownTable)
    assert table.columns[:4] == ("Configuration", "Cells done", "Top-1 (%)", "Top-1 95 % CI")
    assert [line.cells[0] for line in table.rows] == [NAMES[i] for i in (1, 2, 0, 3)]
    assert table.rows[0].cells[5] == "120.0"
    assert rest.text.startswith(f"\n- {cells(NAMES[2])[2].id} ")


def test_names_that_are_not_fit_to_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", ["a|b\x1b]0;title\x07\nc\u202e"])
    assert parse_blocks(run(capsys, "status", journal.path, "--markdown"), name="s")
    text = run(capsys, "status", journal.path)
    assert "a|b c" in text and text.replace("\n", "").isprintable()


def test_cancel_by_name_by_id_and_by_prefix(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_lines(journal)
    fourth = cells(NAMES[3])
    text = run(capsys, "cancel", journal.path, fourth[0].id, fourth[1].id[:8])
    assert text.startswith("requested: cancel 2 cells\n")
    assert f"{fourth[0].id} {NAMES[3]} performance-top-1\n" in text
    text = run(capsys, "cancel", journal.path, NAMES[3])
    assert text.startswith("requested: cancel 2 cells (2 cells ended, or cancelled, already)\n")
    events = appended(journal, before)
    assert [event["cell"] for event in events] == [cell.id for cell in fourth]
    assert all((event["event"], event["what"]) == ("asked", "cancel") for event in events)
    assert [journal.state.cells[cell.id].status for cell in fourth] == ["queued"] * 4
    journal.refresh()
    assert [journal.state.cells[cell.id].status for cell in fourth] == ["cancelled"] * 4
    assert status(capsys, journal)["rows"][3]["done"] == "0/4 cancelled"


def test_cancel_what_runs(journal: SweepJournal, capsys: pytest.CaptureFixture[str]) -> None:
    running = cells(NAMES[2])[3]
    with journal.hold():
        text = run(capsys, "cancel", journal.path, running.id)
        assert text.startswith("requested: cancel 1 cell; the running sweep stops it\n")
        assert status(capsys, journal)["statuses"]["stopping"] == 1
        text = run(capsys, "cancel", journal.path, running.id)
        assert text == "nothing to cancel: 1 cell ended, or cancelled, already\n"


def test_cancel_of_what_has_ended_appends_nothing(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    before = journal.path.read_bytes()
    text = run(capsys, "cancel", journal.path, NAMES[0])
    assert text == "nothing to cancel: 4 cells ended, or cancelled, already\n"
    assert journal.path.read_bytes() == before


def test_restart_by_name_and_of_all_that_failed(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_lines(journal)
    text = run(capsys, "restart", journal.path, "--failed")
    assert text.startswith("requested: restart 1 cell; the next run of the sweep takes it up\n")
    assert appended(journal, before) == [
        {"event": "asked", "cell": cells(NAMES[2])[2].id, "what": "restart"}
    ]
    with journal.hold():
        text = run(capsys, "restart", journal.path, NAMES[0])
    assert text.startswith("requested: restart 4 cells; the running sweep takes them up\n")
    assert status(capsys, journal)["rows"][0]["done"] == "0/4 queued"
    text = run(capsys, "restart", journal.path, NAMES[0])
    assert text == "nothing to restart: 4 cells to be run, already\n"
    text = run(capsys, "restart", journal.path, "--failed")
    assert text == "nothing to restart: no cell has failed\n"


def test_every_kind_of_failure_is_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:1])
    found = cells(NAMES[0])
    outcomes = ("failed", "timed out", "out of memory", "cancelled")
    for cell, outcome in zip(found, outcomes, strict=True):
        journal.append(*failed(cell, outcome=outcome))
    assert status(capsys, journal)["rows"][0]["done"] == "0/4 failed"
    assert "requested: restart 3 cells" in run(capsys, "restart", journal.path, "--failed")


@pytest.mark.parametrize(
    ("verb", "argv", "message"),
    [
        ("cancel", ["nothing"], "no cell or configuration 'nothing'; allowed: mlp-bf16-bf16, "),
        ("restart", [""], "no cell or configuration ''; allowed: "),
        ("log", ["nothing"], "no cell or configuration 'nothing'; allowed: "),
        ("cancel", [], "sweep cancel: no cell; allowed: CELL..."),
        ("restart", [], "sweep restart: no cell; allowed: CELL..., or --failed"),
        ("restart", ["a", "--failed"], "sweep restart: both; allowed: CELL..., or --failed"),
        ("status", ["--sort", "size"], "no column 'size' to sort by; allowed: name, done, top1, "),
        ("status", ["--cells", "--sort", "mb"], "no column 'mb' to sort by; allowed: cell, name"),
        ("status", ["--cells", "--pareto"], "argument --pareto: not allowed with"),
        ("status", ["--json", "--markdown"], "argument --markdown: not allowed with"),
    ],
)
def test_what_is_refused(verb: str, argv: list[str], message: str, journal: SweepJournal) -> None:
    before = journal.path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        main([verb, str(journal.path), *argv])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert journal.path.read_bytes() == before


def test_an_ambiguous_id_lists_its_cells(tmp_path: Path) -> None:
    journal = create(tmp_path / "s.jsonl", [f"c{number}" for number in range(20)])
    ids = list(journal.state.cells)
    first = next(each[0] for each in ids if sum(other[0] == each[0] for other in ids) > 1)
    begun = [each for each in ids if each.startswith(first)]
    with pytest.raises(ConfigError, match=rf"'{first}': {len(begun)} ids begin so; allowed: ") as e:
        main(["cancel", str(journal.path), first])
    assert begun[0] in str(e.value)


@pytest.mark.parametrize("verb", ["status", "cancel", "restart", "log"])
def test_what_is_no_sweep_is_refused(verb: str, tmp_path: Path) -> None:
    rest = [] if verb == "status" else ["a"]
    with pytest.raises(ConfigError, match="No such file"):
        main([verb, str(tmp_path / "none.jsonl"), *rest])
    other = tmp_path / "other.jsonl"
    other.write_text('{"schema": 1}\n')
    with pytest.raises(ConfigError, match="no event of a sweep"):
        main([verb, str(other), *rest])
    assert sorted(tmp_path.iterdir()) == [other]


def test_a_torn_last_line_is_said(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    with journal.path.open("a") as file:
        file.write('{"event": "star')
    assert main(["status", str(journal.path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("pareto.jsonl: plan pareto")
    assert captured.err.startswith("tilewright: ") and captured.err.count("\n") == 1
    assert "dropped a last line cut short" in captured.err


def test_the_command_is_a_process_without_torch(journal: SweepJournal) -> None:
    code = (
        "import sys; from tilewright.cli.sweep.main import main; "
        f"main(['status', {str(journal.path)!r}]); "
        "assert not {'torch', 'textual', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_errors_leave_by_the_usual_way(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["sweep", "cancel", str(journal.path), "nothing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("tilewright: no cell or configuration 'nothing'; allowed: ")
