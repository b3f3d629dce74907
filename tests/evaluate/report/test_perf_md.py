"""PERF.md: the seed's file, typed rows, markers, matching, malformed input."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.markdown import (
    Heading,
    TableBlock,
    Text,
    find_markers,
    merge,
    parse_blocks,
)
from tilewright.evaluate.report.table import Table

SEED = (Path(__file__).parents[2] / "goldens" / "seed_perf.md").read_bytes().decode()
TABLE = "## Performance\n\n| Model | Device | Speed (t/s/u) |\n|---|---|---|\n"


@pytest.fixture(scope="module")
def seed() -> perf_md.Document:
    return perf_md.parse(SEED)


def rows_of(seed: perf_md.Document, kind: perf_md.SectionKind, k: int | None = None) -> tuple:
    section = seed.find(kind, context_k=k)
    assert section is not None
    return section.rows


def test_the_seeds_tables_are_found_whole() -> None:
    tables = [each for each in parse_blocks(SEED, name="seed") if isinstance(each, TableBlock)]
    assert len(tables) == 17
    num_lines = sum(2 + len(table.rows) for table in tables)
    assert num_lines == sum(line.startswith("|") for line in SEED.splitlines())


def test_the_seed_has_its_sections_and_rows(seed: perf_md.Document) -> None:
    performance = rows_of(seed, "performance")
    assert len(performance) == 30
    assert sum(row.top1 is not None and row.top5 is not None for row in performance) == 22
    blank = [row for row in performance if row.top1 is None]
    assert Counter((row.model, row.dp > 1) for row in blank)["Phi3.5-mini", False] == 3
    assert sum(row.dp > 1 for row in performance) == 5
    assert len(rows_of(seed, "accuracy")) == 25
    assert len(rows_of(seed, "long_context", 64)) == 19
    assert len(rows_of(seed, "long_context", 32)) == 1
    assert len(rows_of(seed, "batch_32")) == 21
    precision = [section for section in seed.sections if section.kind == "precision"]
    assert [len(section.rows) for section in precision] == [1] * 12
    assert len({section.title for section in precision}) == 12
    assert {section.result_kind for section in seed.sections} == {"measured"}
    assert all(section.intro for section in seed.sections if section.kind == "performance")


def test_the_seeds_odd_cells_are_read(seed: perf_md.Document) -> None:
    row = perf_md.match_row(rows_of(seed, "performance"), "Llama3.2-1B", "T3K", dp=4)
    assert row is not None
    assert (row.speed, row.ttft, row.top1, row.cells["Device"]) == (83.5, 19, None, "T3K  (DP=4)")
    typo = [row for row in rows_of(seed, "batch_32") if row.device == "150"]
    assert [(row.model, row.ttft) for row in typo] == [("Phi-3-mini-128k-instruct", 192.5)]
    (long,) = rows_of(seed, "long_context", 32)
    assert long.cells["TTFT (ms)"] == "11259.6"
    assert long.ttft == 11259.6
    assert all(row.speed is None for row in rows_of(seed, "long_context", 64) if row.device == "TG")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", ""),
        ("\n", "T"),
        ("no end", "T"),
        ("a\r\n| A | B |\r\n|:-|-:|\r\n|  x|y  |  \r\n# H\r\n", "T|#"),
        ("  | A |\n  |---|\n", "|"),
        ("```\n| not a table\n# nor a heading\n```\n", "T"),
        ("~~~~\n```\n~~~\n| a\n~~~~~\n", "T"),
        ("| a\\|b | c |\n|---|---|\n", "|"),
        ("```not a fence```\n", "T"),
        ("#nothing\n####### seven\n#\ttab\n", "T#"),
        ("\x0c\x85\u2028| A |\n", "T"),
    ],
)
def test_texts_are_split_into_blocks(text: str, kinds: str) -> None:
    marks = {Text: "T", TableBlock: "|", Heading: "#"}
    assert "".join(marks[type(each)] for each in parse_blocks(text, name="f")) == kinds
    assert perf_md.parse(text).text == text


def test_a_fence_and_an_escape_are_no_cells() -> None:
    assert not any(isinstance(b, TableBlock) for b in parse_blocks("```\n|x\n```\n", name="f"))
    (table,) = parse_blocks("| a\\|b | c |\n|---|---|\n", name="f")
    assert isinstance(table, TableBlock)
    assert table.columns == ("a\\|b", "c")


@pytest.mark.parametrize(
    "text, message",
    [
        (TABLE + "| a | b |\n", ":5: 2 cells in a table of 3 columns"),
        (TABLE + "| a | b | fast |\n", r":5: column 'Speed \(t/s/u\)' is 'fast'.*a number, blank"),
        (TABLE + "| a | b | nan |\n", ":5: column"),
        (TABLE + "| a | b | -1 |\n", ":5: column"),
        (TABLE + f"| a | b | {'9' * 400} |\n", ":5: column"),
        (TABLE + "|  | b | 1 |\n", ":5: a blank Model cell"),
        (TABLE + "| (random weights) | b | 1 |\n", ":5: a blank Model cell"),
        (TABLE + "| a | (DP=4) | 1 |\n", ":5: a blank Device cell"),
        (TABLE + "| a | b (DP=x) | 1 |\n", r":5: device 'b \(DP=x\)'"),
        (TABLE + "| a | b (DP=0) | 1 |\n", ":5: device"),
        (TABLE + "| a | b (DP=2) (DP=3) | 1 |\n", ":5: device"),
        (TABLE + "| a | b | 1\n", ":5: a table's line begins and ends"),
        (TABLE + "| a | b | 1 \\|\n", ":5: a table's line begins and ends"),
        ("|\n", ":1: a table's line"),
        ("x\n| a | b |\n| 1 | 2 |\n", ":3: missing the line"),
        ("| a | b |\n", ":2: missing the line"),
        ("# Accuracy\n| Model | Speed (t/s/u) |\n|---|---|\n", ":2: no column 'Device'"),
        ("# Accuracy\n| Model | Device | Device |\n|-|-|-|\n", ":2: a column stands twice"),
        ("# Accuracy\n|Model|Device|TTFT (ms)|avg TTFT (ms)|\n|-|-|-|-|\n", ":2: columns"),
        ("# Accuracy\n|Model|Device|Top-1 (%)|\n|-|-|-|\n|a|b|101|\n", ":4: .*a percentage"),
        ("text\n## precision_cfg = x\n", ":2: heading 'precision_cfg = x'"),
        ("a\n```\n| x |\n", ":2: code fence '```' is not closed"),
    ],
)
def test_malformed_input_names_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"my/PERF.md{message}") as caught:
        perf_md.parse(text, name="my/PERF.md")
    assert "\n" not in str(caught.value)


def test_tables_of_other_sections_may_say_anything() -> None:
    document = perf_md.parse("## Peers\n\n| Model | Speed (t/s/u) |\n|---|---|\n| a | fast |\n")
    assert document.sections[0].kind == "other"
    assert document.sections[0].rows == ()


def test_level_one_titles_tell_what_is_not_measured() -> None:
    document = perf_md.parse(f"{TABLE}# Predicted results\n{TABLE}| m | d | 1 |\n# Other\n{TABLE}")
    kinds = [s.result_kind for s in document.sections if s.kind == "performance"]
    assert kinds == ["measured", "predicted", "measured"]
    with pytest.raises(ConfigError, match="several sections 'Performance': lines 1, "):
        document.find("performance")
    found = document.find("performance", result_kind="predicted")
    assert found is not None
    assert found.rows[0].speed == 1
    assert document.find("accuracy") is None


# -- matching


def test_matching_is_exact_after_the_alias_table(seed: perf_md.Document) -> None:
    rows = rows_of(seed, "performance")
    for name in ("Llama3.2-1B", "Llama-3.2-1B", "Llama-3.2-1B-Instruct"):
        row = perf_md.match_row(rows, name, "N150")
        assert row is not None
        assert row.speed == 84.5
    for name in ("Llama3.2-1", "Llama3.2-1B ", "llama3.2-1b", "Llama3.2-11B-Instruct", "1B", ""):
        assert perf_md.match_row(rows, name, "N150") is None
    galaxy = perf_md.match_row(rows, "Llama3.2-1B", "Galaxy")
    assert galaxy is not None
    assert galaxy.speed == 51.0
    assert perf_md.match_row(rows, "Llama3.2-1B", "T3K", dp=2) is None
    # "150" in the Batch-32 table is not taken for N150.
    assert perf_md.match_row(rows_of(seed, "batch_32"), "Phi-3-mini-128k-instruct", "N150") is None


def test_matching_an_ambiguous_row_is_an_error() -> None:
    line = "| SmolLM2-135M | CPU | 1 |\n| SmolLM2-135M-Instruct | CPU | 2 |\n"
    (section,) = perf_md.parse(TABLE + line).sections
    with pytest.raises(ConfigError, match="matches several rows: lines 5, 6"):
        perf_md.match_row(section.rows, "SmolLM2-135M", "CPU")


def test_random_weights_and_meshes_are_not_matched() -> None:
    header = "## Performance\n| Model | Device | Precision | Speed (t/s/u) |\n|-|-|-|-|\n"
    lines = (
        "| m (random weights) | H200 | bf16 | 1 |\n"
        "| m | H200 (1x2) (DP=4) | bf16 | 2 |\n"
        "| m | H200 | bf16 | 4 |\n"
    )
    rows = perf_md.parse(header + lines).sections[0].rows
    assert perf_md.match_row(rows, "m", "H200") == rows[2]
    assert perf_md.match_row(rows, "m", "H200", dp=4) is None


# -- markers


def block(name: str, body: str) -> str:
    begin, end = f"<!-- tilewright:begin {name} -->", f"<!-- tilewright:end {name} -->"
    return f"{begin}\n\n{body}\n\n{end}\n"


def test_merge_appends_replaces_and_touches_nothing_else() -> None:
    hand = "# Mine\n\ntext  \n"
    first = merge(hand, "results", "## A\n")
    assert first == f"{hand}\n{block('results', '## A')}"
    second = merge(first + "after, no newline", "other", "x")
    third = merge(second, "results", "## B\n\ntext\n")
    assert third == second.replace("## A", "## B\n\ntext")
    assert merge(third, "results", "## B\n\ntext\n") == third
    assert merge("", "results", "x") == block("results", "x")


def test_merge_keeps_the_line_ends_of_the_text() -> None:
    merged = merge("mine\r\n", "results", "a\nb\n")
    assert merged.count("\n") == merged.count("\r\n")
    assert merge(merged, "results", "a\nb\n") == merged


@pytest.mark.parametrize(
    "text, message",
    [
        ("x\n<!-- tilewright:begin a -->\n", ":2: block 'a' begins and does not end"),
        ("<!-- tilewright:end a -->\n", ":1: block 'a' ends, but has not begun"),
        (block("a", "") + block("a", ""), ":6: a second block 'a'; the first: 1"),
        (block("a", block("b", "")), ":3: block 'b' begins inside 'a' of line 1"),
        ("<!-- tilewright:begin a -->\n<!-- tilewright:end b -->\n", ":2: block 'b' ends"),
        ("<!-- tilewright:begin -->\n", ":1: malformed marker"),
        ("text <!-- tilewright:begin a -->\n", ":1: malformed marker"),
    ],
)
def test_wrong_markers_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"P.md{message}"):
        merge(text, "a", "x", file="P.md")


def test_merge_refuses_names_and_texts_that_break_markers() -> None:
    with pytest.raises(ConfigError, match="block name"):
        merge("", "a b", "x")
    with pytest.raises(ConfigError, match="holds markers"):
        merge("", "a", block("b", "x"))


hand_text = st.text(st.sampled_from("ab |#-\n\r<!`"), max_size=40)


@given(hand_text, hand_text, hand_text)
def test_merge_is_stable_and_local(before: str, first: str, second: str) -> None:
    merged = merge(before, "n", first)
    assert merged.startswith(before)
    spans = find_markers(merged, file="f")
    assert list(spans) == ["n"]
    again = merge(merged, "n", second)
    assert again.startswith(before)
    assert merge(again, "n", second) == again


# -- files


def test_update_writes_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "PERF.md"
    perf_md.update(path, "results", TABLE + "| m | CPU | 1.5 |\n")
    assert perf_md.load(path).sections[0].rows[0].speed == 1.5
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="3 columns"):
        perf_md.update(path, "results", TABLE + "| m |\n")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["PERF.md"]


def test_update_keeps_bytes_and_mode_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "PERF.md"
    path.write_bytes(b"hand\r\n\x0cwritten")
    path.chmod(0o640)
    perf_md.update(path, "results", "x")
    assert path.read_bytes().startswith(b"hand\r\n\x0cwritten\r\n")
    assert path.stat().st_mode & 0o777 == 0o640


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        perf_md.load(tmp_path / "missing.md")
    bad = tmp_path / "bad.md"
    bad.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bad\.md.PERF\.md: "):
        perf_md.update(bad / "PERF.md", "results", "x")
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        perf_md.load(bad)


# -- any text


@given(st.text(max_size=300) | st.text(st.sampled_from("|-# \n\\:`~aM"), max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        blocks = parse_blocks(text, name="f")
    except TilewrightError:
        return
    plain = "".join(each.text for each in blocks if isinstance(each, Text))
    lines = text.split("\n")
    assert all(line in lines for line in plain.split("\n") if line)
    num_others = sum(
        2 + len(each.rows) if isinstance(each, TableBlock) else not isinstance(each, Text)
        for each in blocks
    )
    assert plain.count("\n") + num_others - text.count("\n") in (0, 1)


cell_text = st.text(st.sampled_from("0123456789.-eE+%()=xDP N"), max_size=12)


@given(st.lists(st.tuples(cell_text, cell_text, cell_text), max_size=4))
def test_any_cells_are_read_or_refused(cells: list[tuple[str, str, str]]) -> None:
    text = TABLE + "".join(f"|{'|'.join(row)}|\n" for row in cells)
    try:
        document = perf_md.parse(text)
    except TilewrightError:
        return
    for row in document.sections[0].rows:
        assert row.dp >= 1
        assert row.speed is None or row.speed >= 0


@given(st.integers(0, 3000), st.sampled_from(["x", "|1", "| |\n"]))
def test_a_damaged_seed_is_read_or_refused(place: int, insert: str) -> None:
    try:
        perf_md.parse(SEED[:place] + insert + SEED[place:])
    except TilewrightError as error:
        message = str(error)
        assert message.startswith("PERF.md:")


@pytest.mark.parametrize(
    "text",
    [
        "|" * 300_000,
        "|" + " " * 300_000 + "|\n|---|\n",
        TABLE + "| a | " + "(" * 300_000 + ") | 1 |\n",
        TABLE + "| a | b" + " " * 300_000 + "(DP=4) | 1 |\n",
        TABLE + "| a | b | " + "9" * 300_000 + "e |\n",
        "#" + " " * 300_000 + "x",
        "## Long-context" + " (" * 100_000,
        "|" + "-" * 300_000 + "x|\n" * 2,
        "`" * 300_000,
        "# Accuracy\n" + "|a" * 100_000 + "|\n" + "|-" * 100_000 + "|\n",
        "# Accuracy\n" + "|" * 100_000 + "\n" + "|-" * 99_999 + "|\n",
    ],
    ids=str.__len__,
)
def test_long_input_takes_no_long_time(text: str) -> None:
    start = time.process_time()
    try:
        perf_md.parse(text)
    except TilewrightError as error:
        message = str(error)
        assert len(message) < 500
    assert time.process_time() - start < 5


def test_a_new_table_reads_back() -> None:
    text = Table.of(("A", "longer"), [("x", ""), ("wide cell", "1")]).markdown()
    assert text.splitlines()[1] == "|-----------|--------|"
    (table,) = parse_blocks(text, name="f")
    assert isinstance(table, TableBlock)
    assert [line.cells for line in table.rows] == [("x", ""), ("wide cell", "1")]
