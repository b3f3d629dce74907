"""Windows: cut so that no token is predicted twice, and forced alone or side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.tiny import compiled, precision_of, tiny_model
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.errors import CompileError, ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, ACCURACY_PREFILL
from tilewright.evaluate.cases.prompts import bench_text
from tilewright.evaluate.cases.reference import Subject, text_hash, text_tokens
from tilewright.evaluate.cases.windows import (
    NUM_COUNTED,
    TEXTS,
    build_windows,
    cut_windows,
    windows_hash,
)
from tilewright.evaluate.measure.accuracy import Truth, teacher_force

VOCAB = 61
MODEL = tiny_model(max_positions=ACCURACY_CONTEXT, std=0.2)
SUBJECT = Subject("tiny", "m", "t", "not read")
NUM_WINDOWS = 3


def encode(text: str) -> list[int]:
    """One id a character."""
    return [ord(character) % VOCAB for character in text]


def executable(target: str, weights: str = "fp32") -> Executable:
    return compiled(
        MODEL,
        target,
        precision=precision_of(weights),
        max_batch=2,
        max_context=ACCURACY_CONTEXT,
    )


@pytest.fixture(scope="module")
def windows() -> list[Truth]:
    told: list[tuple[int, int]] = []
    found = build_windows(
        executable("reference"),
        SUBJECT,
        cut_windows(encode, NUM_WINDOWS),
        on_window=lambda *news: told.append(news),
    )
    assert told == [(number, NUM_WINDOWS) for number in (1, 2, 3)]
    return found


@pytest.fixture
def coarse() -> Iterator[Executable]:
    found = executable("cpu", "bfp4")
    yield found
    found.close()


def test_the_first_window_is_the_accuracy_cases() -> None:
    (window,) = cut_windows(encode, 1)
    assert list(window) == text_tokens(encode, bench_text("accuracy.txt"))


def test_every_token_is_predicted_once_at_most_and_in_order() -> None:
    tokens = [token for name in TEXTS for token in encode(bench_text(name))]
    windows = cut_windows(encode, 9)
    assert all(len(window) == ACCURACY_CONTEXT for window in windows)
    counted = [token for window in windows for token in window[ACCURACY_PREFILL:]]
    assert counted == tokens[ACCURACY_PREFILL : ACCURACY_PREFILL + 9 * NUM_COUNTED]
    assert cut_windows(encode, 4) == windows[:4], "fewer windows are the first ones"


def test_more_windows_than_there_is_text_are_refused() -> None:
    num_tokens = sum(len(bench_text(name)) for name in TEXTS)
    most = num_tokens // 512 - 1
    assert len(cut_windows(encode, most)) == most
    for count in (0, most + 1):
        with pytest.raises(ConfigError, match=rf"^{count} windows; allowed: 1 to {most}, "):
            cut_windows(encode, count)


def test_the_hash_is_of_all_ids_in_order() -> None:
    known = windows_hash([[1, 2], [3]])
    assert known == text_hash([1, 2, 3])
    assert windows_hash([[3], [1, 2]]) != known != windows_hash([[1, 2]])


def test_each_window_has_its_own_reference(windows: list[Truth]) -> None:
    tokens = [reference.tokens for reference, _ in windows]
    assert tokens == cut_windows(encode, NUM_WINDOWS)
    assert [reference.subject.text_hash for reference, _ in windows] == [*map(text_hash, tokens)]
    for reference, logits in windows:
        best = [five[0] for five in reference.guesses]
        assert logits is not None and logits.argmax(-1).tolist() == best


def test_forced_windows_are_accuracy_runs_one_behind_the_other(
    windows: list[Truth], coarse: Executable
) -> None:
    alone = [teacher_force(coarse, [each]) for each in windows]
    told: list[tuple[int, int]] = []
    found = teacher_force(coarse, windows, on_step=lambda *news: told.append(news))
    assert found.guesses == sum((each.guesses for each in alone), ())
    assert found.kl == sum((each.kl for each in alone), ())
    total = NUM_WINDOWS * NUM_COUNTED
    assert told == [(step, total) for step in range(1, total + 1)]


def test_side_by_side_they_are_the_same(windows: list[Truth], coarse: Executable) -> None:
    """Two and then one: the last group is smaller."""
    told: list[tuple[int, int]] = []
    found = teacher_force(coarse, windows, batch=2, on_step=lambda *news: told.append(news))
    assert found == teacher_force(coarse, windows)
    assert told[0] == (2, 1536) and told[511:513] == [(1024, 1536), (1025, 1536)]
    assert told[-1] == (1536, 1536)


def test_logits_that_are_no_numbers_do_not_pass_for_equal(
    windows: list[Truth], coarse: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = coarse.step

    def broken(given: Step) -> StepOutput:
        output = step(given)
        for part in output.parts:
            assert part.logits is not None
            part.logits()[0, 7] = torch.nan
        return output

    monkeypatch.setattr(coarse, "step", broken)
    with pytest.raises(CompileError, match="predicted position 0 are not finite"):
        teacher_force(coarse, windows[:1])
