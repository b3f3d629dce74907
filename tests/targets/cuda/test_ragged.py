"""Pieces of several prompts in one step: how they lie, and that each is what it is alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.targets.cuda.test_executable import release
from tests.tiny import compiled, joined, precision_of, random_tokens, take_seat, tiny_model
from tilewright.compiler.targets.base import Executable
from tilewright.compiler.targets.cuda import ragged
from tilewright.compiler.targets.cuda.ragged import can_join, join, one, split
from tilewright.compiler.targets.cuda.trials import VARIABLE
from tilewright.compiler.targets.step import Choosing, Chunk, Seat, Snapshot, Step

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}


def chunk(seat: int, start: int, count: int, **changes: Any) -> Chunk:
    return Chunk(Seat(seat), start, tuple(range(1, count + 1)), **{"chooses": True, **changes})


def test_each_piece_begins_a_block_that_is_its_own() -> None:
    chunks = [chunk(4, 0, 65), chunk(2, 128, 3, chooses=False), chunk(7, 9, 64)]
    found = join(chunks, CPU)
    assert found.block == 64
    assert found.pieces == (slice(0, 65), slice(128, 131), slice(192, 256))
    assert found.last.tolist() == [64, 255]
    rows = found.rows
    assert rows.positions[[0, 64, 65, 127, 128, 130, 131, 192]].tolist() == (
        [0, 64, -1, -1, 128, 130, -1, 9]
    )
    assert rows.slots.view(4, 64).tolist() == [[seat] * 64 for seat in (4, 4, 2, 7)]
    assert rows.tokens[[0, 64, 65, 128, 255]].tolist() == [1, 65, 0, 1, 64]
    assert join([chunk(0, 0, 600), chunk(1, 0, 500)], CPU).pieces[1] == slice(640, 1140)


def test_a_piece_alone_has_no_padding() -> None:
    rows, wanted = one(chunk(3, 7, 2), CPU)
    assert [each.tolist() for each in (rows.tokens, rows.positions, rows.slots)] == (
        [[1, 2], [7, 8], [3, 3]]
    )
    assert wanted is not None and wanted.tolist() == [1]
    echoed, silent = (one(chunk(3, 0, 2, chooses=False, echoes=each), CPU)[1] for each in (1, 0))
    assert echoed is not None and echoed.tolist() == [0, 1] and silent is None


def test_what_wants_more_than_a_choice_runs_alone() -> None:
    plain, behind = chunk(0, 0, 3), chunk(1, 0, 3, saves=((3, Snapshot(0)),))
    within, echoing = chunk(2, 0, 3, saves=((2, Snapshot(0)),)), chunk(3, 0, 3, echoes=True)
    others = chunk(4, 0, 3, also=(Seat(5),))
    found = [can_join(each) for each in (plain, behind, within, echoing, others)]
    assert found == [True, True, False, False, False]
    assert split([plain, within, behind], 8) == ([[plain, behind]], [within])
    assert split([plain, behind, chunk(6, 0, 3)], 2)[0] == [[plain, behind], [chunk(6, 0, 3)]]
    assert split([plain, behind], 1) == ([], [plain, behind])
    assert split([plain], 8) == ([], [plain])


def made(model_type: str, monkeypatch: pytest.MonkeyPatch) -> Executable:
    from tests.models.test_qwen3_5_moe import ON_CUDA

    monkeypatch.setenv(VARIABLE, "prompts=8")
    monkeypatch.setattr(ragged, "SHORT_BLOCK", 64)
    changes = SMALL
    if model_type != "llama":
        changes = {**ON_CUDA, "num_layers": 1, "hidden_size": 16, "linear_layers": (True,)}
    model = tiny_model(std=0.2, model_type=model_type, **changes)
    options = {"compute": "fast", "max_batch": 6, "max_context": 64}
    return compiled(model, "cuda", precision=precision_of("bf16"), **options)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe"])
def test_prompts_together_are_those_of_each_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their start and from further on; and what they leave is what decoding goes on from."""
    executable, found = made(model_type, monkeypatch), []
    assert executable.capabilities.max_prompts == 8
    sizes = ((0, 5), (4, 3), (0, 2))
    for is_together in (True, False):
        rows = [Choosing(), Choosing(temperature=1.0, seed=3), Choosing()]
        seats = tuple(take_seat(executable, 12, row) for row in rows)
        prompts = [tuple(random_tokens(8, seed=index)) for index in range(3)]
        executable.step(Step(prompts=(Chunk(seats[1], 0, prompts[1][:4]),)))
        chunks = tuple(
            Chunk(seat, start, prompt[start : start + count], chooses=True)
            for seat, prompt, (start, count) in zip(seats, prompts, sizes, strict=True)
        )
        steps = [chunks] if is_together else [(each,) for each in chunks]
        outputs = [executable.step(Step(prompts=each, want_logits=True)) for each in steps]
        tokens = [token for each in outputs for part in each.parts for token in part.read().tokens]
        after = executable.step(Step(decode=seats, want_logits=True))
        logits = torch.cat([*(joined(each) for each in outputs), joined(after)])
        found.append((tokens, logits, after.parts[0].read().tokens))
        release(executable, seats)
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-2, atol=2e-2)
