"""What benchmarks read: PERF.md, lines of results, prompts, references; within bounds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.limits import guarded
from tests.fuzz.mutations import Mutation, damaged_trees, mutations
from tilewright.evaluate.cases.prompts import MAX_FILE_BYTES, read_prompts
from tilewright.evaluate.cases.reference import (
    AccuracyReference,
    Subject,
    cached_logits,
    load_reference,
    reference_bytes,
)
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.results import result_file as results
from tilewright.evaluate.results.record import Repeat
from tilewright.utils.json_lines import TornLineWarning

SEED = (Path(__file__).parents[1] / "goldens" / "seed_perf.md").read_bytes()
SUBJECT = Subject("a model", "m" * 64, "t" * 64, "x" * 64)
REFERENCE = AccuracyReference(SUBJECT, 2, (1, 2, 3), ((1, 2, 3, 4, 5),), (0.5,), {"torch": "2"})
PROMPTS: Any = [{"prompt": "one"}, {"prompt": "two", "max_tokens": 3}]
RESULT: dict[str, Any] = {
    **{"schema": 1, "case": "c", "model": "m", "weights": "random", "model_hash": "h"},
    **{"device": "CPU", "device_detail": "d", "target": "cpu", "mesh": "1x1", "dp": 1, "batch": 1},
    **{"prompt_length": 128, "num_generated": 2, "context": 130, "precision_name": "p"},
    **{"precision_id": "i", "heading": "precision_cfg = {a: b}, fidelity_cfg = {c: d}"},
    **{"effective_id": "e", "compute": "fast", "kind": "measured", "peak_memory_bytes": 1},
    **{"repeats": [dict.fromkeys(Repeat.__dataclass_fields__, 1.0)]},
    **dict.fromkeys(("ttft_ms", "ttft_first_ms", "ttft_median_ms", "ttft_last_ms"), 1.0),
    **dict.fromkeys(("prefill_tps", "decode_tsu", "tps", "spread", "ttft_spread"), 1.0),
    **dict.fromkeys(("resident_bytes", "cache_bytes"), 1),
    "accuracy": {
        **{"reference_id": "r", "num_positions": 4, "num_top1": 2, "num_top5": 3},
        **{"top1_interval": [0.1, 0.9], "top5_interval": [0.1, 0.9], "kl_mean": 0.1},
        "paired": {"base": "b", "b": 1, "c": 2, "p": 0.5},
        **{"hits": "c", "kl_error": 0.1, "text": "held-out"},
    },
    "contract": [
        {"field": "f", "requested": "r", "status": "s", "effective": "e", "layers": ""},
    ],
    **{"versions": {"torch": "2"}, "commit": None, "host": "", "timestamp": "2026-01-01T00:00:00Z"},
}
READERS = {
    "PERF.md": perf_md.load,
    "results.jsonl": results.read,
    "prompts.json": read_prompts,
    "reference.json": lambda path: load_reference(path, SUBJECT),
}
SOUND = {
    "PERF.md": SEED,
    "results.jsonl": json.dumps(RESULT).encode() + b"\n",
    "prompts.json": json.dumps(PROMPTS).encode(),
    "reference.json": reference_bytes(REFERENCE),
}
names = pytest.mark.parametrize("name", READERS)


def check(name: str, raw: bytes, folder: Path, **limits: float) -> str:
    path = folder / name
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        return guarded(lambda: READERS[name](path), file_size=len(raw), **limits)


@names
def test_the_sound_files_are_read(name: str, scratch: Path) -> None:
    assert check(name, SOUND[name], scratch) == ""


@names
@given(mutation=mutations(max_steps=6))
@example(mutation=lambda raw: raw.replace(b"Model ", b"Model\0"))
def test_damaged_files(name: str, mutation: Mutation, scratch: Path) -> None:
    check(name, mutation(SOUND[name]), scratch)


@given(tree=damaged_trees(RESULT))
def test_results_of_odd_values(tree: Any, scratch: Path) -> None:
    check("results.jsonl", json.dumps(tree).encode() + b"\n", scratch)


@given(tree=damaged_trees(PROMPTS))
def test_prompts_of_odd_values(tree: Any, scratch: Path) -> None:
    check("prompts.json", json.dumps(tree).encode(), scratch)


def sealed(tree: Any) -> bytes:
    """A reference file whose id fits what it says, where there can be one."""
    try:
        body = {key: value for key, value in tree.items() if key != "id"}
        made = AccuracyReference(**{**body, "subject": Subject(**body["subject"])})
        tree = {**tree, "id": made.id}
    except (TypeError, ValueError, AttributeError, KeyError):
        pass
    return json.dumps(tree).encode()


@given(tree=damaged_trees(json.loads(SOUND["reference.json"])))
@example(
    tree={
        **json.loads(SOUND["reference.json"]),
        "subject": {"model": 5, "model_hash": "", "tokenizer_hash": "", "text_hash": ""},
    }
)
def test_references_of_odd_values(tree: Any, scratch: Path) -> None:
    check("reference.json", sealed(tree), scratch)


@names
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"NaN", b"[" * 100_000 + b"\n"),
        *(b'{"a":' * 100_000 + b"\n", b'[{"max_tokens": ' + b"9" * 100_000 + b"}]\n"),
        *(b'{"schema": ' + b"9" * 100_000 + b"}\n", b"|" * 100_000, b" " * 100_000),
        *(b'{"schema": ' + b"[" * depth + b"]" * depth + b"}\n" for depth in (400, 900, 990)),
        *(b'{"schema": "' + b"x" * 100_000 + b'", "' + b"y" * 100_000 + b'": 1}\n',),
    ],
    ids=lambda raw: f"{raw[:12]!r}-{len(raw)}"[2:],
)
def test_files_of_odd_forms(name: str, raw: bytes, scratch: Path) -> None:
    check(name, raw, scratch, factor=100)


def test_prompts_without_end_are_refused_by_size(scratch: Path) -> None:
    path = scratch / "long.json"
    with path.open("wb") as file:
        file.truncate(10**10)
    said = guarded(lambda: read_prompts(path), file_size=MAX_FILE_BYTES)
    path.unlink()
    assert "too large" in said


cells = st.sampled_from(
    (
        *("", "1", "-1", "1e999", "1e-999", "nan", "inf", "0x10", "99999", "１", "1_0", "\x1b[31m"),
        *("m", "CPU", "T3K (DP=4)", "T3K (DP=0)", "(DP=1)", "a (1x2) (1x2)", "(random weights)"),
        *("\\|", "`|`", "\x85", "\u2028", "9" * 400, "a" * 400),
    )
)
columns = st.sampled_from(
    (
        "Model",
        "Device",
        "Precision",
        "Top-1 (%)",
        "Speed (t/s/u)",
        "TTFT (ms)",
        "avg TTFT (ms)",
        "x",
    )
)
titles = st.sampled_from(
    (
        *("# Performance", "## Accuracy", "# Long-context (32k tokens)", "# predicted results"),
        *("## Short-Context, Batch-32", "## precision_cfg = {a: b}, fidelity_cfg = {c: d}"),
        *("## precision_cfg = \x1b", "#", "```", "<!-- tilewright:begin x -->", "# Accuracy\u2028"),
    )
)


@st.composite
def tables(draw: st.DrawFn) -> str:
    names = draw(st.lists(columns, min_size=1, max_size=5))
    width = st.lists(cells, min_size=len(names) - 1, max_size=len(names) + 1)
    rows = [names, ["---"] * len(names), *draw(st.lists(width, max_size=3))]
    end = draw(st.sampled_from(("\n", "\r\n", "\r", " \n")))
    return draw(titles) + "\n\n" + "".join("|" + "|".join(row) + "|" + end for row in rows)


@given(parts=st.lists(tables(), min_size=1, max_size=3))
def test_tables_of_odd_cells(parts: list[str], scratch: Path) -> None:
    check("PERF.md", "".join(parts).encode(), scratch)


def test_a_results_file_without_lines_is_mended_in_one_pass(scratch: Path) -> None:
    path = scratch / "torn.jsonl"
    path.write_bytes(b"x" * (8 << 20))
    result = results.loads(SOUND["results.jsonl"].decode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        assert guarded(lambda: results.append(path, result), file_size=8 << 20) == ""
    assert results.read(path) == [result]


@pytest.mark.parametrize("claim", ["(1, 2500000000)", "(100000000000, 1)", "(-1, 1)", "(1,)"])
def test_kept_logits_that_lie(claim: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(scratch))
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {claim}, }}"
    raw = b"\x93NUMPY\x01\x00" + len(header + "\n").to_bytes(2, "little") + f"{header}\n".encode()
    path = scratch / "references" / f"a-model-{REFERENCE.id}.npy"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw + bytes(64))
    found = []
    guarded(lambda: found.append(cached_logits(REFERENCE)), file_size=len(raw))
    assert found == [None]
