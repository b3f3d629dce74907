"""Data sets: every form, whatever is in it; rows that cannot be asked are named, none is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.rows import record
from tilewright.batch.dataset import DataSet
from tilewright.batch.inputs import open_data_set
from tilewright.batch.lines import LineFile
from tilewright.batch.plain_rows import Asking
from tilewright.batch.records import Record, refused
from tilewright.errors import ConfigError
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import MAX_BODY

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of values, a line each, or of one list; bytes are written as they are."""

    def make(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        data = b"\n".join(lines) + b"\n"
        if path.suffix == ".json":
            data = b"[" + b",\n".join(lines) + b"]"
        path.write_bytes(data)
        return path

    return make


def asked(data: DataSet) -> list[dict[str, Any] | str]:
    """The body of each row, or what is wrong with it."""
    found: list[dict[str, Any] | str] = []
    for row in range(len(data)):
        try:
            item = data.item(row)
            assert item.row == row
            found.append(json.loads(item.body))
        except ApiError as error:
            found.append(f"{error.status} {error.message}".removeprefix("400 "))
    return found


def answers(data: DataSet, path: Path, records: list[Record]) -> list[Any]:
    data.write(path, records)
    if path.suffix == ".json":
        return list(json.loads(path.read_bytes()))
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_triples_are_asked_for_their_output_length(write: Write, tmp_path: Path) -> None:
    path = write("set.json", [["one", 1, 5], ["two", "2", 5], ["three", 3, 0], "x", ["four", 4, 9]])
    data = open_data_set(path, Asking())
    bodies = asked(data)
    assert bodies[0] == {"prompt": "one", "max_tokens": 5}
    assert [each[: len(str(path)) + 7] for each in map(str, bodies[1:4])] == [
        f"{path}: row {row}" for row in (2, 3, 4)
    ]
    assert [data.length(row) for row in range(5)] == [5, 0, 0, 0, 9]
    records = [record(0, "yes"), record(1, "why", status=400), record(4)]
    found = answers(data, tmp_path / "out.jsonl", records)
    assert found[0] == {
        **{"prompt": "one", "prompt_len": 1, "output_len": 5, "text": "yes"},
        **{"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 3},
    }
    assert found[1]["error"] == "why" and found[1]["row"] == 2 and found[1]["text"] is None
    assert answers(data, tmp_path / "out.json", records) == found
    assert answers(data, tmp_path / "none.json", []) == []


def test_lines_of_openai_keep_their_ids_and_bad_ones_are_named(
    write: Write, tmp_path: Path
) -> None:
    rows = [
        line("a", prompt="p", max_tokens=3, n=2),
        line("b", "/v1/chat/completions", messages=[], max_completion_tokens=7),
        line("a", prompt="again"),
        line(5, prompt="p"),
        line("c", "/v1/embeddings", input="p"),
        {**line("d", prompt="p"), "method": "GET"},
        b'{"custom_id": "cut", "url": "/v1/compl',
        {**line("e"), "body": "no object"},
    ]
    data = open_data_set(write("set.jsonl", rows), Asking())
    bodies = [str(each) for each in asked(data)]
    assert [data.length(row) for row in range(3)] == [6, 7, 0]
    assert data.item(1).is_chat and not data.item(0).is_chat
    assert "set.jsonl:3: custom_id 'a' is that of" in bodies[2] and ".jsonl:1 too" in bodies[2]
    assert "set.jsonl:4: no line of a batch: Expected `str`, got `int`" in bodies[3]
    assert "url '/v1/embeddings'; allowed: /v1/chat/completions" in bodies[4]
    assert "method 'GET'; allowed: POST" in bodies[5]
    assert "set.jsonl:7: no line of a batch: Input data was truncated" in bodies[6]
    assert bodies[7] == "no object" and data.length(7) == 0, "the server's own checks refuse it"
    found = answers(data, tmp_path / "out.jsonl", [record(0), record(2, "twice", status=400)])
    assert [each["custom_id"] for each in found] == ["a", "a"]
    assert found[0]["response"]["status_code"] == 200 and found[0]["error"] is None
    assert found[0]["response"]["body"]["choices"][0]["text"] == "a"
    assert found[1]["error"] == {"code": "invalid_value", "message": "twice"}
    assert found[0]["id"] != found[1]["id"]


def test_a_column_of_prompts_may_hold_texts_ids_or_messages(write: Write, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    prompts = ["text", [1, 2], said, 7, None, [1, "x"]]
    path = write("set.jsonl", [*({"q": each, "k": 1} for each in prompts), {"k": 2}])
    data = open_data_set(path, Asking(prompt_column="q", max_tokens=4))
    bodies = asked(data)
    assert bodies[:3] == [
        {"max_tokens": 4, "prompt": "text"},
        {"max_tokens": 4, "prompt": [1, 2]},
        {"max_tokens": 4, "messages": said},
    ]
    for row in (3, 4, 5):
        assert f"{path}:{row + 1}: 'q' is " in str(bodies[row]) and "allowed: a text" in bodies[row]
    assert f"{path}:7: no column 'q'" in bodies[6]
    chat = open_data_set(path, Asking(prompt_column="q", is_chat=True)).item(0)
    assert chat.is_chat and json.loads(chat.body)["messages"][0]["content"] == "text"
    found = answers(data, tmp_path / "out.jsonl", [record(1, "yes")])
    assert found == [
        {
            **{"q": [1, 2], "k": 1, "text": "yes", "finish_reason": "stop"},
            **{"prompt_tokens": 2, "completion_tokens": 3},
        }
    ]


def test_a_row_with_a_column_of_answers_is_refused_alone(write: Write, tmp_path: Path) -> None:
    rows = [{"prompt": "p"}, {"prompt": "p", "text": "its own"}, {"prompt": "p", "error": "own"}]
    data = open_data_set(write("set.jsonl", rows), Asking())
    first, second, third = asked(data)
    assert isinstance(first, dict)
    assert "set.jsonl:2: has a column 'text', which answers add; allowed: another --" in second
    assert "set.jsonl:3: has a column 'error', which answers add; allowed: another name" in third
    found = answers(data, tmp_path / "out.jsonl", [record(1, "why", status=400)])
    assert found[0]["row"] == 2 and "prompt" not in found[0], "no column of its own is lost there"
    triples = write("set.json", [["p", 1, 2]])
    with pytest.raises(ConfigError, match="has a column 'prompt', which answers add"):
        open_data_set(triples, Asking(answer_column="prompt"))


def test_parquet_keeps_its_columns_and_their_types(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, out = tmp_path / "set.parquet", tmp_path / "out.parquet"
    table = pyarrow.table({"prompt": ["a", None, "c"], "n": pyarrow.array([1, 2, 3], "int16")})
    parquet.write_table(table, path)
    data = open_data_set(path, Asking(answer_column="said"))
    assert [each if isinstance(each, str) else each["prompt"] for each in asked(data)] == [
        "a",
        f"{path}: row 2: 'prompt' is NoneType; allowed: a text, token ids, or messages",
        "c",
    ]
    data.write(out, [record(2, "x"), record(1, "why", status=400)])
    found = parquet.read_table(out)
    assert found.schema.field("n").type == pyarrow.int16()
    assert found.to_pylist()[0] == {
        **{"prompt": "c", "n": 3, "said": "x", "finish_reason": "stop"},
        **{"prompt_tokens": 2, "completion_tokens": 1, "error": None},
    }
    assert found.to_pylist()[1]["error"] == "why" and data.num_failed(out) == 1
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"set\.parquet: no Parquet file"):
        open_data_set(path, Asking())


def test_a_row_of_ten_megabytes_is_refused_alone(write: Write) -> None:
    long = "x" * (10 << 20)
    for rows in (
        [line("a", prompt="p"), line("b", prompt=long)],
        [{"prompt": "p"}, {"prompt": long}],
    ):
        data = open_data_set(write("set.jsonl", rows), Asking())
        first, second = asked(data)
        assert isinstance(first, dict)
        assert "set.jsonl:2: 104" in str(second) and f"allowed: up to {MAX_BODY}" in str(second)


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("set.json", b'[["a", 1, 2], ["b"', "no whole JSON list: Input data was truncated"),
        ("set.json", b"[]", "has no rows"),
        ("set.json", b'{"a": 1}', "no whole JSON list: Expected `array`"),
        ("set.jsonl", b"\n  \n", "has no rows"),
        ("set.jsonl", b"\xff\xfe{}\nx", "no row of it can be read; the first: "),
        ("set.csv", b"a,b", ".csv; allowed: a JSON list"),
        ("set.jsonl", b'{"a": 1}', "no column 'prompt'; allowed: --prompt-column, one of 'a'"),
        ("set.jsonl", b'{"prompt": "a", "text": 1}', "has a column 'text', which answers add"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused_whole(
    name: str, data: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as refusal:
        open_data_set(tmp_path / name, Asking())
    assert said in str(refusal.value) and name in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("no.json", "no.jsonl"):
        with pytest.raises(ConfigError, match=f"{name}: No such file"):
            open_data_set(tmp_path / name, Asking())


@given(data=st.binary(max_size=300), suffix=st.sampled_from([".json", ".jsonl"]))
def test_any_bytes_are_rows_or_a_refusal(
    data: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_all_rows(data, suffix, tmp_path_factory.mktemp("set"))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt", "custom_id", "url", "body", "method", "max_tokens", "n"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(rows=st.lists(_VALUES, min_size=1, max_size=5), cut=st.integers(0, 12), lists=st.booleans())
def test_any_values_of_json_are_rows_or_a_refusal(
    rows: list[Any], cut: int, lists: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(rows) if lists else "\n".join(map(json.dumps, rows))
    suffix = ".json" if lists else ".jsonl"
    check_all_rows(text.encode()[: len(text) - cut or None], suffix, tmp_path_factory.mktemp("set"))


def check_all_rows(data: bytes, suffix: str, folder: Path) -> None:
    """A file is refused in one line, or each of its rows is asked or refused, and has a line."""
    path = folder / f"set{suffix}"
    path.write_bytes(data)
    try:
        found = open_data_set(path, Asking())
    except ConfigError:
        return
    records = []
    for row in range(len(found)):
        assert found.length(row) >= 0
        try:
            found.item(row)
            records.append(record(row))
        except ApiError as error:
            records.append(refused(row, error))
    assert len(answers(found, folder / "out.jsonl", records)) == len(found) > 0


@given(data=st.lists(st.sampled_from([b"\n", b" ", b"a", b"bc", b"\r", b"\xef\xbb\xbf"])))
def test_lines_are_those_of_the_whole_text(
    data: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "set.jsonl"
    path.write_bytes(b"".join(data))
    whole = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = LineFile(path)
    assert [lines[index] for index in range(len(lines))] == [each for each in whole if each.strip()]
    numbers = [number for number, each in enumerate(whole, start=1) if each.strip()]
    assert [lines.place(index) for index in range(len(lines))] == [f"{path}:{n}" for n in numbers]
