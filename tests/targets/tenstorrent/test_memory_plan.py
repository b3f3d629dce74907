"""What a program takes on a chip, and what a user whose model does not fit is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.targets.tenstorrent.boards import board_precision, programs
from tests.tiny import tiny_model
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram, Matmul
from tilewright.compiler.targets.tenstorrent.program.memory_plan import (
    check_memory,
    plan_memory,
    run_memory,
)
from tilewright.compiler.targets.tenstorrent.program.placement import PROMPT_CHUNK
from tilewright.errors import CompileError

TILE = {"bf16": 2048, "bfp8": 1088}


def test_a_tiny_program_by_hand() -> None:
    _, decode = programs(tiny_model(num_layers=1))
    plan = plan_memory(decode)
    products = 12 * TILE["bfp8"] * (1 + 2 + 1 + 1 + 2 + 1)
    vectors = 3 * TILE["bf16"] + 4096  # three norms, and the frequencies in float32
    assert plan.weight_bytes == products + 2 * TILE["bf16"] + vectors
    assert plan.cache_bytes == 2 * 4 * 2 * 2 * TILE["bfp8"]
    assert plan.dram_bytes == plan.weight_bytes + plan.cache_bytes + plan.value_bytes
    assert plan.value_bytes == 4096, "token ids, or positions; all else of a step is in L1"


def test_caches_grow_with_users_and_positions() -> None:
    def cache_bytes(batch: int, context: int) -> int:
        options = CompileOptions(max_batch=batch, max_context=context)
        return plan_memory(programs(tiny_model(), options=options)[1]).cache_bytes

    one = cache_bytes(1, 32)
    assert cache_bytes(7, 32) == 7 * one
    assert cache_bytes(1, 33) == cache_bytes(1, 64) == 2 * one


def test_a_mesh_shares_caches_and_products() -> None:
    model = tiny_model(num_heads=8, num_kv_heads=8, hidden_size=256, intermediate_size=3072)
    one, four = (plan_memory(programs(model, mesh)[1]) for mesh in (Mesh(), Mesh(4)))
    assert four.cache_bytes * 4 == one.cache_bytes
    assert one.weight_bytes / 4 < four.weight_bytes < one.weight_bytes / 2


def test_prompts_lie_in_dram_and_steps_in_l1() -> None:
    prefill, decode = map(plan_memory, programs(tiny_model()))
    assert prefill.value_bytes > 4 * decode.value_bytes
    assert decode.l1_bytes > 0
    assert decode.fullest.startswith(("Matmul of model.", "Attention of", "CreateHeads of"))


def test_a_run_has_the_caches_of_all_users_and_the_values_of_a_chunk_of_a_prompt() -> None:
    prefill, decode = programs(tiny_model())
    usage, (prompt, step) = run_memory(prefill, decode), map(plan_memory, (prefill, decode))
    assert usage.cache_bytes == step.cache_bytes == 4 * prompt.cache_bytes
    assert usage.value_bytes == prompt.value_bytes > step.value_bytes
    assert usage.l1_bytes == max(prompt.l1_bytes, step.l1_bytes)
    chunks = replace(prefill, length=4 * PROMPT_CHUNK)
    assert run_memory(chunks, decode).value_bytes == prompt.value_bytes // 4


def grown(program: DeviceProgram, factor: int) -> DeviceProgram:
    """The program with every product's weight ``factor`` times as wide."""
    instructions = tuple(
        replace(each, weight=replace(each.weight, columns=each.weight.columns * factor))
        if isinstance(each, Matmul)
        else each
        for each in program.instructions
    )
    return replace(program, instructions=instructions)


def refusal(prefill: DeviceProgram, decode: DeviceProgram) -> str:
    with pytest.raises(CompileError) as caught:
        check_memory(prefill, decode)
    message = str(caught.value)
    assert "\n" not in message and "; allowed: " in message
    return message


def test_what_fits_is_returned() -> None:
    prefill, decode = programs(tiny_model())
    assert check_memory(prefill, decode) == run_memory(prefill, decode)


def test_bf16_weights_too_large_for_a_board() -> None:
    """18 GB in bf16 are 9.6 in bfp8, or 9 on each of two chips."""
    prefill, decode = programs(tiny_model(num_layers=1), precision=board_precision("bf16"))
    factor = 1200 * 18_000_000_000 // plan_memory(grown(decode, 1200)).weight_bytes
    large = grown(decode, factor)
    plan, message = run_memory(prefill, large), refusal(prefill, large)
    assert 17.9e9 < plan.weight_bytes < 18.2e9
    assert (
        f"{plan.dram_bytes / 1e9:.2f} GB a chip of N150 ({plan.weight_bytes / 1e9:.2f}" in message
    )
    assert "4 x 64 positions) of 12.87" in message
    assert f"exceeded by {plan.dram_bytes - 12_870_000_000} bytes" in message
    in_bfp8 = plan.dram_bytes * TILE["bfp8"] / TILE["bf16"]
    assert f"allowed: products of bf16 in bfp8 ({in_bfp8 / 1e9:.2f} GB)" in message
    assert f"a larger mesh (n300: about {plan.dram_bytes / 2e9:.2f} GB a chip)" in message


def test_only_what_fits_is_named() -> None:
    """54 GB are too much in bfp8, and for two chips; 10,000 GB for every mesh."""
    prefill, decode = programs(tiny_model(num_layers=1), precision=board_precision("bf16"))
    factor = 1200 * 54_000_000_000 // plan_memory(grown(decode, 1200)).weight_bytes
    named = refusal(prefill, grown(decode, factor)).partition("; allowed: ")[2]
    assert named == "a larger mesh (t3k: about 6.75 GB a chip)"
    galaxy = refusal(prefill, grown(decode, 5 * factor)).partition("; allowed: ")[2]
    assert galaxy.startswith("a larger mesh (tg: about 8.4")
    nothing = refusal(prefill, grown(decode, 200 * factor)).partition("; allowed: ")[2]
    assert nothing == "fewer layers, or a smaller model"


def test_long_contexts_too_large_for_a_board() -> None:
    """The positions that fit are named, and do fit."""
    options = CompileOptions(max_batch=32, max_context=2**21)
    with pytest.raises(CompileError) as caught:
        programs(tiny_model(), options=options)
    message = str(caught.value)
    assert "1 x 2097152 positions" not in message, "one user's prompt fits"
    assert "of caches for 32 x 2097152 positions" in message
    assert "bf16 in bfp8" not in message
    _, _, named = message.partition("allowed: ")
    fitting = int(named.split(" positions in all")[0])
    context = fitting // 32 // 32 * 32
    assert 2**20 < context < 2**21
    programs(tiny_model(), options=replace(options, max_context=context))


def test_a_core_without_room_is_refused() -> None:
    prefill, decode = programs(tiny_model(num_layers=1))
    wide = replace(
        decode,
        instructions=tuple(
            replace(each, k_block=2000) if isinstance(each, Matmul) else each
            for each in decode.instructions
        ),
    )
    message = refusal(prefill, wide)
    assert message.startswith("Matmul of model.layers.0.")
    assert "of L1 per core, limit 1393312" in message
    assert message.endswith("a larger mesh, or narrower formats")
