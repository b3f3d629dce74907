"""Launcher for ``experts.cu``: decode matmuls with the experts that each token selects.

Excludes operand sources. Shape letters: B tokens, K experts for a token, C columns, O
rows of an expert's weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.experts import moe_small
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import (
    PLAIN,
    Finish,
    Shared,
    takes_shared,
)
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import pair_stride
from tilewright.compiler.targets.cuda.kernels.experts.route import (
    MAX_CHOSEN,
    MAX_EXPERTS,
    MAX_TOKENS,
    TILE_PAIRS,
    RouteArguments,
    Tiles,
    TopKParams,
    arguments_of,
)
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import max_tiles
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    MOST_SHARED,
    STEP_BYTES,
    STORE,
    SWIGLU,
    X_PADDING,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
)

_DEPTHS = {kind: tuple(each) for kind, each in tuning()["experts"]["depths"].items()}
"""Steps of 128 columns that a warp has in flight. Sums use the last entry that fits shared
memory.
"""
_X_BYTES = TILE_PAIRS * (TILE_COLUMNS + X_PADDING) * 2
_SUM_WARPS = 9


class _WeightParams(ctypes.Structure):
    """Mirror for `Weight` in experts_walk.cuh."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_row_tiles", "num_steps", "num_rows")),
        ("scale", ctypes.c_float),
        ("missing", ctypes.c_int),
        ("bias", ctypes.c_void_p),
    )


class _ExpertsParams(ctypes.Structure):
    """Mirror for `Experts` in experts_walk.cuh."""

    _fields_ = (
        ("own", _WeightParams),
        ("shared", _WeightParams),
        *((name, ctypes.c_void_p) for name in ("x", "shared_x", "out", "shared_out")),
        *((name, ctypes.c_void_p) for name in ("tiles", "pairs", "weights", "given", "gate")),
        *((name, ctypes.c_int) for name in ("num_tokens", "top_k", "reciprocal", "most_tiles")),
        *((name, ctypes.c_int) for name in ("x_stride", "x_each", "out_stride", "out_each")),
        *((name, ctypes.c_int) for name in ("shared_x_stride", "shared_out_stride")),
        *((name, ctypes.c_int) for name in ("given_stride", "gate_stride")),
        *((name, ctypes.c_int) for name in ("residual", "epilogue")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


class _MoeSmall(ctypes.Structure):
    """Mirror for `MoeSmall` in moe_small.cu."""

    _fields_ = (("of", _ExpertsParams), ("route", RouteArguments))


PRODUCTS = nvrtc.KernelSource(
    Path(__file__).with_name("experts.cu"),
    (
        *(f"expert_linear_{kind}_{depths[0]}" for kind, depths in _DEPTHS.items()),
        *(f"expert_sum_{kind}_{each}" for kind, depths in _DEPTHS.items() for each in depths),
    ),
    headers=("primitives.cuh", "tiles.cuh", "experts_walk.cuh"),
    structures=(("Weight", _WeightParams), ("Experts", _ExpertsParams)),
)
MOE_SMALL = nvrtc.KernelSource(
    moe_small.PATH,
    moe_small.NAMES,
    headers=(*PRODUCTS.headers, "route_choose.cuh"),
    structures=(*PRODUCTS.structures, *native_route.SOURCE.structures, ("MoeSmall", _MoeSmall)),
    beside=True,
)


def takes(packed: PackedWeight, *, num_tokens: int, top_k: int, is_sum: bool) -> bool:
    """Return whether the kernels support these experts and this token count."""
    if num_tokens > MAX_TOKENS or top_k > MAX_CHOSEN or packed.num_experts > MAX_EXPERTS:
        return False
    if packed.num_columns % 8:
        return False
    depth = _DEPTHS[packed.format][-1 if is_sum else 0]
    return _room(packed, num_tokens, top_k, is_sum=is_sum, depth=depth) <= MOST_SHARED


def _num_warps(format_name: str, *, is_sum: bool) -> int:
    """Return the warps in a block, as experts.cu."""
    return _SUM_WARPS if is_sum else {"mxfp4": 16}.get(format_name, 8)


def _room(packed: PackedWeight, num_tokens: int, top_k: int, *, is_sum: bool, depth: int) -> int:
    """Return a block's shared memory in bytes."""
    num_pairs = num_tokens * top_k
    ring = _num_warps(packed.format, is_sum=is_sum) * depth * (STEP_BYTES[packed.format] + _X_BYTES)
    products = (num_pairs + num_tokens) * TILE_ROWS * 4 + -(-num_pairs // 4) * 16
    tiles = max_tiles(num_pairs, packed.num_experts, TILE_PAIRS) * (TILE_PAIRS * 2 + 4) + 4
    return ring + tiles + (products if is_sum else 0)


def expert_linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    tiles: Tiles,
    *,
    top_k: int,
    swiglu: bool = False,
    shared: Shared | None = None,
    choice: TopKParams | None = None,
    small_depth: int | None = None,
    finish: Finish = PLAIN,
) -> None:
    """Run the expert matmuls for a decode step; see :func:`.experts_triton.expert_linear`.

    Args:
        out: ``[B, K O]``, bfloat16 with ``swiglu``, else float32.
        x: bfloat16.
        tiles: Pairs by expert. The previous kernel may write them.
        shared: A shared expert in the same launch.
        choice: Select experts in this kernel and ignore ``tiles``; see
            :func:`.moe_small.takes_choice`.
        small_depth: Steps in flight in moe_small.cu. 0: use experts.cu. None: the faster kernel.
            The bits are the same.
        finish: Biases, and the bound of SwiGLU. A shared expert has neither.
    """
    num_rows, rest = divmod(out.shape[1], top_k)
    assert not rest and packed.is_paired == swiglu and out.stride(1) == 1
    assert out.dtype == (torch.bfloat16 if swiglu else torch.float32)
    arguments = _arguments(x, packed, tiles, top_k, num_rows)
    arguments.out, arguments.out_stride = out.data_ptr(), out.stride(0)
    arguments.out_each = num_rows
    arguments.epilogue = SWIGLU if swiglu else STORE
    assert shared is None or finish == PLAIN
    _finish(arguments, finish, packed.num_experts * num_rows, swiglu=swiglu)
    if shared is not None:
        y = shared.out
        assert y is not None and y.dtype == out.dtype and y.stride(1) == 1
        _share(arguments, shared, packed, y.shape[1])
        arguments.shared_out, arguments.shared_out_stride = y.data_ptr(), y.stride(0)
    blocks = num_processors(out.device)
    _launch(arguments, packed, shared, blocks, is_sum=False, small_depth=small_depth, choice=choice)


def expert_sum(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    tiles: Tiles,
    weights: Tensor,
    *,
    residual: bool,
    gate: Tensor | None = None,
    shared: Shared | Tensor | None = None,
    choice: TopKParams | None = None,
    small_depth: int | None = None,
    finish: Finish = PLAIN,
) -> None:
    """Run the expert matmuls of a decode step and add each token's weighted results.

    An :func:`expert_linear` must run between the kernels that write tiles, weights and ``choice``
    and this kernel, which reads them before its wait. With few tokens, it also reads ``out`` and
    ``gate`` early.

    Args:
        out: float32 ``[B, O]``.
        x: bfloat16 ``[B, K C]`` or ``[B, C]``.
        weights: Expert weights, float32 ``[B, K]``.
        residual: Add to the values in ``out``.
        gate: float32 ``[B, 1]``. The shared expert's result is multiplied by its sigmoid and added.
        shared: The shared expert, or its result, float32 ``[B, O]``.
        choice, small_depth: See :func:`expert_linear`.
        finish: Biases of the selected experts. A :class:`Shared` excludes them.
    """
    top_k = weights.shape[1]
    assert weights.is_contiguous() and weights.shape[0] == len(x) and not packed.is_paired
    assert out.dtype == torch.float32 and out.stride(1) == 1
    arguments = _arguments(x, packed, tiles, top_k, out.shape[1])
    arguments.out, arguments.out_stride = out.data_ptr(), out.stride(0)
    arguments.weights, arguments.residual = weights.data_ptr(), residual
    _finish(arguments, finish, packed.num_experts * out.shape[1], swiglu=False)
    assert (gate is None) == (shared is None)
    assert not isinstance(shared, Shared) or finish == PLAIN
    if gate is not None:
        assert gate.shape == (len(out), 1) and gate.dtype == torch.float32
        arguments.gate, arguments.gate_stride = gate.data_ptr(), gate.stride(0)
    if isinstance(shared, Shared):
        _share(arguments, shared, packed, out.shape[1])
    elif shared is not None:
        assert shared.shape == out.shape and shared.stride(1) == 1 and shared.dtype == out.dtype
        arguments.given, arguments.given_stride = shared.data_ptr(), shared.stride(0)
    blocks = packed.num_row_tiles
    _launch(arguments, packed, shared, blocks, is_sum=True, small_depth=small_depth, choice=choice)


def _arguments(
    x: Tensor, packed: PackedWeight, tiles: Tiles, top_k: int, num_rows: int
) -> _ExpertsParams:
    _check_operand(x, packed)
    return _ExpertsParams(
        own=_weight(packed, num_rows),
        x=x.data_ptr(),
        tiles=tiles.tiles.data_ptr(),
        pairs=tiles.pairs.data_ptr(),
        num_tokens=len(x),
        top_k=top_k,
        reciprocal=-(-65536 // top_k),
        most_tiles=len(tiles.pairs),
        x_stride=x.stride(0),
        x_each=pair_stride(x, packed, top_k),
    )


def _finish(arguments: _ExpertsParams, finish: Finish, num_rows: int, *, swiglu: bool) -> None:
    bias, arguments.limit, arguments.alpha = finish.checked(num_rows, swiglu=swiglu)
    if bias is not None:
        assert bias.dtype == torch.float32 and bias.is_contiguous()
        arguments.own.bias = bias.data_ptr()


def _share(arguments: _ExpertsParams, shared: Shared, packed: PackedWeight, num_rows: int) -> None:
    assert takes_shared(shared.packed, packed) and shared.x.shape[1] >= shared.packed.num_columns
    _check_operand(shared.x, shared.packed)
    arguments.shared = _weight(shared.packed, num_rows)
    arguments.shared_x, arguments.shared_x_stride = shared.x.data_ptr(), shared.x.stride(0)


def _weight(packed: PackedWeight, num_rows: int) -> _WeightParams:
    """Return a weight's parameters. ``num_rows`` excludes padding in the packed weight."""
    packed_rows = packed.num_rows // 2 if packed.is_paired else packed.num_rows
    assert packed_rows - 8 < num_rows <= packed_rows
    sizes = (packed.num_row_tiles, packed.num_column_tiles, num_rows)
    missing = -packed.num_columns % TILE_COLUMNS // 8
    return _WeightParams(packed.data.data_ptr(), *sizes, packed.scale, missing)


def _check_operand(x: Tensor, packed: PackedWeight) -> None:
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and packed.num_columns % 8 == 0
    assert x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 == packed.data.data_ptr() % 16


def _launch(
    arguments: _ExpertsParams,
    packed: PackedWeight,
    shared: Shared | Tensor | None,
    num_blocks: int,
    *,
    is_sum: bool,
    small_depth: int | None,
    choice: TopKParams | None,
) -> None:
    sizes: dict[str, int] = {"num_tokens": arguments.num_tokens, "top_k": arguments.top_k}
    along, blocks = shared.packed if isinstance(shared, Shared) else None, (num_blocks, 1, 1)
    if small_depth is None:
        is_one = is_sum or (arguments.x_each == 0 and arguments.shared_x in (None, arguments.x))
        small_depth = 0
        if is_one and not isinstance(shared, Tensor):
            small_depth = moe_small.depth_of(packed, along, **sizes, is_sum=is_sum)
    if small_depth:
        assert arguments.most_tiles <= moe_small.MOST_TILES and not isinstance(shared, Tensor)
        given = _MoeSmall(of=arguments)
        if choice is not None:
            num_tokens, num_experts = choice.logits.shape
            assert num_tokens == 1 and num_experts <= moe_small.MOST_CHOSEN_AMONG
            given.route = arguments_of(choice, arguments.top_k)
        used = moe_small.room(packed, along, **sizes, is_sum=is_sum, depth=small_depth)
        room = used if is_sum else moe_small.launch_bytes(packed, used, num_blocks)
        assert room <= MOST_SHARED
        num_threads = 32 * moe_small.num_warps(packed.format, is_sum=is_sum)
        at = nvrtc.Launch(blocks, num_threads, room)
        name = moe_small.kernel(packed.format, small_depth, is_sum=is_sum)
        nvrtc.launch(MOE_SMALL, name, at=at, arguments=given)
        return
    assert choice is None
    depths = _DEPTHS[packed.format] if is_sum else _DEPTHS[packed.format][:1]
    rooms = {each: _room(packed, **sizes, is_sum=is_sum, depth=each) for each in depths}
    depth = next((each for each in depths if rooms[each] <= MOST_SHARED), depths[-1])
    name = f"expert_{'sum' if is_sum else 'linear'}_{packed.format}_{depth}"
    num_threads = 32 * _num_warps(packed.format, is_sum=is_sum)
    at = nvrtc.Launch(blocks, num_threads, rooms[depth])
    nvrtc.launch(PRODUCTS, name, at=at, arguments=arguments)
