"""Formats a board has, where values lie, and the blocks its kernels walk in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    Memory,
    TtValue,
    TtWeight,
    tile_bytes,
)
from tilewright.compiler.targets.tenstorrent.program.placement import (
    activation_memory,
    check_activation_format,
    check_cache_format,
    check_weight_format,
    heads_memory,
    key_chunk,
    matmul_blocks,
    shard_cores,
    weight_memory,
)
from tilewright.errors import CompileError


@pytest.mark.parametrize(
    "check", [check_weight_format, check_cache_format, check_activation_format]
)
def test_formats_that_boards_have_not_are_refused(check: object) -> None:
    assert callable(check)
    for name in ("bf16", "bfp8", "bfp4"):
        check("a.place", name)
    for name in ("fp32", "fp16", "q40", "q80", "bfp2"):
        with pytest.raises(CompileError) as caught:
            check("a.place", name)
        message = str(caught.value)
        assert message.startswith("a.place: ") and name in message
        assert message.endswith("allowed: bf16, bfp8, bfp4")


def test_a_step_lies_in_l1_and_a_prompt_in_dram() -> None:
    assert str(activation_memory(2048, "decode")) == "l1:width_sharded/64"
    assert str(heads_memory(32, "decode")) == "l1:height_sharded/32"
    assert str(weight_memory(8)) == "dram:width_sharded/8"
    for memory in (activation_memory(2048, "prefill"), heads_memory(32, "prefill")):
        assert str(memory) == "dram"


@given(st.integers(1, 4008))
def test_cores_are_a_rectangle_of_the_grid_and_share_equally(num_tiles: int) -> None:
    cores = shard_cores(num_tiles)
    assert num_tiles % cores == 0
    assert any(cores % side == 0 and cores // side <= 8 for side in range(1, 9))
    for more in range(cores + 1, 65):
        fits = num_tiles % more == 0
        rectangle = any(more % side == 0 and more // side <= 8 for side in range(1, 9))
        assert not (fits and rectangle)


def operands(rows: int, k: int, n: int, form: str) -> tuple[TtValue, TtWeight]:
    x = TtValue("x", rows, k, "bf16", Memory())
    recipe = WeightRecipe((Segment("w", n),), (n, k))
    return x, TtWeight("w", recipe, k, n, form, weight_memory(12))


@given(
    st.sampled_from([1, 32, 33, 512]),
    st.integers(1, 450),
    st.integers(1, 450),
    st.sampled_from(["bf16", "bfp8", "bfp4"]),
)
def test_a_block_divides_a_core_s_share_of_k(rows: int, k: int, n: int, form: str) -> None:
    x, weight = operands(rows, 32 * k, 32 * n, form)
    phase = "decode" if rows <= 32 else "prefill"
    cores, block = matmul_blocks(x, weight, phase)
    if phase == "prefill":
        assert (cores, k % block) == (64, 0)
        assert block <= 4
        return
    assert k % cores == 0 and k // cores % block == 0
    assert block <= 8
    room = 3 * block * math.ceil(n / 12) * tile_bytes(form)
    assert block == 1 or room <= 700_000, "three blocks of a bank's share of N"


def test_the_head_takes_the_cores_that_k_has() -> None:
    """128,256 tokens are 4,008 tiles: on the 8 cores that divide both they would be 501 each."""
    cores, _ = matmul_blocks(*operands(1, 2048, 128_256, "bfp8"), "decode")
    assert cores == 64


@given(st.integers(1, 4096))
def test_chunks_of_keys_are_powers_of_two(context: int) -> None:
    chunk, pages = key_chunk(context), -(-context // 32)
    assert chunk in (32, 64, 128, 256)
    assert chunk <= 32 * pages, "there is a chunk in the pages"
    assert chunk == 256 or 2 * chunk > 32 * pages, "and no larger one"
