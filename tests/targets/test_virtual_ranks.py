"""The oracle: all ranks of a group in one process have the numbers of one device."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.dealt_models import ARCHITECTURES, BIASES, COUNTS, assert_equal, grouped, logits_of, make
from tests.grids import only
from tests.tiny import copy_slot, precision_of, prefill, random_tokens, step, take_slot
from tilewright.compiler.driver import compile_virtual
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.errors import CompileError


def layers_of(model_type: str) -> dict[str, int]:
    """One layer where all are alike."""
    return {} if "3_5" in model_type else {"num_layers": 1}


@functools.cache
def of_one_device(model_type: str) -> tuple[SimpleNamespace, Tensor]:
    model = make(model_type, **layers_of(model_type))
    return model, logits_of(model, SINGLE_RANK)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("count", only((3, 8), COUNTS))
def test_ranks_together_are_one_device(model_type: str, count: int) -> None:
    """Three ranks have uneven shares, and eight ranks share key heads."""
    model, expected = of_one_device(model_type)
    assert_equal(logits_of(model, ParallelConfig(count)), expected)


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        (BIASES, ParallelConfig(3)),
        ({"num_kv_heads": 2}, ParallelConfig(5)),  # heads shared by three ranks and by two
        ({"num_heads": 6, "num_kv_heads": 3}, ParallelConfig(2)),
        ({"intermediate_size": 64}, ParallelConfig(6)),
        ({}, ParallelConfig(3, shares=(4, 1, 2))),
        ({"model_type": "qwen3_moe"}, ParallelConfig(6, expert=6)),
        ({"model_type": "qwen3_moe"}, ParallelConfig(6, expert=3)),
        ({"model_type": "qwen3_moe", "num_experts": 5}, ParallelConfig(4, expert=2)),
        ({"model_type": "qwen3_5_moe"}, ParallelConfig(4, expert=4)),
        ({"model_type": "qwen3_5_moe"}, ParallelConfig(4, expert=1)),
    ],
)
def test_uneven_shared_and_whole_experts(
    changes: dict[str, object], parallel: ParallelConfig
) -> None:
    model_type = str(changes.get("model_type", "llama"))
    model = make(**{**layers_of(model_type), **changes})  # type: ignore[arg-type]
    assert_equal(logits_of(model, parallel), logits_of(model, SINGLE_RANK))


def test_a_rounded_wire_moves_the_numbers_a_little() -> None:
    model = make()
    expected = logits_of(model, SINGLE_RANK)
    by_wire = {
        wire: float((logits_of(model, ParallelConfig(2, wire=wire)) - expected).abs().max())
        for wire in ("fp32", "bf16", "q80")
    }
    assert by_wire["fp32"] < 1e-5 < by_wire["bf16"] < 0.05
    assert 1e-5 < by_wire["q80"] < 0.05


def test_copies_and_snapshots_are_each_rank_s_own_part() -> None:
    model = make("qwen3_5")
    executable, tokens = (
        grouped(model, ParallelConfig(2)).executable,
        random_tokens(6, vocab_size=131),
    )
    expected = prefill(executable, tokens)
    slot = take_slot(executable)
    step(executable, [(slot, tokens[:4], 0)], rows=range(4))
    other = copy_slot(executable, slot, 4)
    found = step(executable, [(other, tokens[4:], 4)], rows=range(2))
    torch.testing.assert_close(found, expected[4:], atol=1e-5, rtol=1e-5)
    assert executable.capabilities.num_snapshots > 0
    assert executable.memory().state == executable.state_bytes(32, 2)


def test_targets_of_one_rank_a_process_say_so() -> None:
    options = CompileOptions(max_context=32, parallel=ParallelConfig(2))
    with pytest.raises(CompileError) as caught:
        compile_virtual(make(), precision_of(), target="null", options=options)
    assert str(caught.value) == "2 ranks in one process on target null; allowed: reference"


def test_ranks_hold_parts_of_what_one_device_holds() -> None:
    model = make(tie_embeddings=False)
    whole = grouped(model, SINGLE_RANK).executable.memory()
    parts = grouped(model, ParallelConfig(2)).executable.memory()
    assert parts.state == whole.state
    assert parts.weights < 1.5 * whole.weights  # norms, and the embedding, twice
