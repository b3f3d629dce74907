"""Blackhole boards: programs, memory and emulation where they differ from Wormhole."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.targets.tenstorrent.boards import board_precision, emulated, programs
from tests.tiny import compiled, prefill, random_tokens, step, take_slot, tiny_model
from tilewright.compiler.devices import BOARDS, get_device
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.emit_ttnn.emit import emit_ttnn
from tilewright.compiler.targets.tenstorrent.emit_ttnn.weights import constants
from tilewright.compiler.targets.tenstorrent.emulate import arithmetic
from tilewright.compiler.targets.tenstorrent.perf.model import predict
from tilewright.compiler.targets.tenstorrent.program.instructions import Matmul
from tilewright.compiler.targets.tenstorrent.program.memory_plan import check_memory
from tilewright.errors import CompileError

BLACKHOLE = {
    "p100": (1, 7, 28, "(1, 1)"),
    "p150": (1, 8, 32, "(1, 1)"),
    "p300": (2, 8, 32, "(1, 2)"),
    "qb2": (4, 8, 32, "(1, 4)"),
    "loudbox": (8, 8, 32, "(1, 8)"),
    "bh-galaxy": (32, 8, 32, "(4, 8)"),
}
"""Chips, DRAM banks and GB of a chip, and the mesh as ttnn counts it."""


def test_the_table_has_all_boards() -> None:
    on_blackhole = (name for name in BOARDS if get_device(name).architecture == "blackhole")
    assert tuple(on_blackhole) == tuple(BLACKHOLE)
    for name, (num_chips, num_banks, gigabytes, _) in BLACKHOLE.items():
        device = get_device(name)
        assert (device.num_chips, device.num_banks, device.grid) == (num_chips, num_banks, (10, 11))
        assert device.dram_bytes == gigabytes * 10**9


def test_every_board_has_an_emulation_a_file_and_a_time() -> None:
    """A layer with heads, columns and a vocabulary that 32 chips can share."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = tiny_model(std=0.2, num_heads=8, num_kv_heads=8, num_layers=1, **sizes)
    precision = board_precision("bf16", "hifi4", activation="bf16", kv_cache="bf16")
    options, tokens = CompileOptions(max_batch=2, max_context=128), random_tokens(11)
    expected = prefill(compiled(model, precision=precision), tokens)
    times = set()
    for name, (_, num_banks, _, mesh) in BLACKHOLE.items():
        found = prefill(emulated(model, precision=precision, name=name), tokens, [9, 1])
        assert (found - expected).std() < 0.03 * expected.std(), name
        made = programs(model, precision=precision, options=options, name=name)
        source = emit_ttnn(*made)
        ast.parse(source)
        assert f"MESH = {mesh}" in source and f"NUM_BANKS = {num_banks} " in source
        speed = predict(*made, num_generated=8)
        times.add((speed.decode_tsu, speed.ttft_ms))
    assert len(times) == len(BLACKHOLE), "each board has its own time"


@pytest.mark.parametrize(("name", "num_banks"), [("n150", 12), ("p100", 7), ("p150", 8)])
def test_weights_lie_over_the_banks_of_the_board(name: str, num_banks: int) -> None:
    model = tiny_model(hidden_size=64, num_layers=1)
    prefill_program, decode = programs(model, name=name)
    matmuls = [each for each in decode.instructions if isinstance(each, Matmul)]
    assert {each.weight.memory.cores for each in matmuls} == {num_banks}
    assert all(each.weight.tiles[1] % num_banks == 0 for each in matmuls)
    assert f"NUM_BANKS = {num_banks}  # of DRAM" in constants(prefill_program, decode, "model.0.")


@pytest.mark.parametrize("name", ["p100", "p300"])
def test_emulation_is_near_the_reference(name: str) -> None:
    model = tiny_model(std=0.2, hidden_size=64)
    precision = board_precision("bf16", "hifi4", activation="bf16", kv_cache="bf16")
    tokens = random_tokens(11)
    expected = prefill(compiled(model, precision=precision), tokens)
    found = prefill(emulated(model, precision=precision, name=name), tokens, [9, 1])
    assert (found - expected).std() < 0.03 * expected.std()
    wormhole = {"p100": "n150", "p300": "n300"}[name]
    other = prefill(emulated(model, precision=precision, name=wormhole), tokens, [9, 1])
    assert (found - other).std() < 0.03 * expected.std()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("name", "fidelity", "expected"),
    [
        ("p100", "hifi4", [True, False]),
        ("p100", "hifi2na", [False, False]),
        ("n150", "hifi4", [False, False]),
    ],
)
def test_prompts_with_an_fp32_dst_have_accurate_attention(
    name: str, fidelity: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a single sequence, then a step."""
    found, attend = [], arithmetic.attend

    def recorded(*args: Any, accurate: bool, **named: Any) -> torch.Tensor:
        found.append(accurate)
        return attend(*args, accurate=accurate, **named)

    monkeypatch.setattr(arithmetic, "attend", recorded)
    model = tiny_model(hidden_size=64, num_layers=1)
    executable = emulated(model, precision=board_precision("bf16", fidelity), name=name)
    slot, tokens = take_slot(executable), random_tokens(4)
    step(executable, [(slot, tokens[:3], 0)])
    step(executable, [(slot, tokens[3:4], 3)])
    assert found == expected


def test_a_model_without_room_is_refused_by_bytes() -> None:
    model = tiny_model(hidden_size=64, num_layers=1)
    prefill, decode = programs(model, name="p100")
    large = replace(decode, device="P100", batch=32, context=2**20)
    cache = large.caches[0]
    wide = {each: replace(each, num_pages=32 * 2**20) for each in large.caches}
    instructions = tuple(
        replace(each, **{n: wide[getattr(each, n)] for n in ("keys", "values")})
        if hasattr(each, "keys")
        else replace(each, cache=wide[each.cache])
        if hasattr(each, "cache")
        else each
        for each in large.instructions
    )
    assert cache.num_bytes < get_device("p100").dram_bytes
    with pytest.raises(CompileError, match=r"exceeded by \d+ bytes; allowed: \d+ positions"):
        check_memory(prefill, replace(large, instructions=instructions))
