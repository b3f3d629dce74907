"""Lines of runs: exact round trips, refused when damaged or of something else; comparisons."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.results.stats import mcnemar
from tilewright.evaluate.results.target_runs import (
    VERSION,
    TargetRun,
    append_run,
    check_same,
    compare_runs,
    figures,
    latest,
    read_runs,
)
from tilewright.utils.json_lines import Located, TornLineWarning

FIVES = [(i, i + 1, i + 2, i + 3, i + 4) for i in range(8)]


def make(
    guesses: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 7),
    kl: Sequence[float] = (1e-5,) * 8,
    *,
    fives: Sequence[Sequence[int]] = FIVES,
    **changes: Any,
) -> TargetRun:
    values: dict[str, Any] = {
        "version": VERSION,
        "model": "tiny",
        "model_hash": "a" * 64,
        "text_hash": "b" * 64,
        "num_windows": 1,
        "precision": "bf16",
        "precision_id": "p1",
        "heading": "precision_cfg = {}, fidelity_cfg = {}",
        "effective_id": "e1",
        "target": "cpu",
        "compute": "fast",
        "batch": 1,
        "device": "CPU",
        "device_detail": "a processor, 2 threads",
        "versions": {"python": "3"},
        "commit": None,
        "host": "h",
        "timestamp": "2025-01-01T00:00:00+00:00",
        **figures(guesses, fives, kl),
    }
    return TargetRun(**{**values, **changes})


def test_the_figures_by_hand() -> None:
    """Right; among the five; wrong; right."""
    found = figures((0, 3, 9, 3), FIVES[:4], (0.1, 0.2, 0.30000004, 0.4))
    assert (found["num_positions"], found["num_top1"], found["num_top5"]) == (4, 2, 3)
    assert found["expected"] == (0, 1, 2, 3) and found["top5_hits"] == "d"
    assert found["kl"] == (0.1, 0.2, 0.3, 0.4), "six digits are kept"
    assert found["kl_mean"] == pytest.approx(0.25)
    assert found["kl_error"] == pytest.approx(math.sqrt(0.05 / 3 / 4))


def test_a_file_gives_back_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    runs = [make(), make((0, 3, 9, 3, 4, 5, 6, 7), [i / 3e7 for i in range(8)], target="cuda")]
    for run in runs:
        append_run(path, run)
    assert read_runs(path) == [
        Located(f"{path}:{number}", run) for number, run in enumerate(runs, start=1)
    ]
    assert [run.run for run in runs] == ["cpu", "cuda"]
    assert make(compute="exact").run == "cpu:exact"


def changed(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda values: values | changes


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (changed(version=2), "version 2; allowed: 1"),
        (changed(unknown=1), "unknown"),
        (changed(guesses="text"), "guesses"),
        (changed(guesses=[0.5] * 8), "guesses"),
        (changed(guesses=[0] * 7), "7 guesses for 8 positions"),
        (changed(kl=[1e-5] * 9), "9 kl for 8 positions"),
        (changed(kl=[1e-5] * 7 + [2e-5]), "figures beside them"),
        (changed(kl=[-1e-5] * 8), "below 0"),
        (changed(guesses=[1, *range(1, 8)]), "figures beside them"),
        (changed(num_top5=7), "figures beside them"),
        (changed(top5_hits="f"), "1 digits for 8 positions"),
        (changed(top5_hits="fx"), "'x'"),
        (changed(num_positions=1, expected=[0], guesses=[0], kl=[0.0], top5_hits="8"), "two"),
        (changed(model=None), "model"),
        (lambda values: {k: v for k, v in values.items() if k != "kl"}, "kl"),
        (lambda values: [values], "object"),
    ],
)
def test_a_damaged_line_is_one_line_of_complaint(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = tmp_path / "runs.jsonl"
    append_run(path, make())
    values = json.loads(path.read_text())
    path.write_text(path.read_text() + json.dumps(damage(values)) + "\n")
    with pytest.raises(ConfigError) as raised:
        read_runs(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:2: not a run: ") and said in message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize("line", [b"{", b"nonsense", b"\xff\xfe", b'{"a": NaN}', b"[" * 100000])
def test_what_is_no_json_is_one_line_of_complaint(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=r"runs\.jsonl:1: not a run: ") as raised:
        read_runs(path)
    assert "\n" not in str(raised.value)


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    append_run(path, make())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [each.record for each in read_runs(path)] == [make()]
    assert [each.category for each in caught] == [TornLineWarning]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^runs file .*nosuch.jsonl: "):
        read_runs(tmp_path / "nosuch.jsonl")


@pytest.mark.parametrize(
    ("field", "said"), [("model_hash", "another model"), ("text_hash", "another text")]
)
def test_runs_of_something_else_are_not_joined(field: str, said: str) -> None:
    same = [Located("f:1", make()), Located("f:2", make(target="cuda"))]
    wanted = {"model_hash": "a" * 64, "text_hash": "b" * 64, "what": "f:1"}
    check_same(same, **wanted)
    changes: dict[str, Any] = {field: "c" * 64}
    other = Located("g:7", make(**changes))
    with pytest.raises(ConfigError, match=rf"^g:7: is of {said}, 'cccccccccccc' in 1 windows; "):
        check_same([*same, other], **wanted)


def test_of_a_run_made_twice_the_last_counts() -> None:
    runs = [make(), make(target="cuda"), make(compute="exact"), make(host="later")]
    runs.append(make(precision="other", precision_id="p2"))
    found = latest([Located(str(number), run) for number, run in enumerate(runs)])
    assert found == [runs[3], runs[1], runs[2], runs[4]]


def test_runs_are_compared_within_their_precision() -> None:
    base = make((0, 1, 2, 3, 9, 9, 9, 7), [1e-5] * 8)
    exact = make(kl=[1e-5, 3e-5] * 4, compute="exact")
    ours = make((0, 9, 9, 3, 4, 9, 9, 7), [2e-5, 6e-5] * 4, target="cuda")
    alone = make((9,) * 8, precision="other", precision_id="p2", target="cuda")
    found = compare_runs([base, exact, ours, alone])
    assert [each.run for each in found] == [base, exact, ours, alone]
    assert [each.num_top1 for each in found] == [5, 8, 4, 0]
    assert [each.num_unlike for each in found] == [0, 0, 0, 0]
    pairs = [each.paired for each in found]
    assert pairs[0] is None and pairs[3] is None
    assert pairs[1] is not None and (pairs[1].b, pairs[1].c) == (0, 3)
    assert pairs[2] is not None and (pairs[2].b, pairs[2].c) == (2, 1)
    assert pairs[2].p == mcnemar(2, 1)
    exactly = [each.paired_exact for each in found]
    assert exactly[1] is None and exactly[3] is None
    assert exactly[0] is not None and (exactly[0].b, exactly[0].c) == (3, 0)
    assert exactly[2] is not None and (exactly[2].b, exactly[2].c) == (4, 0)
    assert (pairs[2].base, exactly[2].base) == ("cpu", "cpu:exact")
    ratios = [each.kl_ratio for each in found]
    assert ratios[1] is None and ratios[3] is None
    assert ratios[0] is not None and ratios[0].ratio == pytest.approx(0.5)
    assert ratios[2] is not None and ratios[2].ratio == pytest.approx(2.0)
    assert ratios[2].interval == pytest.approx((2.0, 2.0)), "every position's is 2: no doubt"


def test_a_tie_broken_otherwise_is_counted_against_one_reference() -> None:
    """The run was right of its own reference everywhere; of the first one's, but once."""
    fives = [(i, i + 1, i + 2, i + 3, i + 4) for i in range(400)]
    other = [(8, 7, 9, 10, 11) if i == 7 else five for i, five in enumerate(fives)]
    kl = (1e-5,) * 400
    first = make(range(400), kl, fives=fives)
    second = make([five[0] for five in other], kl, fives=other, target="cuda")
    assert second.num_top1 == 400
    found = compare_runs([first, second])[1]
    assert (found.num_top1, found.num_unlike) == (399, 1)
    assert found.paired is not None and (found.paired.b, found.paired.c) == (1, 0)


def test_a_reference_that_differs_at_many_positions_is_refused() -> None:
    other = [(five[1], five[0], *five[2:]) for five in FIVES]
    with pytest.raises(ConfigError, match=r"^bf16 on cuda: its fp32 reference .* at 8 of 8 "):
        compare_runs([make(), make(fives=other, target="cuda")])


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    append_run(path, make())
    values = json.loads(path.read_text())
    assert values == msgspec.to_builtins(make()) | {
        name: list(getattr(make(), name)) for name in ("expected", "guesses", "kl")
    }
