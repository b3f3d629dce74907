"""Generated engines with the CUDA target's kernels for attention and experts. torch replaces the
kernels: it reads the arguments by address, as in their sources.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.targets.cuda.engine_generator.test_mixer_kernels import (
    CPU,
    PARTS,
    PLAN,
    TINY,
    Interpreted,
    large_weights,
)
from tilewright.compiler.targets.cuda.engine_generator.emit import choices_for
from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import HybridCudaExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.engine import Engine
from tilewright.compiler.targets.cuda.engine_generator.parts.native import (
    TILE,
    NativeAttention,
    NativeDelta,
    NativeExperts,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Choices,
    NativeChoices,
    Plan,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import HybridReference
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import (
    compare,
    error_of,
    random_weights,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    read_hybrid_settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

HALF = torch.float16
SIZES = {
    **TINY,
    **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    **{"max_position_embeddings": 256, "num_hidden_layers": 3},
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


def at(address: int, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Return the tensor at an address."""
    count = math.prod(shape)
    held = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype).view(shape)


def route(a: Any) -> None:
    """Replace route.cu: weights for the selected experts, and pairs by expert in tiles."""
    assert (a.first, a.count, a.renormalise) == (0, a.num_experts, 1)
    logits = at(a.logits, a.num_tokens, a.logits_stride)[:, : a.num_experts].float()
    shares, chosen = logits.softmax(-1).topk(a.top_k)
    real = at(a.positions, a.num_tokens, dtype=torch.int64)[:, None] >= 0
    shares = (shares / shares.sum(-1, keepdim=True)).where(real, torch.zeros(()))
    chosen = chosen.int().where(real, torch.full((), -1, dtype=torch.int32))
    at(a.weights, a.num_tokens, a.top_k, dtype=torch.float32).copy_(shares)
    at(a.experts, a.num_tokens, a.top_k, dtype=torch.int32).copy_(chosen)
    made = []
    for expert in range(a.num_experts):
        pairs = (chosen.flatten() == expert).nonzero()[:, 0].tolist()
        made += [(expert, pairs[i : i + TILE]) for i in range(0, len(pairs), TILE)]
    tiles = at(a.tiles, 1 + len(made), dtype=torch.int32)
    tiles.copy_(torch.tensor([len(made), *(expert for expert, _ in made)]))
    for i, (_, pairs) in enumerate(made):
        padded = torch.tensor([*pairs, *([-1] * (TILE - len(pairs)))])
        at(a.pairs + 2 * TILE * i, TILE, dtype=torch.int16).copy_(padded)


def experts(a: Any) -> None:
    """Replace experts.cu: SwiGLU (epilogue 2), or the weighted sum."""
    tiles = at(a.tiles, 1 + a.most_tiles, dtype=torch.int32)
    pairs = at(a.pairs, a.most_tiles, TILE, dtype=torch.int16).tolist()

    def rows_of(of: Any, expert: int) -> torch.Tensor:
        columns, rows = of.num_steps * 128, of.num_row_tiles * 16
        return at(of.data + 2 * expert * rows * columns, rows, columns)

    def x_of(pair: int) -> torch.Tensor:
        assert pair * a.reciprocal >> 16 == pair // a.top_k
        place = pair // a.top_k * a.x_stride + pair % a.top_k * a.x_each
        return at(a.x + 2 * place, a.own.num_steps * 128)

    def made(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = weight.float() @ x.float()
        if a.epilogue != 2:
            return y
        gates, ups = y.chunk(2)
        return F.silu(gates) * ups

    found = {
        pair: made(rows_of(a.own, int(tiles[1 + i])), x_of(pair))
        for i in range(int(tiles[0]))
        for pair in pairs[i]
        if pair >= 0
    }
    shared_x = at(a.shared_x, a.num_tokens, a.shared_x_stride)[:, : a.shared.num_steps * 128]
    shared = [made(rows_of(a.shared, 0), x) for x in shared_x]
    if a.epilogue == 2:
        for pair, y in found.items():
            place = pair // a.top_k * a.out_stride + pair % a.top_k * a.out_each
            at(a.out + 2 * place, a.own.num_rows).copy_(y)
        out = at(a.shared_out, a.num_tokens, a.shared_out_stride)
        out[:, : a.shared.num_rows] = torch.stack(shared)
        return
    weights = at(a.weights, a.num_tokens, a.top_k, dtype=torch.float32)
    for token in range(a.num_tokens):
        out = at(a.out + 2 * token * a.out_stride, a.own.num_rows)
        gate = at(a.gate + 2 * token * a.gate_stride, 1).float().sigmoid()
        total = out.float() * a.residual + gate * shared[token]
        for k in range(a.top_k):
            if (pair := token * a.top_k + k) in found:
                total += weights[token, k] * found[pair]
        out.copy_(total)


def attend(a: Any) -> None:
    """Replace attention.cu for rows within a single group of pages."""
    size, heads, groups = 2 * a.half, a.group_heads, a.num_kv_heads
    rows = at(a.positions, 1 << 20, dtype=torch.int64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        turns = at(a.inv_freq + 2 * position * size, size).float()
        first, second = x.float().chunk(2, -1)
        cos, sin = turns.chunk(2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).half()

    for row in range(attend.num_rows):  # type: ignore[attr-defined]
        position = int(rows[row])
        out = at(a.out + 2 * row * a.out_stride, groups, heads, size)
        if position < 0:
            out.zero_()
            continue
        slot = int(at(a.slots + 8 * row, 1, dtype=torch.int64))
        table = at(a.tables + 8 * slot * a.table_width, a.table_width, dtype=torch.int64)
        pages = [
            at(a.values + 2 * int(p), 2, groups, 64, size) for p in table[: position // 64 + 1]
        ]
        width = (heads + 2) * groups * size
        qkv = at(a.qkv + 2 * row * width, (heads + 2) * groups, size)
        q, k, v = qkv.split((heads * groups, groups, groups))
        pages[-1][0, :, position % 64] = turned(k, position)
        pages[-1][1, :, position % 64] = v
        keys, values = torch.cat(pages, 2)[:, :, : position + 1].float()
        q = turned(q, position).float().view(groups, heads, size)
        weights = (q @ keys.transpose(1, 2) * a.scale * math.log(2)).softmax(-1)
        out.copy_(weights @ values)


def delta(a: Any) -> None:
    """Replace delta_step.cu: a token's convolution, delta rule and gated norm."""
    heads, groups, count = a.num_heads, a.num_key_heads, delta.num_rows  # type: ignore[attr-defined]
    size, width = 64, a.width
    channels = (2 * groups + heads) * size
    floats = {"dtype": torch.float32}
    weight = at(a.weight, channels, width, **floats)
    norm = at(a.norm, size, **floats)
    a_log, dt_bias = at(a.a_log, heads, **floats), at(a.dt_bias, heads, **floats)
    for row in range(count):
        out = at(a.out + 2 * row * a.out_stride, heads, size)
        if int(at(a.positions + 8 * row, 1, dtype=torch.int64)) < 0:
            out.zero_()
            continue
        slot = int(at(a.slots + 8 * row, 1, dtype=torch.int64))
        window = at(a.window + 4 * slot * channels * (width - 1), channels, width - 1, **floats)
        state = at(a.state + 4 * slot * heads * size * size, heads, size, size, **floats)
        x = at(a.x + 2 * row * a.x_stride, channels).float()
        seen = torch.cat((window, x[:, None]), 1)
        mixed = F.silu((seen * weight).sum(1))
        window.copy_(seen[:, 1:])
        q, k, v = mixed.view(-1, size).split((groups, groups, heads))
        q, k = (x.repeat_interleave(heads // groups, 0) for x in (q, k))
        q = q * torch.rsqrt(q.square().sum(1, keepdim=True) + 1e-6) / 8
        k = k * torch.rsqrt(k.square().sum(1, keepdim=True) + 1e-6)
        rate = at(a.a + 2 * row * a.a_stride, heads).float() + dt_bias
        beta = at(a.b + 2 * row * a.b_stride, heads).float().sigmoid()
        state *= (-a_log.exp() * F.softplus(rate)).exp()[:, None, None]
        wrong = (v - torch.einsum("hkv,hk->hv", state, k)) * beta[:, None]
        state += k[:, :, None] * wrong[:, None]
        read = torch.einsum("hkv,hk->hv", state, q)
        z = at(a.z + 2 * row * a.z_stride, heads, size).float()
        read = read * torch.rsqrt(read.square().mean(1, keepdim=True) + a.eps) * norm
        out.copy_(read * F.silu(z))


class Native(NativeAttention, NativeExperts, NativeDelta, Interpreted):
    """Launches steps without graphs."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs what it compiles")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows with random values
def test_kernels_are_handed_what_their_sources_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the reference: single and several rows, padding, full expert tiles, and several
    pages.
    """
    ran: list[str] = []

    def launch(kernel: tuple[str, str, str], arguments: Any, **how: Any) -> None:
        ran.append(kernel[2])
        attend.num_rows = delta.num_rows = how["blocks"][1]  # type: ignore[attr-defined]
        does: dict[str, Callable[[Any], None]] = {
            **{"route.cu": route, "experts.cu": experts},
            **{"attention.cu": attend, "delta_step.cu": delta},
        }
        does[kernel[0]](arguments)

    monkeypatch.setattr(f"{PARTS}.native.native_launch", launch)
    monkeypatch.setattr(f"{PARTS}.native.takes_native", lambda device, dtype: True)
    monkeypatch.setattr(f"{PARTS}.steps.PLAN", PLAN)
    exact = read_hybrid_settings(SIZES, CPU)
    tensors = large_weights(exact, tmp_path, 1.5)
    half = dataclasses.replace(exact, dtype=HALF)
    engine = Engine(Native(tensors, half, CPU), half)
    reference = HybridReference(tensors, exact, CPU)
    torch.manual_seed(1)
    prompts = [torch.randint(0, 37, (length,)) for length in (1, 63, 64, 70, 2, 3, 4, 5, 6)]
    ids = list(range(len(prompts)))
    for each in (engine, reference):
        each.prefill(ids, prompts)
    assert not ran  # prompts have their own kernels
    for some in (ids[::-1], [3], [1, 2, 0]):
        tokens = torch.randint(0, 37, (len(some),))
        ours, theirs = (each.decode(some, tokens) for each in (engine, reference))
        kept = [row for row, request in enumerate(some) if reference.is_decided(request)]
        assert len(kept) > len(some) // 2
        assert error_of(ours[kept], theirs[kept]) < 0.5
    assert set(ran) == {
        *("attend_bf16_64_1", "delta_step_64_32", "route_4", "route_one_4"),
        *("expert_linear_bf16_4", "expert_sum_bf16_4"),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [(NativeAttention, NativeExperts), (NativeDelta,)])
def test_a_gpu_is_as_close_to_the_reference_as_with_tritons(
    parts: tuple[type, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is for bfloat16 rounding."""
    monkeypatch.setattr(f"{PARTS}.steps.PLAN", PLAN)
    device = torch.device("cuda")
    settings = read_hybrid_settings({**SIZES, "torch_dtype": "bfloat16"}, device)
    torch.save(random_weights(settings, 0), tmp_path / "model.pt")
    tensors = load_weights(str(tmp_path), settings)
    exact = dataclasses.replace(settings, dtype=torch.float32)
    native: Any = type("Native", (*parts, HybridCudaExecutor), {})
    worst = []
    for made in (HybridCudaExecutor, native):
        engine = Engine(made(tensors, settings, device), settings)
        reference = HybridReference(tensors, exact, device)
        worst.append(compare(engine, reference, settings, seed=0, operations=40)[0])
    assert worst[1] < 1.5 * worst[0]


@pytest.mark.parametrize("num_rows", [1, 5, 32, 64])
def test_room_and_tiles_are_the_cuda_targets(num_rows: int) -> None:
    exact = dataclasses.replace(
        read_hybrid_settings(SIZES, CPU), num_chosen=8, num_experts=256, hidden_size=2048
    )
    engine = object.__new__(NativeExperts)
    engine.settings = exact
    unused: Any = None
    held = PackedWeight("bf16", 2048, 512, unused, num_experts=256)
    for depth in (3, 4):
        given: dict[str, Any] = {"num_tokens": num_rows, "top_k": 8, "depth": depth}
        expected = native_experts._room(held, is_sum=True, **given)
        assert engine._room(num_rows, depth) == expected
    pairs = native_route.Tiles.empty(num_rows, 8, 256, CPU).pairs
    assert len(pairs) == engine._most_tiles(num_rows)


def test_files_have_the_sources_of_their_choices_alone(plan: Plan) -> None:
    usual = engine_text(plan, Choices(), title="a test", num_layers=2)
    native = NativeChoices(native=("attention",))
    text = engine_text(plan, native, title="a test", num_layers=2)
    assert "NativeChoices" not in usual and "SOURCES" not in usual
    assert 'NativeChoices(native=("attention",))' in text
    assert "replace(LLAMA, on_gpu=NativeExecutor)" in text
    assert '"attention.cu": r"""' in text and "experts.cu" not in text
    assert "KERNELS(name" in text and "\nALL(" not in text and "tilewright" not in text
    compile(text, "engine.py", "exec")


def test_wide_models_in_bfloat16_have_them(plan: Plan) -> None:
    wide = {"hidden_size": 2048, "torch_dtype": "bfloat16"}
    attention = NativeChoices(products="cuda", native=("attention",))
    assert choices_for(plan, wide) == attention
    assert choices_for(plan, {**wide, "torch_dtype": "float16"}) == Choices(products="cuda")
    assert choices_for(plan, {**wide, "hidden_size": 768}) == Choices()
    mixtures = NativeChoices(products="cuda", native=("experts", "attention", "delta"))
    assert choices_for(PLAN, wide) == mixtures
