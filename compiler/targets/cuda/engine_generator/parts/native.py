"""CUDA C++ kernels from the CUDA target for decode steps, included as text."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import HybridCudaExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.launches import CudaKernels, Tokens
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Experts
from tilewright.compiler.targets.cuda.engine_generator.parts.products import (
    Sizes,
    _nvrtc,
    launch,
    load_kernels,
    machine_code,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, BoundMixer, Values
from tilewright.compiler.targets.cuda.kernels.attention.attention import (
    _WARPS,
    _AttentionParams,
    _shared_bytes,
)
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    SHORT_PAGES,
    choose_share,
    num_parts,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_step import (
    _DeltaStep,
    columns_of_a_block,
)
from tilewright.compiler.targets.cuda.kernels.experts.experts import _ExpertsParams, _WeightParams
from tilewright.compiler.targets.cuda.kernels.experts.route import RouteArguments

_FOUND = {each.name: each for each in (Path(__file__).parents[2] / "kernels").rglob("*.cu*")}
_MADE = re.compile(r"^(ROUTE|LINEAR|SUM|ALL|DELTA_STEP)\(.*\)\n", re.M)
"""Lines that instantiate the kernels of a source's templates, as an engine needs them."""

FILES = {
    "experts": (
        *("primitives.cuh", "tiles.cuh", "experts_walk.cuh", "experts.cu"),
        *("route_choose.cuh", "route_sort.cuh", "route.cu"),
    ),
    "attention": (
        "primitives.cuh",
        "attention_primitives.cuh",
        "attention_pages.cuh",
        "attention.cu",
    ),
    "delta": (
        "primitives.cuh",
        "attention_primitives.cuh",
        "delta_gates.cuh",
        "delta_step.cuh",
        "delta_step.cu",
    ),
}
"""Sources of each choice, includes first."""


def sources(native: tuple[str, ...]) -> dict[str, str]:
    """Return each required source text by its name."""
    names = dict.fromkeys(name for choice in native for name in FILES[choice])
    return {name: _MADE.sub("", _FOUND[name].read_text()).rstrip() + "\n" for name in names}


SOURCES = sources(("experts", "attention", "delta"))


def takes_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device can run `SOURCES` on a type."""
    if device.type != "cuda" or dtype != torch.bfloat16 or _nvrtc() is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def native_launch(
    kernel: tuple[str, str, str],
    arguments: ctypes.Structure,
    *,
    blocks: Sizes,
    threads: int,
    shared: int = 0,
    cluster: Sizes = (1, 1, 1),
    chained: bool,
) -> None:
    """Run a kernel by source, instantiating line and name. ``cluster``: blocks per cluster."""
    function = _native(*kernel, torch.cuda.current_device())
    how: dict[str, Any] = {"shared": shared, "cluster": cluster, "chained": chained}
    launch(function, arguments, blocks, threads, **how)


@functools.cache
def _native(source: str, made: str, name: str, device: int) -> Any:
    """Load a kernel on a device."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = native_code(source, made, f"sm_{major}{minor}a")
    return load_kernels(binary, [name], device)[name]


@functools.cache
def native_code(source: str, made: str, architecture: str) -> bytes:
    """Compile a source with an instantiating line."""
    headers = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
    options = "-DGENERATED", f"-arch={architecture}"
    return machine_code(source, f"{SOURCES[source]}{made}\n", headers, *options)


MAX_UNSPLIT_PAGES = 8
"""Pages of a row with a block each, before `SPLIT_FROM`."""

NATIVE_ROWS = 8
"""Maximum rows. For more rows, or split contexts, Triton's kernel is faster."""


class NativeAttention(CudaKernels):
    """Attention with a token per row. A cluster's blocks share its pages."""

    def _attend_tokens(self, each: Bound, qkv: Tensor, batch: Tokens, out: Tensor) -> None:
        s, table = self.settings, batch.table
        heads = s.num_heads // s.num_kv_heads
        known = s.head_dim in (64, 128, 256) and heads <= 16
        known = known and len(qkv) <= NATIVE_ROWS and batch.splits == 1
        if not (known and takes_native(self.device, qkv.dtype)):
            super()._attend_tokens(each, qkv, batch, out)
            return
        assert table is not None and batch.positions is not None and batch.slots is not None
        pages = min(table.shape[1], MAX_UNSPLIT_PAGES)
        share = choose_share(len(qkv), s.num_kv_heads, pages, s.head_dim)
        arguments = _AttentionParams(
            qkv=qkv.data_ptr(),
            out=out.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            tables=table.data_ptr(),
            inv_freq=self.turns.data_ptr(),
            values=self.pages.base.data_ptr() + self._layer_offset(each) * qkv.itemsize,
            table_width=table.shape[1],
            out_stride=out.stride(0),
            group_heads=heads,
            num_kv_heads=s.num_kv_heads,
            half=s.head_dim // 2,
            interleaved=s.interleaved,
            early=self.chained,
            num_groups=share.num_groups,
            num_joined=share.num_joined,
            group_splits=share.group_splits,
            short_pages=SHORT_PAGES,
            scale=s.scale / math.log(2),
        )
        eights = 1 if heads <= 8 else 2
        native_launch(
            (
                "attention.cu",
                f"KERNELS(bf16, BF16, {s.head_dim}, {eights})",
                f"attend_bf16_{s.head_dim}_{eights}",
            ),
            arguments,
            blocks=(share.num_joined, len(qkv), s.num_kv_heads),
            threads=32 * _WARPS * num_parts(s.head_dim),
            shared=_shared_bytes(s.head_dim, heads, share.group_splits),
            cluster=(share.num_joined, 1, 1),
            chained=self.chained,
        )


TILE = 8
"""Row-expert pairs per read of an expert's weight."""

STAGE = 16 * 128 * 2 + TILE * (128 + 8) * 2
"""Bytes in flight per warp and 128 columns: weights and x."""

MOST_ROOM = 225 * 1024


class NativeExperts(HybridCudaExecutor):
    """Experts for up to 64 decode rows in three kernels."""

    def run(self, program: Sequence[Bound], values: Values, batch: Any) -> Values:
        if batch is None or batch.positions is None or not self._takes(len(batch.positions)):
            return super().run(program, values, batch)
        for index, each in enumerate(program):
            behind = next((x for x in program[index : index + 3] if is_experts(x)), None)
            if behind is None:
                super().run([each], values, batch)
            elif behind is each:
                first, second = program[index - 2 : index]
                assert (second.does.out, second.does.x) == (each.does.shared, first.does.out)
                self._experts(each, (first, second), values, batch.positions)
        return values

    def _takes(self, num_rows: int) -> bool:
        """Return whether the kernels support the device, the experts and the rows."""
        s = self.settings
        if num_rows > 64 or s.num_chosen > 32 or s.num_experts > 512:
            return False
        if s.hidden_size % 128 or s.expert_size % 128 or s.shared_size % 128:
            return False
        return self._room(num_rows, 3) <= MOST_ROOM and takes_native(self.device, s.dtype)

    def _room(self, num_rows: int, depth: int) -> int:
        """Return a block's bytes for sums, with ``depth`` steps in flight per warp."""
        pairs = num_rows * self.settings.num_chosen
        products = (pairs + num_rows) * 64 + -(-pairs // 4) * 16
        return 9 * depth * STAGE + products + self._table_room(num_rows)

    def _table_room(self, num_rows: int) -> int:
        """Return a block's table bytes: expert and pairs per tile, and a count."""
        return self._most_tiles(num_rows) * (TILE * 2 + 4) + 4

    def _most_tiles(self, num_rows: int) -> int:
        """Return the maximum pair tiles."""
        pairs = num_rows * self.settings.num_chosen
        fewest = min(pairs, self.settings.num_experts)
        return fewest + (pairs - fewest) // TILE

    def _experts(
        self, each: Bound, shared: tuple[Bound, Bound], values: Values, positions: Tensor
    ) -> None:
        """Run `Experts` and the matmuls for ``shared``."""
        s, does = self.settings, each.does
        assert isinstance(each, BoundMixer)
        x, logits, out = values[does.x], values[does.logits], values[does.out]
        rows, most = len(x), self._most_tiles(len(x))
        tiles = torch.empty(1 + most, dtype=torch.int32, device=self.device)
        pairs = torch.empty(most, TILE, dtype=torch.int16, device=self.device)
        shares = torch.empty(rows, s.num_chosen, device=self.device)
        self._route(shares, logits, positions, tiles, pairs)
        inner = x.new_empty(rows, s.num_chosen * s.expert_size)
        shared_inner = x.new_empty(rows, s.shared_size)
        given = {
            "tiles": tiles.data_ptr(),
            "pairs": pairs.data_ptr(),
            "num_tokens": rows,
            "top_k": s.num_chosen,
            "reciprocal": -(-65536 // s.num_chosen),
            "most_tiles": most,
        }
        gates_ups, downs = each.tensors["gates_ups"][0], each.tensors["downs"][0]
        first = _ExpertsParams(
            own=_weight_of(gates_ups, s.expert_size),
            shared=_weight_of(shared[0].weight, s.shared_size),
            **{"x": x.data_ptr(), "shared_x": x.data_ptr(), **given},
            **{"x_stride": x.stride(0), "shared_x_stride": x.stride(0), "epilogue": 2},
            **{"out": inner.data_ptr(), "out_stride": inner.stride(0), "out_each": s.expert_size},
            **{"shared_out": shared_inner.data_ptr(), "shared_out_stride": s.shared_size},
        )
        self._run_experts("LINEAR", 4, first, self.num_processors, rows)
        gates = logits[:, s.num_experts :]
        last = _ExpertsParams(
            own=_weight_of(downs, s.hidden_size),
            shared=_weight_of(shared[1].weight, s.hidden_size),
            **{"x": inner.data_ptr(), "x_stride": inner.stride(0), "x_each": s.expert_size},
            **{"shared_x": shared_inner.data_ptr(), "shared_x_stride": s.shared_size, **given},
            **{"weights": shares.data_ptr(), "out": out.data_ptr(), "out_stride": out.stride(0)},
            **{"gate": gates.data_ptr(), "gate_stride": gates.stride(0), "residual": 1},
        )
        depth = 4 if self._room(rows, 4) <= MOST_ROOM else 3
        self._run_experts("SUM", depth, last, s.hidden_size // 16, rows)

    def _run_experts(self, what: str, depth: int, given: Any, blocks: int, rows: int) -> None:
        is_sum = what == "SUM"
        room = self._room(rows, depth) if is_sum else 8 * depth * STAGE + self._table_room(rows)
        native_launch(
            (
                "experts.cu",
                f"{what}(bf16, BF16, {depth})",
                f"expert_{what.lower()}_bf16_{depth}",
            ),
            given,
            blocks=(blocks, 1, 1),
            threads=32 * (9 if is_sum else 8),
            shared=room,
            chained=self.chained,
        )

    def _route(
        self, shares: Tensor, logits: Tensor, positions: Tensor, tiles: Tensor, pairs: Tensor
    ) -> None:
        rows, s = len(logits), self.settings
        chosen = torch.empty_like(shares, dtype=torch.int32)
        arguments = RouteArguments(
            logits=logits.data_ptr(),
            positions=positions.data_ptr(),
            weights=shares.data_ptr(),
            experts=chosen.data_ptr(),
            tiles=tiles.data_ptr(),
            pairs=pairs.data_ptr(),
            num_tokens=rows,
            num_experts=s.num_experts,
            top_k=s.num_chosen,
            logits_stride=logits.stride(0),
            renormalise=1,
            first=0,
            count=s.num_experts,
        )
        each = next(count for count in (4, 8, 16) if 32 * count >= s.num_experts)
        blocks = next(count for count in (1, 2, 4) if 16 * count >= rows)
        native_launch(
            ("route.cu", f"ROUTE({each})", f"route_{'one_' if rows == 1 else ''}{each}"),
            arguments,
            blocks=(blocks, 1, 1),
            threads=32 if rows == 1 else 512,
            cluster=(blocks, 1, 1),
            chained=self.chained,
        )


def is_experts(each: Bound) -> bool:
    """Return whether an instruction computes a layer's selected experts."""
    return isinstance(each.does, Experts)


def _weight_of(weight: Tensor | None, num_rows: int) -> _WeightParams:
    """Return a weight ``[rows, columns]`` per expert, with ``num_rows`` results."""
    assert weight is not None
    rows, columns = weight.shape
    return _WeightParams(weight.data_ptr(), rows // 16, columns // 128, num_rows, 1.0)


class NativeDelta(HybridCudaExecutor):
    """Linear attention with a token per row."""

    _state_rows: Tensor

    def _run_decode(self, inputs: Tensor, splits: int) -> Tensor:
        # A slot's layers are contiguous, so the kernel counts layers.
        self._state_rows = inputs[2] * self.settings.num_linear
        return super()._run_decode(inputs, splits)

    def delta_rule(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        s, x = self.settings, values[each.does.x]
        dim, heads, columns = s.key_dim, s.value_heads, 0
        if dim in (64, 128) and dim == s.value_dim and s.taps in (2, 3, 4):
            columns = columns_of_a_block(heads, s.key_heads, dim)
        is_step = batch.starts is None and batch.positions is not None
        if not (is_step and columns and takes_native(self.device, x.dtype)):
            return super().delta_rule(each, values, batch)
        assert batch.positions is not None
        out = x.new_empty(len(x), heads * dim)
        _, z, a, b = x.split((s.mixed_width, heads * dim, heads, heads), dim=1)
        place, blocks = s.place_of(each.layer), heads // s.key_heads * dim // columns
        names = {"weight": "convolution", "a_log": "a_log", "dt_bias": "dt_bias", "norm": "norm"}
        arguments = _DeltaStep(
            **{field: each.tensors[name].data_ptr() for field, name in names.items()},
            x=x.data_ptr(),
            z=z.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            window=self._windows[:, place].data_ptr(),
            state=self._memories[:, place].data_ptr(),
            out=out.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=self._state_rows.data_ptr(),
            targets=self._state_rows.data_ptr(),
            **dict.fromkeys(("x_stride", "a_stride", "b_stride", "z_stride"), x.stride(0)),
            out_stride=out.stride(0),
            num_heads=heads,
            num_key_heads=s.key_heads,
            width=s.taps,
            early=self.chained and each.layer > 0,  # slots were written much earlier
            num_blocks=blocks,
            share=-(-2 * dim // (4 * blocks)) * 4,
            eps=s.eps,
        )
        native_launch(
            ("delta_step.cu", f"DELTA_STEP({dim}, {columns})", f"delta_step_{dim}_{columns}"),
            arguments,
            blocks=(s.key_heads * blocks, len(x), 1),
            threads=4 * columns,
            cluster=(blocks, 1, 1),
            chained=self.chained,
        )
        return out


class NativeExecutor(NativeAttention, NativeExperts, NativeDelta, HybridCudaExecutor):
    """Steps on a GPU."""
