"""Launches for each instruction: own kernels, and the library's matmuls for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import CHOICES
from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import (
    attend_prompt_kernel,
    attend_token_kernel,
    embed_kernel,
    join_parts_kernel,
    norm_kernel,
    power,
    remember_kernel,
    swiglu_kernel,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.pages import PAGE, Pages
from tilewright.compiler.targets.cuda.engine_generator.parts.products import (
    CudaProducts,
    TritonProducts,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings, turn_table
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import (
    Bound,
    Executor,
    Values,
    with_ends,
)

BLOCK = 1024

SMALL_M: TritonProducts | CudaProducts = TritonProducts()

LIBRARY = "library"
"""Name of torch's matmul. `SMALL_M` has the others."""

WAYS: dict[tuple[Any, ...], str] = {}
"""Fastest matmuls by shape, for all engines of the process."""

TOKENS = 8
"""Prompt tokens per rotating program."""


@dataclass(frozen=True)
class Tokens:
    """``tokens [T]`` and their sequences, int64.

    For prompts, ``starts [T]`` has the first row in each token's prompt. ``places [T]`` has the
    destination of its keys, in elements from the pages' base. ``lasts`` has the rows with logits.
    For decode steps, ``positions`` and ``slots [T]`` select rows of ``table [slots, pages]``.
    Attention has ``splits`` parts.
    """

    tokens: Tensor
    starts: Tensor | None = None
    places: Tensor | None = None
    lasts: Tensor | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    table: Tensor | None = None
    splits: int = 1


class CudaKernels(Executor):
    """The instructions on a GPU (in Triton's interpreter on a CPU), without graphs."""

    pages: Pages

    def __init__(
        self, tensors: dict[str, Tensor], settings: Settings, device: torch.device
    ) -> None:
        self.settings, self.device = settings, device
        self.program = with_ends(self.bind(tensors))
        self.turns = turn_table(settings, device)
        self.num_processors, self.chained = 1, False
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.num_processors = found.multi_processor_count
            self.chained = CHOICES.chained and found.major >= 9

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Run a Triton kernel."""
        if self.chained:
            options["launch_pdl"] = True
        kernel[grid](*arguments, CHAINED=self.chained, **options)

    def _heads(self, **options: Any) -> dict[str, Any]:
        """Return the compile-time sizes for attention kernels."""
        s = self.settings
        sizes = {"H": s.num_heads, "G": s.num_kv_heads, "D": s.head_dim, "E": power(s.head_dim)}
        return {**sizes, **options}

    def _layer_offset(self, each: Bound) -> int:
        """Return a layer's key offset in a page."""
        return self.settings.place_of(each.layer) * self.pages.layer_size

    def embed(self, each: Bound, values: Values, batch: Tokens) -> Tensor:
        table = each.weight
        assert table is not None
        out = table.new_empty(len(batch.tokens), table.shape[1])
        self.launch(embed_kernel, (len(out),), out, batch.tokens, table, *table.shape, BLOCK=BLOCK)
        return out

    def normed(self, each: Bound, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        width = x.shape[1]
        given = out, x, each.norm, width, self.settings.eps
        warps = 8 if width > 2048 else 4
        self.launch(norm_kernel, (len(x),), *given, BLOCK=power(width), num_warps=warps)
        return out

    def product(self, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        rows = next((rows for rows in CHOICES.batches if rows >= len(x)), len(x))
        way = WAYS.get(self._shape(each, rows)) or self.ways(each, len(x))[0]
        return self.product_by(way, each, x, residual)

    def ways(self, each: Bound, num_rows: int) -> tuple[str, ...]:
        """Return the possible matmuls for ``num_rows`` rows."""
        return (*SMALL_M.ways(each, num_rows), LIBRARY)

    def product_by(self, way: str, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run a matmul by the named kernel."""
        weight, swiglu = each.weight, each.does.swiglu
        assert weight is not None
        if way != LIBRARY:
            return SMALL_M.run(self, way, each, x, residual)
        if each.norm is not None:
            x = self.normed(each, x)
        if residual is not None:
            return torch.addmm(residual, x, weight.T)
        y = F.linear(x, weight)
        if not swiglu:
            return y
        width = y.shape[1] // 2
        out = y.new_empty(len(y), width)
        grid = len(y), -(-width // BLOCK)
        self.launch(swiglu_kernel, grid, out, y, width, BLOCK=BLOCK)
        return out

    def _shape(self, each: Bound, num_rows: int) -> tuple[Any, ...]:
        """Return the key for a matmul's time."""
        weight, does = each.weight, each.does
        assert weight is not None
        has_norm = each.norm is not None
        return (num_rows, *weight.shape, weight.dtype, has_norm, does.residual, does.swiglu)

    def gather(self, each: Bound, values: Values, batch: Tokens) -> Tensor:
        x = values[each.does.x]  # all rows of a decode step are last rows
        return x if batch.lasts is None else x.index_select(0, batch.lasts)

    def attended(self, each: Bound, qkv: Tensor, batch: Tokens) -> Tensor:
        out = qkv.new_empty(len(qkv), self.settings.num_heads * self.settings.head_dim)
        if batch.starts is not None:
            self._attend_prompts(each, qkv, batch, out)
        else:
            self._attend_tokens(each, qkv, batch, out)
        return out

    def _attend_prompts(self, each: Bound, qkv: Tensor, batch: Tokens, out: Tensor) -> None:
        s, count = self.settings, len(qkv)
        turned = qkv.new_empty(count, s.num_heads + s.num_kv_heads, s.head_dim)
        self.launch(
            remember_kernel,
            (-(-count // TOKENS), s.qkv_heads),
            *(turned, qkv, self.pages.base, batch.places, batch.starts, self.turns),
            *(count, self._layer_offset(each)),
            **self._heads(TOKENS=TOKENS, PAGE=PAGE, INTERLEAVED=s.interleaved),
        )
        queries = CHOICES.queries
        while queries > 16 and -(-count // queries) * s.num_heads < self.num_processors:
            queries //= 2
        wide = s.head_dim > 128
        self.launch(
            attend_prompt_kernel,
            (-(-count // queries), s.num_heads),
            *(out, turned, qkv, batch.starts, count, s.scale),
            **self._heads(QUERIES=queries, KEYS=32 if wide else 64),
            num_warps=8 if wide and queries > 32 else 4,
        )

    def _attend_tokens(self, each: Bound, qkv: Tensor, batch: Tokens, out: Tensor) -> None:
        s, splits, table = self.settings, batch.splits, batch.table
        assert table is not None
        sizes = self._heads(SPLITS=splits)
        parts = out
        if splits > 1:
            shape = len(qkv), s.num_heads, splits, sizes["E"] + 2
            parts = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.launch(
            attend_token_kernel,
            (len(qkv), s.num_kv_heads, splits),
            *(out, parts, qkv, self.pages.base, table, batch.slots, batch.positions, self.turns),
            *(self._layer_offset(each), table.shape[1], s.scale),
            **self._heads(SPLITS=splits, KEYS=CHOICES.keys, PAGE=PAGE),
            R=power(s.num_heads // s.num_kv_heads),
            INTERLEAVED=s.interleaved,
            num_warps=8 if s.head_dim > 128 or CHOICES.keys > PAGE else 4,
        )
        if splits > 1:
            del sizes["G"]
            self.launch(join_parts_kernel, (len(qkv), s.num_heads), out, parts, **sizes)
