"""Results: exact round trips, torn and malformed lines, writers side by side, the environment."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.results import result_file as results
from tilewright.evaluate.results.record import (
    KINDS,
    SCHEMA,
    Accuracy,
    Ceilings,
    ContractLine,
    Paired,
    Repeat,
    Result,
    medians,
    pack_hits,
    unpack_hits,
)
from tilewright.utils.environment import commit, environment
from tilewright.utils.json_lines import TornLineWarning

HEADING = "precision_cfg = {ff1_3: bfp8, ff2: bfp8}, fidelity_cfg = {li_ff1_3: hifi2}"


def make(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "case": "performance-ci-1",
        "model": "SmolLM2-135M-Instruct",
        "weights": "checkpoint",
        "model_hash": "abc",
        "device": "CPU",
        "device_detail": "a processor, 2 threads",
        "target": "cpu",
        "batch": 1,
        "prompt_length": 128,
        "num_generated": 200,
        "context": 328,
        "precision_name": "performance",
        "precision_id": "p1",
        "heading": HEADING,
        "effective_id": "e1",
        "timestamp": "2026-01-02T03:04:05+00:00",
    }
    return Result(**{**fields, **changes})


def full() -> Result:
    repeats = (
        Repeat(ttft_ms=100.1, prefill_tps=1200.3, decode_tsu=110.0, tps=110.0),
        Repeat(ttft_ms=101.7, prefill_tps=1300.0, decode_tsu=1 / 3, tps=112.5),
    )
    return make(
        repeats=repeats,
        **medians(repeats),
        peak_memory_bytes=2**40 + 1,
        resident_bytes=0,
        accuracy=Accuracy.from_counts(
            "ref-1",
            num_positions=512,
            num_top1=470,
            num_top5=510,
            kl_mean=0.1 + 0.2,
            paired=Paired.from_counts("bf16", b=10, c=3),
            hits=pack_hits([True] * 470 + [False] * 42),
            kl_error=0.01,
            text="held-out",
        ),
        contract=(ContractLine("ff2", "bfp8", "honoured", "bfp8"),),
        versions={"python": "3.11.7", "ünïcode": "\u20ac"},
        commit="0123",
        host="host",
    )


# Of no category but letters, marks, digits, punctuation and symbols: printable, without blanks.
names = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="|()"), min_size=1, max_size=12
)
numbers = st.none() | st.floats(0, 1e15)
counts = st.integers(1, 10**6)


@st.composite
def any_results(draw: st.DrawFn) -> Result:
    repeats = tuple(
        Repeat(*values) for values in draw(st.lists(st.tuples(*[numbers] * 7), max_size=3))
    )
    num_top1, num_top5, num_positions = sorted(draw(st.tuples(counts, counts, counts)))
    hits = None
    if num_positions < 1000:
        hits = pack_hits([at < num_top1 for at in range(num_positions)])
    accuracy = Accuracy.from_counts(
        draw(st.text(max_size=5)),
        num_positions=num_positions,
        num_top1=num_top1,
        num_top5=num_top5,
        kl_mean=draw(numbers),
        hits=hits,
        kl_error=draw(numbers),
        text=draw(names),
    )
    return make(
        case=draw(names),
        model=draw(names),
        weights=draw(st.sampled_from(["checkpoint", "random"])),
        kind=draw(st.sampled_from(KINDS)),
        dp=draw(counts),
        mesh=f"{draw(st.integers(1, 99))}x{draw(st.integers(1, 99))}",
        repeats=repeats,
        decode_tsu=draw(numbers),
        peak_memory_bytes=draw(st.none() | counts),
        accuracy=draw(st.sampled_from([None, accuracy])),
        contract=tuple(
            ContractLine(*texts)
            for texts in draw(st.lists(st.tuples(*[st.text(max_size=5)] * 4), max_size=2))
        ),
        versions=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
        commit=draw(st.none() | st.text(max_size=5)),
    )


@given(any_results())
def test_a_line_gives_back_an_equal_result(result: Result) -> None:
    line = results.dumps(result)
    assert "\n" not in line
    assert line.isascii()
    assert results.loads(line) == result


def test_append_makes_the_folder_and_read_gives_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "results.jsonl"
    written = [full(), make(), full()]
    for result in written:
        results.append(path, result)
    assert results.read(path) == written
    assert path.read_bytes().endswith(b"}\n")
    assert json.loads(path.read_text().splitlines()[0])["schema"] == SCHEMA


def test_medians_and_spreads() -> None:
    repeats = [Repeat(ttft_ms=t, decode_tsu=d) for t, d in ((10, 90), (12, 100), (11, 95))]
    found = medians(repeats)
    assert (found["ttft_ms"], found["decode_tsu"], found["tps"]) == (11, 95, None)
    assert found["spread"] == pytest.approx(10 / 95)
    assert found["ttft_spread"] == pytest.approx(2 / 11)


def test_one_measurement_shows_no_spread() -> None:
    assert medians([Repeat(decode_tsu=5.0)])["spread"] is None
    assert medians([])["decode_tsu"] is None


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not a result: Input data was truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ("[" * 100_000, "not a result"),
        ("1" * 10_000, "Number out of range"),
        ('{"schema":1,"spread":NaN}', "JSON is malformed: invalid character"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    good = results.dumps(make())
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        results.read(path)
    assert f"{path}:2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=":1: not a result: JSON is malformed"):
        results.read(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema": 2, "later": 1}, "schema 2; allowed: 1 .*'later'"),
        ({"later": 1}, "unknown field 'later'"),
        ({"schema": None}, "schema None"),
        ({"schema": True}, "schema True"),
        ({"batch": "1"}, r"Expected `int`, got `str` - at `\$\.batch`"),
        ({"batch": True}, r"got `bool` - at `\$\.batch`"),
        ({"batch": 1.0}, r"got `float` - at `\$\.batch`"),
        ({"batch": 0}, "batch 0; allowed: >= 1"),
        ({"decode_tsu": "fast"}, r"at `\$\.decode_tsu`"),
        ({"decode_tsu": -1.0}, "decode_tsu -1.0"),
        ({"peak_memory_bytes": 10**400}, "peak_memory_bytes"),
        ({"kind": "guessed"}, "kind 'guessed'; allowed: measured, emulated"),
        ({"weights": "none"}, "weights 'none'"),
        ({"compute": 3}, r"at `\$\.compute`"),
        ({"mesh": "0x1"}, "mesh '0x1'"),
        ({"model": "a|b"}, "model 'a|b'"),
        ({"device": "T3K (DP=4)"}, "fields of their own"),
        ({"heading": "bfp8"}, "heading 'bfp8'"),
        ({"timestamp": "yesterday"}, "timestamp 'yesterday'"),
        ({"timestamp": "2026-01-01T00:00:00"}, "with an offset"),
        ({"repeats": [{"ttft_ms": 1}]}, "missing field 'repeats\\[0\\].prefill_tps'"),
        ({"repeats": {}}, "missing field 'repeats.ttft_ms'"),
        ({"versions": {"torch": 2}}, r"got `int` - at `\$\.versions"),
        ({"accuracy": {"x": 1}}, "unknown field 'accuracy.x'"),
        ({"accuracy": 3}, r"at `\$\.accuracy`"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    values = {**make().to_dict(), **change}
    with pytest.raises(ConfigError, match=message.replace("a|b", "a\\|b").replace("(DP", "\\(DP")):
        results.loads(json.dumps(values))


def test_accuracy_counts_and_intervals_are_checked() -> None:
    with pytest.raises(ConfigError, match="accuracy counts 5, 4 of 10"):
        Accuracy("r", 10, 5, 4, (0, 1), (0, 1))
    with pytest.raises(ConfigError, match="interval"):
        Accuracy("r", 10, 4, 5, (0.9, 0.1), (0, 1))
    with pytest.raises(ConfigError, match="kl_mean"):
        Accuracy("r", 10, 4, 5, (0, 1), (0, 1), kl_mean=float("nan"))
    with pytest.raises(ConfigError, match="kl_error"):
        Accuracy("r", 10, 4, 5, (0, 1), (0, 1), kl_error=-1e-9)
    with pytest.raises(ConfigError, match=r"text 'a\|b'"):
        Accuracy("r", 10, 4, 5, (0, 1), (0, 1), text="a|b")
    assert Accuracy("r", 10, 4, 5, (0, 1), (0, 1), hits="3c0").num_top1 == 4
    for hits, message in (("3e0", "hits are 5; allowed: 4"), ("3c", "2 digits"), ("3c1", "behind")):
        with pytest.raises(ConfigError, match=message):
            Accuracy("r", 10, 4, 5, (0, 1), (0, 1), hits=hits)


def test_hits_by_hand() -> None:
    assert pack_hits([]) == ""
    assert pack_hits([True]) == "8"
    assert pack_hits([False, False, False, True, True, True]) == "1c"
    assert unpack_hits("1c", 6) == (False, False, False, True, True, True)


@given(st.lists(st.booleans(), max_size=40))
def test_hits_come_back(hits: list[bool]) -> None:
    text = pack_hits(hits)
    assert unpack_hits(text, len(hits)) == tuple(hits)
    for length in {len(hits) + 4, max(len(hits) - 4, 0)} - {len(hits)}:
        with pytest.raises(ConfigError, match="digits for"):
            unpack_hits(text, length)


@given(st.text(max_size=4), st.integers(0, 16))
def test_any_hits_are_read_or_refused(text: str, num_positions: int) -> None:
    try:
        hits = unpack_hits(text, num_positions)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert pack_hits(hits) == text


@pytest.mark.parametrize("text", ["F0", "0x", " 8", "8_", "８0"])
def test_hits_of_other_characters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="hits hold"):
        unpack_hits(text, 8)


def test_a_record_holds_the_ceilings_of_its_run() -> None:
    ceilings = Ceilings("H200", (4e12, 4.1e12), (7e14,), "bf16")
    result = make(ceilings=ceilings, sampling="temperature 1")
    assert results.loads(results.dumps(result)) == result
    for broken in ((), (0.0,), (float("nan"),)):
        with pytest.raises(ConfigError, match="ceilings: reads"):
            Ceilings("H200", broken, (1.0,), "bf16")
    old = make().to_dict()
    del old["ceilings"], old["sampling"]
    assert results.loads(json.dumps(old)) == make()


LATER = ("hits", "kl_error", "text")


def test_lines_from_before_a_field_was_added_are_read() -> None:
    values = full().to_dict()
    for name in LATER:
        del values["accuracy"][name]
    found = results.loads(json.dumps(values)).accuracy
    assert found is not None and (found.hits, found.kl_error, found.text) == (
        None,
        None,
        "accuracy",
    )


@pytest.mark.parametrize("name", sorted({f.name for f in dataclasses.fields(Accuracy)} - {*LATER}))
def test_every_other_field_is_required(name: str) -> None:
    values = full().to_dict()
    del values["accuracy"][name]
    with pytest.raises(ConfigError, match=f"missing field 'accuracy.{name}'"):
        results.loads(json.dumps(values))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(make().to_dict())), json_values)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: object) -> None:
    line = json.dumps({**make().to_dict(), field: value})
    try:
        result = results.loads(line)
    except TilewrightError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert results.loads(results.dumps(result)) == result


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "results.jsonl"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        message = ""
        try:
            assert results.read(path) == []
        except TilewrightError as error:
            message = str(error)
        assert not message or str(path) in message


def test_environment_names_versions_host_and_time() -> None:
    found = environment(("pytest", "no-such-distribution-here"), hash_host=True)
    assert found.versions["pytest"] == pytest.__version__
    assert found.versions["python"].startswith("3.")
    assert "no-such-distribution-here" not in found.versions
    assert len(found.host) == 12
    assert int(found.host, 16) >= 0
    assert make(timestamp=found.timestamp).when.tzinfo is not None


def test_commit_of_a_checkout_alone(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert commit(tmp_path) is None
    git("init", "-q")
    assert commit(tmp_path) is None
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "one", "--no-gpg-sign")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tool.py").write_text("what measuring wrote")
    assert commit(tmp_path) == head
    (tmp_path / "pass.py").write_text("a source that git does not track")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "pass.py").unlink()
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, tilewright.evaluate.results.result_file;"
        "import tilewright.evaluate.report.perf_tables;"
        "sys.exit('torch' in sys.modules or 'onnxruntime' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
