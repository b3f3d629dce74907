"""Mesh arithmetic: padding, copies and shards are exact. Only sums depend on the order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets.tenstorrent.boards import board_precision, emulated
from tests.tiny import QWEN2, compiled, prefill, random_tokens, tiny_model
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.tenstorrent.emulate import arithmetic

TOKENS = random_tokens(11)
CHUNKS = [5, 3, 1, 1]
"""Prefill programs, then decode programs."""

Counts = tuple[int, int]


def exact_model(heads: Counts, **changes: Any) -> SimpleNamespace:
    """Return a model with exact sums in any order: each matmul output reads a single input, times a
    power of two.
    """
    num_heads, num_kv_heads = heads
    usual = {"hidden_size": 64, "intermediate_size": 80, "num_layers": 1}
    model = tiny_model(
        **(usual | {"num_heads": num_heads, "num_kv_heads": num_kv_heads} | changes), std=0.5
    )
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.checkpoint.tensors.items():
        if tensor.ndim != 2 or "embed" in name:
            continue
        rows, columns = tensor.shape
        read = torch.randperm(max(rows, columns), generator=generator)[:rows] % columns
        power = torch.randint(-1, 2, (rows,), generator=generator)
        sign = torch.randint(0, 2, (rows,), generator=generator) * 2 - 1
        tensor.zero_()
        tensor[torch.arange(rows), read] = sign * torch.exp2(power.float())
    return model


def logits(model: SimpleNamespace, mesh: Mesh, precision: PrecisionConfig | None = None) -> Tensor:
    executable = emulated(model, mesh, precision=precision)
    found = prefill(executable, TOKENS, CHUNKS)
    assert found.std() > 0.1
    return found


PRECISION = board_precision("bfp8", "hifi2", kv_cache="bfp8")
PLAIN = board_precision("bfp8", "hifi2", kv_cache="bfp8", activation="bf16")
"""Chips of a mesh pack what they send each other in bfp8 where ``activation`` is mixed."""


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        ((4, 2), (2, 4)),
        ((8, 2), (2, 8)),
        ((6, 3), (2, 4)),  # a key head of zeros, then on two chips
        ((6, 2), (4,)),  # a group of three on two chips, with a query head of zeros
        ((9, 3), (8,)),  # chips without a head
        ((8, 1), (3, 8)),
    ],
)
def test_meshes_of_one_axis_are_one_chip_bit_for_bit(heads: Counts, rows: tuple[int, ...]) -> None:
    model = exact_model(heads, tie_embeddings=False)
    expected = logits(model, Mesh(), PLAIN)
    for count in rows:
        assert torch.equal(logits(model, Mesh(count), PLAIN), expected), count


def test_biases_are_dealt_with_their_columns() -> None:
    model = exact_model((6, 3), **QWEN2)
    expected = logits(model, Mesh(), PLAIN)
    assert torch.equal(logits(model, Mesh(2), PLAIN), expected)
    bias = model.checkpoint.tensors["model.layers.0.self_attn.v_proj.bias"]
    bias[-1] += 4
    assert not torch.equal(logits(model, Mesh(2), PLAIN), expected), "the last one is read"


@pytest.mark.parametrize("hidden", [64, 96])
def test_the_stream_dealt_over_a_second_axis_is_the_same(hidden: int) -> None:
    """Chips exchange sums of squares in bfloat16, which limits the precision.

    Four chips with 96 columns have three real shards and a zero shard.
    """
    model = exact_model((4, 2), hidden_size=hidden)
    precision = board_precision("bfp8", "hifi4", activation="bf16", kv_cache="bf16")
    expected = logits(model, Mesh(2), precision)
    found = {columns: logits(model, Mesh(2, columns), precision) for columns in (2, 3, 4)}
    for each in found.values():
        assert (each - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch.equal(logits(model, Mesh(4, 2), precision), found[2]), "the first axis is exact"
    if hidden == 96:
        assert torch.equal(found[4], found[3])


def test_inexact_sums_differ_as_on_boards() -> None:
    """Another mesh has another order of sums: near a single chip, but not equal."""
    model = tiny_model(std=0.2, hidden_size=64, num_heads=8)
    precision = board_precision("bfp8", "hifi4", activation="bf16", kv_cache="bf16")
    found = [logits(model, mesh, precision) for mesh in (Mesh(), Mesh(2), Mesh(8), Mesh(8, 2))]
    for index, one in enumerate(found):
        for other in found[:index]:
            assert not torch.equal(one, other)
            assert (one - other).abs().max() < 0.2 * one.std()


SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "qwen2": QWEN2,
    "ragged": {"hidden_size": 40, "intermediate_size": 56, "head_dim": 48, "vocab_size": 131},
    "one key head": {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "tie_embeddings": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_high_fidelity_is_near_the_reference(shape: str) -> None:
    model = tiny_model(std=0.2, **SHAPES[shape])
    precision = board_precision("bf16", "hifi4", activation="bf16", kv_cache="bf16")
    tokens = random_tokens(11, vocab_size=model.config.vocab_size)
    expected = prefill(compiled(model, precision=precision), tokens)
    for mesh in (Mesh(), Mesh(2)):
        found = prefill(emulated(model, mesh, precision=precision), tokens, CHUNKS)
        assert (found - expected).std() < 0.03 * expected.std()


def test_the_weights_are_blocks_along_out() -> None:
    """Equal to the reference with the same axis only."""
    model = tiny_model(std=0.2, hidden_size=64, num_layers=1)
    precision = {
        axis: board_precision("bfp4", "hifi4", activation="bf16", kv_cache="bf16", block_axis=axis)
        for axis in ("in", "out")
    }
    board = {
        axis: prefill(emulated(model, precision=precision[axis]), TOKENS) for axis in precision
    }
    assert torch.equal(board["in"], board["out"]), "boards know one axis"
    off = {
        axis: (prefill(compiled(model, precision=precision[axis]), TOKENS) - board["out"]).std()
        for axis in precision
    }
    assert off["out"] < 0.2 * off["in"]


_WIDE = tiny_model(std=0.2, hidden_size=64)


@pytest.fixture(scope="module")
def usual() -> Tensor:
    """A prompt with ten tokens, and a decode step."""
    return prefill(emulated(_WIDE, precision=PRECISION), TOKENS, [10, 1])


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {group: "bfp4"}
            for group in ("ff1_3", "ff2", "wqkv", "wo", "lm_head", "kv_cache", "v_cache")
        ),
        {"activation": "bfp8"},
        *(
            {group: "lofi"}
            for group in ("li_ff1_3", "li_ff2", "li_lm_head", "li_qkv_prefill", "li_o_prefill")
        ),
        {"sdpa_prefill": "lofi"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_changes_numbers(changes: dict[str, str], usual: Tensor) -> None:
    other = board_precision("bfp8", "hifi2", **({"kv_cache": "bfp8"} | changes))
    found = prefill(emulated(_WIDE, precision=other), TOKENS, [10, 1])
    assert not torch.equal(found, usual)
    assert (found - usual).std() < usual.std()


@pytest.mark.parametrize("group", ["li_qkv", "li_o", "sdpa"])
def test_each_phase_has_its_own_fidelity(group: str, usual: Tensor) -> None:
    """A decode setting changes the next token only."""
    other = board_precision("bfp8", "hifi2", kv_cache="bfp8", **{f"{group}_decode": "lofi"})
    found = prefill(emulated(_WIDE, precision=other), TOKENS, [10, 1])
    assert torch.equal(found[:10], usual[:10])
    assert not torch.equal(found[10], usual[10])


def test_the_inputs_of_a_sum_are_cast_to_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prompt with mixed activations, ff2 writes bfloat16 and the links transfer bfp8."""
    found: list[tuple[str, list[Tensor]]] = []
    ring_sum = arithmetic.ring_sum

    def recorded(parts: list[Tensor], format_: str) -> Tensor:
        found.append((format_, parts))
        return ring_sum(parts, format_)

    monkeypatch.setattr(arithmetic, "ring_sum", recorded)
    executable = emulated(exact_model((4, 2)), Mesh(2), precision=PRECISION)
    prefill(executable, TOKENS, [9, 1, 1])
    for format_, parts in found:
        for part in parts:
            assert torch.equal(arithmetic.cast(part, format_), part)
    assert {format_ for format_, _ in found} == {"bfp8", "bf16"}
