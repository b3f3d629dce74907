"""What a choice is told of the rows it chooses for, and what it says of them."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingFilters, make_choice
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.interface.step import END_TOKEN, NOT_A_NUMBER, Slot

CPU = torch.device("cpu")
VOCABULARY = 1003


def test_fewer_rows_leave_no_parameters_of_the_rows_before() -> None:
    table = SlotTable(4, 3, CPU)
    ends = [(1, 2, 3), (4, 5, 6), (9,), ()]
    chosen = [
        SamplingParams(temperature=0.5, top_k=7, top_p=0.25, seed=2**40 + slot, stop_token_ids=each)
        for slot, each in enumerate(ends)
    ]
    table.open({Slot(slot): each for slot, each in enumerate(chosen)})
    choice = make_choice(4, VOCABULARY, 3, CPU)
    choice.gather(table, table.index([Slot(0), Slot(1), Slot(2), Slot(3)]))
    choice.gather(table, table.index([Slot(2), Slot(1)], 4))
    by = choice.parameters
    assert by.end_tokens.tolist() == [[9, -1, -1], [4, 5, 6], *[[-1] * 3] * 2]
    assert by.seeds.tolist() == [2**40 + 2, 2**40 + 1, 0, 0]
    assert by.top_p.tolist() == [0.25] * 2 + [1.0] * 2
    assert by.top_k.tolist() == [7, 7, 0, 0]
    assert by.temperature.tolist() == [0.5] * 2 + [0.0] * 2


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_choice_without_a_number_says_so(is_greedy: bool, device: torch.device) -> None:
    """Rows whose logits have one are as ever, sampled or not."""
    logits = torch.full((4, 40), -3.0, device=device)
    logits[0, 5], logits[1], logits[2], logits[3, 11] = float("nan"), -torch.inf, torch.nan, 90.0
    choice = make_choice(4, 40, 2, device)
    choice.parameters.end_tokens[3, 1] = 11
    if not is_greedy:
        choice.parameters.temperature.fill_(0.7)
    choice.apply(logits, None if is_greedy else SamplingFilters(True, True))
    assert choice.why.tolist() == [NOT_A_NUMBER] * 3 + [END_TOKEN]
