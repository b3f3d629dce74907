"""Teacher forcing, KL, counts, and the predictions kept for comparison."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import compiled, precision_of, random_tokens, tiny_model
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.errors import CompileError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT
from tilewright.evaluate.cases.reference import AccuracyReference, Subject, build_reference
from tilewright.evaluate.measure import accuracy
from tilewright.evaluate.measure.accuracy import (
    BASE,
    Predictions,
    divergence,
    predictions_key,
    recall,
    remember,
    score,
    teacher_force,
)
from tilewright.evaluate.results.stats import mcnemar, wilson_interval

SUBJECT = Subject("tiny", "m", "t", "x")


def reference_of(*guesses: tuple[int, ...]) -> AccuracyReference:
    tokens = tuple(range(2 + len(guesses)))
    return AccuracyReference(SUBJECT, 2, tokens, guesses, (0.0,) * len(guesses), {})


FIVES = ((1, 2, 3, 4, 5), (6, 7, 8, 9, 0), (3, 1, 4, 5, 9), (2, 7, 1, 8, 0))


def test_counts_by_hand() -> None:
    """Right, among the five, wrong, right."""
    found = score(Predictions((1, 9, 2, 2), (0.1, 0.2, 0.3, 0.4)), reference_of(*FIVES))
    assert (found.num_positions, found.num_top1, found.num_top5) == (4, 2, 3)
    assert found.top1_interval == wilson_interval(2, 4)
    assert found.top5_interval == wilson_interval(3, 4)
    assert found.kl_mean == pytest.approx(0.25)
    assert found.reference_id == reference_of(*FIVES).id
    assert found.paired is None
    assert found.hits == "9"
    assert found.kl_error == pytest.approx(math.sqrt(0.05 / 3 / 4))
    assert found.text == "accuracy"
    assert score(Predictions((1, 9, 2, 2), ()), reference_of(*FIVES), text="mine").text == "mine"


def test_without_reference_logits_there_is_no_kl() -> None:
    found = score(Predictions((1, 6, 3, 2), ()), reference_of(*FIVES))
    assert found.kl_mean is None and found.kl_error is None


def test_the_paired_comparison_counts_the_positions_only_one_got_right() -> None:
    ours = Predictions((1, 0, 3, 0), ())  # right, wrong, right, wrong
    base = Predictions((1, 6, 0, 2), ())  # right, right, wrong, right
    paired = score(ours, reference_of(*FIVES), base=base).paired
    assert paired is not None
    assert (paired.base, paired.b, paired.c) == (BASE, 2, 1)
    assert paired.p == mcnemar(2, 1)


def test_predictions_of_another_length_are_our_bug() -> None:
    with pytest.raises(ValueError, match="zip"):
        score(Predictions((1, 2), ()), reference_of(*FIVES))


logits = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12)


@given(logits)
def test_a_distribution_does_not_diverge_from_itself(values: list[float]) -> None:
    row = torch.tensor(values)
    assert divergence(row, row) == 0.0
    assert divergence(row, row + 7.0) < 1e-6, "only differences of logits matter"


@given(logits, st.integers(0, 2**31))
def test_divergence_is_the_sum_over_the_vocabulary(values: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.tensor(values)
    found = wanted + torch.randn(len(values), generator=generator)
    p, q = (torch.softmax(row.double(), 0) for row in (wanted, found))
    expected = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True) if a)
    assert divergence(wanted, found) == pytest.approx(max(0.0, expected), abs=1e-9)
    assert divergence(wanted, found) >= 0


def test_divergence_by_hand() -> None:
    half, quarter = torch.tensor([0.0, 0.0]), torch.tensor([0.0, math.log(3)])
    assert divergence(half, quarter) == pytest.approx(0.5 * math.log(4 / 3))
    assert divergence(quarter, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_nan_is_no_agreement() -> None:
    row = torch.tensor([0.0, 1.0])
    assert math.isnan(divergence(row, torch.tensor([0.0, math.nan])))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(odd: float) -> None:
    made = compiled(tiny_model())
    step, reference = made.step, reference_of(*FIVES)

    def broken(given: Step) -> StepOutput:
        output = step(given)
        for part in output.parts:
            assert part.logits is not None
            part.logits()[0, 7] = odd
        return output

    made.step = broken  # type: ignore[method-assign]
    with pytest.raises(CompileError, match="predicted position 0 are not finite"):
        teacher_force(made, reference)


def test_predictions_of_other_code_or_another_device_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (SimpleNamespace(device_name="H200", device_detail=d) for d in ("a", "b"))
    of = {"target": "cuda", "compute": "fast", "precision_id": "p"}

    def key(executable: object) -> str:
        return predictions_key(executable, **of)  # type: ignore[arg-type]

    known = key(one)
    assert known == key(one) != key(other)
    monkeypatch.setattr(accuracy, "sources_digest", lambda: "other code")
    assert key(one) != known


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def test_predictions_are_kept_by_reference_and_key(cache: Path) -> None:
    reference = reference_of(*FIVES)
    assert recall(reference, "cpu-fast-bf16") is None
    remember(Predictions((1, 2, 3, 4), (0.5,) * 4), reference, "cpu-fast-bf16")
    assert recall(reference, "cpu-fast-bf16") == Predictions((1, 2, 3, 4), ())
    assert recall(reference, "cpu-exact-bf16") is None
    assert recall(reference_of(*FIVES[::-1]), "cpu-fast-bf16") is None


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2", b"{}", b"3", b"[1, 2, 3]", b"\xff", b"[1, 2, 3, 4, 5]"]
)
def test_damaged_predictions_are_as_good_as_none(cache: Path, content: bytes) -> None:
    reference = reference_of(*FIVES)
    remember(Predictions((1, 2, 3, 4), ()), reference, "key")
    (path,) = cache.rglob("key.json")
    path.write_bytes(content)
    assert recall(reference, "key") is None


MODEL = tiny_model(max_positions=ACCURACY_CONTEXT, std=0.2)


def executable(target: str, weights: str = "fp32") -> Executable:
    return compiled(
        MODEL,
        target,
        precision=precision_of(weights),
        max_batch=2,
        max_context=ACCURACY_CONTEXT,
    )


@pytest.fixture(scope="module")
def truth() -> tuple[AccuracyReference, torch.Tensor]:
    return build_reference(executable("reference"), SUBJECT, random_tokens(ACCURACY_CONTEXT))


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_the_same_model_is_right_everywhere(
    truth: tuple[AccuracyReference, torch.Tensor], target: str
) -> None:
    reference, expected = truth
    told: list[tuple[int, int]] = []
    found = executable(target)
    on_step = lambda *news: told.append(news)  # noqa: E731
    predictions = teacher_force(found, reference, expected, on_step=on_step)
    accuracy = score(predictions, reference)
    assert (accuracy.num_top1, accuracy.num_top5, accuracy.num_positions) == (512, 512, 512)
    assert accuracy.kl_mean is not None and 0 <= accuracy.kl_mean < 1e-8
    assert told == [(step, 512) for step in range(1, 513)]
    found.close()


def test_a_coarser_format_is_less_right(truth: tuple[AccuracyReference, torch.Tensor]) -> None:
    """And the logits are compared at the position they belong to: shifted ones diverge far more."""
    reference, expected = truth
    found = executable("cpu", "bfp4")
    predictions = teacher_force(found, reference, expected)
    accuracy = score(predictions, reference)
    shifted = teacher_force(found, reference, expected.roll(1, 0))
    found.close()
    assert accuracy.kl_mean is not None and 1e-4 < accuracy.kl_mean < sum(shifted.kl) / 512 / 2
    assert 200 < accuracy.num_top1 < 512


def test_without_logits_guesses_are_the_same(truth: tuple[AccuracyReference, torch.Tensor]) -> None:
    reference, expected = truth
    found = executable("cpu", "bfp8")
    without, known = (teacher_force(found, reference, each) for each in (None, expected))
    assert without.guesses == known.guesses
    assert without.kl == ()
    found.close()
