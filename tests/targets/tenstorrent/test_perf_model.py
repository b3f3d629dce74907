"""The performance model: programs of published sizes are priced instruction by instruction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from bench.boards_fit.programs import Programs
from bench.boards_fit.wormhole import PUBLISHED
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.tenstorrent.perf import blackhole
from tilewright.compiler.targets.tenstorrent.perf.constants import CLOCK, FITTED, PHASE_CYCLES
from tilewright.compiler.targets.tenstorrent.perf.model import (
    InstructionEstimate,
    estimate,
    explain_time,
    predict,
    step_seconds,
)
from tilewright.compiler.targets.tenstorrent.perf.work import InstructionCost, program_work
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DeviceProgram,
    Matmul,
    ReduceScatter,
    TtAttention,
)
from tilewright.compiler.targets.tenstorrent.target import MESHES
from tilewright.models.shapes import SHAPES

PROGRAMS = Programs()
MODEL = "Llama3.2-1B"


def decode(
    precision: str = "base", *, device: str = "n300", model: str = MODEL, context: int = 228
) -> DeviceProgram:
    return whole(precision, model, device, phase="decode", context=context)


def prefill(precision: str = "base", *, device: str = "n300", length: int = 128) -> DeviceProgram:
    return whole(precision, MODEL, device, phase="prefill", length=length, context=length)


def whole(precision: str, model: str, device: str, **sizes: Any) -> DeviceProgram:
    """A program with the instructions of its layer as often as the model has layers."""
    program, repeats = PROGRAMS.get(
        SHAPES[PUBLISHED[model]],
        load_precision(precision),
        model=model,
        board=device,
        mesh=MESHES[device],
        **sizes,
    )
    before = [each for each in program.instructions if each.layer is None]
    layer = [each for each in program.instructions if each.layer is not None]
    first = program.instructions.index(layer[0])
    repeated = (*before[:first], *(layer * int(repeats)), *before[first:])
    return dataclasses.replace(program, instructions=repeated)


def lines_of(program: DeviceProgram, name: str, group: str = "") -> list[InstructionEstimate]:
    return [
        line
        for line in estimate(program)
        if line.work is not None and (line.work.name, line.work.group) == (name, group)
    ]


@pytest.mark.parametrize("make", [decode, prefill])
def test_a_step_is_the_sum_of_its_instructions_and_one_cost(
    make: Callable[[], DeviceProgram],
) -> None:
    program = make()
    lines = estimate(program)
    assert [line.instruction for line in lines] == [*program.instructions, None]
    assert all(line.seconds > 0 for line in lines)
    assert step_seconds(program) == pytest.approx(sum(line.seconds for line in lines))
    once = FITTED.step_seconds if program.phase == "decode" else FITTED.prefill_seconds
    assert lines[-1].seconds == once


def test_a_product_takes_its_bytes_or_its_cycles() -> None:
    by_format = {}
    for name in ("bfp4", "bfp8", "bf16"):
        program = decode(f"precision_cfg = {{ff2: {name}}}, fidelity_cfg = {{}}")
        by_format[name] = lines_of(program, "Matmul", "ff2")[0]
    times = [line.seconds for line in by_format.values()]
    assert times == sorted(times) and times[0] < times[2]
    assert by_format["bf16"].bound == "memory" and by_format["bfp4"].bound == "compute"
    work = by_format["bf16"].work
    assert work is not None
    expected = FITTED.op_seconds + work.bytes_read / FITTED.bank_bytes_per_s
    assert by_format["bf16"].seconds == pytest.approx(expected, rel=0.01)


def test_more_phases_take_longer_where_cycles_bind() -> None:
    def product(fidelity: str) -> InstructionEstimate:
        heading = f"precision_cfg = {{ff2: bfp4}}, fidelity_cfg = {{li_ff2: {fidelity}}}"
        return lines_of(decode(heading), "Matmul", "ff2")[0]

    assert product("lofi").seconds == product("hifi2").seconds, "a tile's least cycles bind"
    slow = product("hifi4")
    assert slow.bound == "compute" and slow.work is not None
    cycles = slow.work.products * 4 * PHASE_CYCLES
    assert slow.seconds == pytest.approx(FITTED.op_seconds + cycles / CLOCK)


def test_prompts_pay_for_every_phase() -> None:
    times = [
        step_seconds(prefill(f"precision_cfg = {{}}, fidelity_cfg = {{li_ff2: {name}}}"))
        for name in ("lofi", "hifi2", "hifi4")
    ]
    assert all(first < second for first, second in pairwise(times))


def test_more_chips_read_less_and_sum_more() -> None:
    n150, n300, t3k = (decode(device=device) for device in ("n150", "n300", "t3k"))
    reads = [
        sum(work.bytes_read for work in program_work(program)) for program in (n150, n300, t3k)
    ]
    assert reads[0] > 1.9 * reads[1] > 1.9**2 * reads[2]
    assert not [line for line in estimate(n150) if line.bound in ("links", "steps")]
    steps = [
        {line.work.ring_steps for line in lines_of(program, "ReduceScatter") if line.work}
        for program in (n300, t3k)
    ]
    assert steps == [{1}, {0, 7}]


def test_eight_chips_fuse_the_gather_where_columns_divide() -> None:
    def sums(model: str) -> list[int]:
        program = decode(device="t3k", model=model)
        return [
            work.ring_steps
            for each, work in zip(program.instructions, program_work(program), strict=True)
            if isinstance(each, ReduceScatter)
        ][:2]

    assert sums("Llama3.1-8B") == [0, 7]
    assert sums("Llama3.2-3B") == [7, 7], "12 tiles a chip"


def test_attention_takes_longer_with_its_cache() -> None:
    times = [step_seconds(decode(context=65_636), attended=n) for n in (228, 8192, 65_636)]
    assert times == sorted(times) and times[2] > 1.2 * times[0]
    short, capacity = decode(context=228), decode(context=65_636)
    assert step_seconds(short) == pytest.approx(step_seconds(capacity, attended=228))


def test_a_window_is_read_from_the_start_of_its_chunk() -> None:
    program = decode(context=1024)
    windows = tuple(
        dataclasses.replace(each, window=300) if isinstance(each, TtAttention) else each
        for each in program.instructions
    )
    program = dataclasses.replace(program, instructions=windows)
    (chunk,) = {each.k_chunk for each in windows if isinstance(each, TtAttention)}
    assert chunk == 256

    def tiles(attended: int) -> int:
        found = (work for work in program_work(program, attended=attended))
        return next(work.head_tiles for work in found if work.name == "Attention")

    assert [tiles(n) for n in (290, 555, 556, 1000)] == [10, 18, 10, 16]


@pytest.mark.parametrize(("software", "in_turn"), [("vllm_2025_05", 4), ("vllm_2026_08", 2)])
def test_a_user_of_a_server_has_a_share_of_the_cores(software: str, in_turn: int) -> None:
    """Eight key heads of 32 tiles on 64 cores, with 32 or 16 slots in the server's program."""
    work = attention(decode(device="p150", context=1024))
    assert (work.num_heads, work.head_tiles) == (8, 32)
    _, _, seconds = blackhole.blackhole_seconds(work, blackhole.BLACKHOLE, software)
    a_tile = blackhole.SOFTMAX_CYCLES / blackhole.CLOCK
    assert seconds == pytest.approx(in_turn * 32 * a_tile)
    _, _, split = blackhole.blackhole_seconds(work, blackhole.BLACKHOLE, "tt_2025_11")
    assert split == pytest.approx(work.softmax_tiles * a_tile)
    assert split < seconds / 4


def test_a_core_count_limits_attention_with_few_heads() -> None:
    (one,) = {attention(decode(device="t3k", context=65_536))}
    (four,) = {attention(decode(device="n300", context=65_536))}
    assert one.softmax_tiles == four.softmax_tiles == 65_536 // 32 // 16


def attention(program: DeviceProgram) -> InstructionCost:
    found = [work for work in program_work(program) if work.name == "Attention"]
    assert len(set(found)) == 1
    return found[0]


def test_a_bias_costs_its_own() -> None:
    program = decode(model="Qwen2.5-7B")
    (bias,) = {
        line.seconds
        for line in estimate(program)
        if isinstance(line.instruction, Matmul) and line.instruction.bias is not None
    }
    without = dataclasses.replace(FITTED, bias_seconds=0.0)
    saved = step_seconds(program) - step_seconds(program, without)
    assert bias > FITTED.bias_seconds
    assert saved == pytest.approx(28 * FITTED.bias_seconds)


def test_narrower_activations_are_a_little_faster() -> None:
    bf16, mixed, bfp8 = (
        step_seconds(decode(f"precision_cfg = {{activation: {name}}}, fidelity_cfg = {{}}"))
        for name in ("bf16", "mixed", "bfp8")
    )
    assert bf16 > mixed > bfp8 > 0.97 * bf16


def test_a_prediction_has_the_published_size_and_a_bar() -> None:
    found = predict(prefill("performance"), decode("performance", context=328), num_generated=200)
    assert found.decode_tsu == pytest.approx(100.5, rel=found.decode_error)
    assert found.ttft_ms == pytest.approx(24, rel=found.ttft_error)
    assert 0.05 < found.decode_error < 0.25 and 0.1 < found.ttft_error < 0.5
    roomy = predict(prefill("performance"), decode("performance", context=4096), num_generated=200)
    assert roomy.decode_tsu == found.decode_tsu, "room in the caches costs nothing"


def test_the_explanation_adds_up() -> None:
    tables = explain_time(prefill(), decode(context=328), num_generated=200)
    (title, columns, rows), (_, cost_columns, costs), (prompt_title, _, _) = tables
    assert "predicted" in title and "228 positions" in title and "128 tokens" in prompt_title
    assert all(len(row) == len(columns) for row in rows)
    shares = [float(row[4].removesuffix(" %")) for row in rows]
    assert shares[-1] == 100.0 and sum(shares[:-1]) == pytest.approx(100.0, abs=1.5)
    microseconds = [int(row[3].replace(",", "")) for row in rows]
    assert sum(microseconds[:-1]) == pytest.approx(microseconds[-1], abs=len(rows))
    assert [row[0] for row in costs] == ["wqkv", "kv_cache", "wo", "ff1_3", "ff2", "lm_head"]
    for row in costs:
        now, *others = (float(cell) for cell in row[3:])
        names = [name.removeprefix("in ") for name in cost_columns[4:]]
        by_name = dict(zip(names, others, strict=True))
        assert by_name[row[1]] == now
        assert by_name["bf16"] >= by_name["bfp8"] >= by_name["bfp4"]
