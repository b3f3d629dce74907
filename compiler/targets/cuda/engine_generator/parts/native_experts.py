"""Experts of decode steps in CUDA C++: a router that also sorts pairs of a row and an expert by
expert, gates and ups of their own experts and of the one that all rows share, and what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_cuda import HybridCudaExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_plan import Experts
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_steps import BoundMixer
from tilewright.compiler.targets.cuda.engine_generator.parts.native_cuda import (
    native_launch,
    takes_native,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, Values
from tilewright.compiler.targets.cuda.kernels.experts.experts import _Experts, _Weight
from tilewright.compiler.targets.cuda.kernels.experts.route import RouteArguments

TILE = 8
"""Pairs of a row and an expert that share a read of the expert's weight."""

STAGE = 16 * 128 * 2 + TILE * (128 + 8) * 2
"""Bytes of a warp's step of 128 columns in flight: weights and x."""

MOST_ROOM = 225 * 1024


class NativeExperts(HybridCudaExecutor):
    """Experts of up to 64 rows of a decode step in three kernels."""

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
        """Whether the kernels run on this device, with experts of such sizes and so many rows."""
        s = self.settings
        if num_rows > 64 or s.num_chosen > 32 or s.num_experts > 512:
            return False
        if s.hidden_size % 128 or s.expert_size % 128 or s.shared_size % 128:
            return False
        return self._room(num_rows, 3) <= MOST_ROOM and takes_native(self.device, s.dtype)

    def _room(self, num_rows: int, depth: int) -> int:
        """Bytes of a sum's block, whose warps have ``depth`` steps in flight each."""
        pairs = num_rows * self.settings.num_chosen
        products = (pairs + num_rows) * 64 + -(-pairs // 4) * 16
        return 9 * depth * STAGE + products + self._table_room(num_rows)

    def _table_room(self, num_rows: int) -> int:
        """Bytes of a block's table: each tile's expert and pairs, and how many tiles there are."""
        return self._most_tiles(num_rows) * (TILE * 2 + 4) + 4

    def _most_tiles(self, num_rows: int) -> int:
        """Tiles of pairs, however they fall."""
        pairs = num_rows * self.settings.num_chosen
        fewest = min(pairs, self.settings.num_experts)
        return fewest + (pairs - fewest) // TILE

    def _experts(
        self, each: Bound, shared: tuple[Bound, Bound], values: Values, positions: Tensor
    ) -> None:
        """What `Experts` says, and what makes ``shared``."""
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
        first = _Experts(
            own=_weight_of(gates_ups, s.expert_size),
            shared=_weight_of(shared[0].weight, s.shared_size),
            **{"x": x.data_ptr(), "shared_x": x.data_ptr(), **given},
            **{"x_stride": x.stride(0), "shared_x_stride": x.stride(0), "epilogue": 2},
            **{"out": inner.data_ptr(), "out_stride": inner.stride(0), "out_each": s.expert_size},
            **{"shared_out": shared_inner.data_ptr(), "shared_out_stride": s.shared_size},
        )
        self._run_experts("LINEAR", 4, first, self.num_processors, rows)
        gates = logits[:, s.num_experts :]
        last = _Experts(
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
    """Whether an instruction is that of a layer's chosen experts."""
    return isinstance(each.does, Experts)


def _weight_of(weight: Tensor | None, num_rows: int) -> _Weight:
    """A weight ``[rows, columns]`` of each expert, whose result has ``num_rows``."""
    assert weight is not None
    rows, columns = weight.shape
    return _Weight(weight.data_ptr(), rows // 16, columns // 128, num_rows, 1.0)
