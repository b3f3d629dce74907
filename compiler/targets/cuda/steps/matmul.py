"""The dense layers' matmuls. The op tables select a kernel from the format and the number of
rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.attention.attention import ArrangedOutput
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, FAST, STRICT, Gpu
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rms_norm
from tilewright.compiler.targets.cuda.kernels.elementwise.swiglu import swiglu
from tilewright.compiler.targets.cuda.kernels.elementwise.table import CPP, NormSite, bind_norm
from tilewright.compiler.targets.cuda.kernels.matmul import (
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemm_block_triton,
    gemm_swiglu_bf16,
    gemv,
)
from tilewright.compiler.targets.cuda.kernels.matmul.coded_triton import linear as coded_linear
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import dequantise
from tilewright.compiler.targets.cuda.kernels.matmul.e4m3 import round_rows, scale_rows
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_block import (
    BlockTileConfig,
    SplitTileConfig,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import linear as triton_linear
from tilewright.compiler.targets.cuda.kernels.matmul.table import (
    BLOCK,
    BLOCK_E4M3,
    BLOCK_TRITON,
    CODED,
    CUBLAS,
    DENSE,
    E4M3,
    GEMV,
    SWIGLU,
    MatmulSite,
    bind_matmul,
)
from tilewright.compiler.targets.cuda.steps.bound_matmul import BoundMatmul
from tilewright.compiler.targets.cuda.steps.buffers import padded
from tilewright.compiler.targets.cuda.steps.cublas import (
    add_product,
    codes_product,
    store_product,
)
from tilewright.compiler.targets.cuda.steps.plan_readers import (
    mixers_behind,
    norm_readers_of,
    readers_of,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.copies import DequantizedCopies
from tilewright.compiler.targets.cuda.weights.e4m3 import LEAST_LOFI
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import AttentionOp, KernelProgram, LinearOp

LEAST_STRICT = 16
"""Minimum rows of a cuBLAS matmul in strict steps. For one row cuBLAS may select a matrix-vector
kernel with another order of summation. On an H200 with CUDA 13.0 the orders were equal, see
`tests/targets/cuda/strict_products.py`.
"""


def _at_least(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` or more rows from a step's buffer. Additional rows are not read."""
    return rows.as_strided((max(len(rows), count), rows.shape[1]), rows.stride())


def epilogue_of(each: LinearOp) -> int:
    """Return a matmul's epilogue for :func:`.gemv.linear`."""
    return gemv.ADD if each.residual else gemv.SWIGLU if each.swiglu else gemv.STORE


class MatmulOps:
    """Matmuls with their weights. Capturable in a CUDA graph.

    Strict prefill uses cuBLAS, or for codes the kernels of decode steps with their bits. Strict
    decode uses our kernels if they take ``max_rows``, else cuBLAS with at least
    :data:`LEAST_STRICT` rows.

    Args:
        max_rows: Maximum rows in a decode step.
        gpu: GPU for the op tables.
        arithmetic: Arithmetic for the op tables.
        copies: Dequantized weights.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        device: torch.device,
        *,
        max_rows: int,
        gpu: Gpu,
        arithmetic: str,
        copies: DequantizedCopies,
    ) -> None:
        self.device, self._weights = device, weights
        self._gpu, self._arithmetic, self._strict = gpu, arithmetic, arithmetic == STRICT
        self._is_native = is_native = gpu.has_cpp and arithmetic != EXACT
        self._max_rows = max_rows
        self._operand = torch.float32 if arithmetic == EXACT else torch.bfloat16
        self.copies = copies
        self._one = torch.ones((), dtype=torch.float32, device=device)
        widest = max((each.weight.shape[1] for each in plan.products), default=1)
        room = gemv.room_for(max_rows) if is_native else max_rows
        self._normed = torch.zeros(room * padded(widest), dtype=self._operand, device=device)
        self._arranged, self._fed = torch.empty(2, 0, device=device)
        self._before_mixers = mixers_behind(plan)
        has_splits = not gpu.has_cpp and arithmetic == FAST
        self._splits = gemm_block_triton.split_scratch(device) if has_splits else None
        self._readers: dict[int, LinearOp] = {}
        self._matmuls: dict[tuple[int, bool], BoundMatmul] = {}
        self._fed_reader: LinearOp | None = None  # the next matmul, if its input is arranged
        self._norm_readers: dict[int, LinearOp] = {}
        # The next matmul with its deferred norm.
        self._deferred: tuple[LinearOp, gemm_block.DeferredNorm] | None = None
        self._has_dense = is_native and arithmetic == FAST
        if self._has_dense:
            nvrtc.load(device, gemm_bf16.SOURCE, gemm_swiglu_bf16.SOURCE)
            self._norm_readers = norm_readers_of(plan)
            self._squares = torch.empty(8 * gemm_block.SPLIT[0] * widest // 16, device=device)
            if copies.num_lofi:
                nvrtc.load(device, gemm_block_e4m3.SOURCE)
        if is_native:
            nvrtc.load(device, gemv.source(), gemm_block.SOURCE)
            if any(weights.weight_of(op).format in gemv.CODED for op in plan.products):
                nvrtc.load(device, gemv.coded_source(), gemm_block.CODED_SOURCE)
            self._arranged, self._fed = (gemm_block.scratch(widest, device) for _ in range(2))
            self._readers = readers_of(plan)
        norm = partial(NormSite, arithmetic, gpu, is_operand=True)
        self._norms = {
            (fits, decodes): bind_norm(norm(fits=fits, decodes=decodes))
            for fits, decodes in product((True, False), repeat=2)
        }
        for each in plan.products:
            for decodes in (True, False):
                self._bound(each, decodes)

    def run(self, each: LinearOp, out: Tensor, x: Tensor, *, decodes: bool) -> None:
        """Multiply ``x [M, K]`` into ``out``, with the fused norm and epilogue. ``decodes`` marks a
        decode step. In strict decode steps, bits do not depend on the batch.
        """
        bound = self._bound(each, decodes)
        packed, bias, norm, kernel = bound.packed, bound.bias, bound.norm, bound.kernel(out, x)
        is_expected = self._fed_reader is bound.each and kernel == BLOCK
        assert self._fed_reader is None or is_expected, "its input is arranged for another matmul"
        before, self._deferred = self._deferred, None
        is_expected = before is None or (before[0] is bound.each and kernel == BLOCK)
        assert is_expected, "its norm belongs to another matmul"
        if kernel in (E4M3, BLOCK_E4M3):
            self._lofi_product(bound, out, x, decodes, is_ours=kernel == BLOCK_E4M3)
        elif kernel == SWIGLU:
            x = self._norm(x, norm, decodes)
            weight = packed.data if bound.values is None else bound.values
            alone = self._is_alone(each, packed, len(x))
            for rows in gemm_swiglu_bf16.launches_of(len(x)):
                gemm_swiglu_bf16.swiglu(out[rows], x[rows], weight, packed, bias=bias, alone=alone)
        elif kernel == DENSE:
            self._dense_product(each, out, self._norm(x, norm, decodes), packed, bias, decodes)
        elif kernel == CUBLAS:
            if self._strict:
                out, x = _at_least(out, LEAST_STRICT), _at_least(x, LEAST_STRICT)
            self._library_product(each, out, self._norm(x, norm, decodes), packed, bias)
        elif kernel == CODED:
            # Strict steps use one order of summation, regardless of the number of rows.
            coded_linear(
                out,
                self._norm(x, norm, decodes),
                packed,
                bias=bias,
                residual=each.residual,
                swiglu=each.swiglu,
                is_small_m=decodes if self._strict else None,
            )
        elif kernel == BLOCK:
            if before:
                norm = None
            elif norm is None or not gemv.takes_norm(packed.num_columns):
                x, norm = self._norm(x, norm, decodes or self._strict), None
            self._gemm_block(bound, out, x, norm, decodes, before[1] if before else None)
        elif kernel == GEMV:
            x = x if norm is not None else self._norm(x, None, decodes)
            self._native_product(each, out, x, packed, bias, norm, decodes or self._strict)
        elif kernel == BLOCK_TRITON:
            assert self._splits is not None
            gemm_block_triton.linear(
                out,
                self._norm(x, norm, decodes),
                packed,
                self._splits,
                bias=bias,
                residual=each.residual,
                swiglu=each.swiglu,
            )
        else:
            x = self._norm(x, norm, decodes)
            triton_linear(out, x, packed, bias=bias, residual=each.residual, swiglu=each.swiglu)

    def _bound(self, each: LinearOp, decodes: bool) -> BoundMatmul:
        found = self._matmuls.get((id(each), decodes))
        if found is None or found.each is not each:
            found = self._matmuls[id(each), decodes] = self._bind(each, decodes)
        return found

    def _bind(self, each: LinearOp, decodes: bool) -> BoundMatmul:
        packed, norm = self._weights.weight_of(each), None
        if each.norm is not None:
            norm = self._weights.constant(each.norm), each.eps
        codes = None
        if not self._strict:
            codes = self.copies.codes_for(each, LEAST_LOFI, decodes=decodes)
        values = self.copies.values_of(each)
        reader = self._reader_of(each)
        fed = () if reader is None else self._bound(reader, decodes).unaligned.rows_with(BLOCK)
        site = MatmulSite(
            packed,
            decodes,
            self._arithmetic,
            self._gpu,
            has_values=values is not None,
            has_codes=codes is not None,
            has_one_order=self._has_one_order(packed),
            fed=fed,
        )
        aligned, unaligned = bind_matmul(site), bind_matmul(replace(site, is_aligned=False))
        bias = self._weights.bias_of(each)
        return BoundMatmul(each, packed, bias, norm, codes, values, aligned, unaligned)

    def _reader_of(self, op: LinearOp) -> LinearOp | None:
        """Return the matmul that reads a result in the layout of `BLOCK`, or None. A matmul writes
        the layout of its own format.
        """
        reader = self._readers.get(id(op))
        if reader is None:
            return None
        formats = (self._weights.weight_of(matmul).format for matmul in (op, reader))
        return reader if len({name in gemv.CODED for name in formats}) == 1 else None

    def takes_small_m(self, each: LinearOp) -> bool:
        """Return whether a GEMV kernel computes a single decode row."""
        return self._bound(each, True).aligned.at(1) == GEMV

    def _is_ours(self, packed: PackedWeight) -> bool:
        return self._is_native and packed.num_columns % 4 == 0

    def _has_one_order(self, packed: PackedWeight) -> bool:
        """Return whether our kernels give a row the same bits in every decode step. Large bfloat16
        batches use cuBLAS.
        """
        in_blocks = packed.kind != "bf16"
        return self._is_ours(packed) and (in_blocks or self._max_rows <= gemv.most_tokens(packed))

    def _is_alone(self, each: LinearOp, packed: PackedWeight, num_rows: int) -> bool:
        """Return whether the next kernel waits for this matmul. Waiting is faster before some
        mixers, as measured on an H200.
        """
        mixer = self._before_mixers.get(id(each))
        is_late = packed.kind == "bf16" and isinstance(mixer, AttentionOp)
        least = tuning()["matmul"]["min_rows_before_mixer"]
        return mixer is not None and num_rows >= least["bf16" if is_late else "blocks"]

    def _way(self, packed: PackedWeight, num_rows: int) -> BlockTileConfig | SplitTileConfig:
        return gemm_block.choose_way(packed, num_rows, same_bits=self._strict)

    def _gemm_block(
        self,
        bound: BoundMatmul,
        out: Tensor,
        x: Tensor,
        norm: tuple[Tensor, float] | None,
        decodes: bool,
        before: gemm_block.DeferredNorm | None,
    ) -> None:
        """Multiply in launches of up to `gemm_block.MAX_TOKENS` rows, with the layout of the only
        reader for a single launch.
        """
        each, packed = bound.each, bound.packed
        is_fed, self._fed_reader = self._fed_reader is not None, None
        num_rows, launches = len(x), gemm_block.launches_of(len(x))
        out, feeds = self._fed_by(each, out, num_rows, decodes)
        deferred = self._defer(bound, num_rows) if is_fed and decodes else None
        for rows in launches:
            gemm_block.linear(
                out[rows] if len(launches) > 1 else out,
                x[rows],
                packed,
                epilogue=epilogue_of(each),
                arranged=self._fed if is_fed else self._arranged,
                bias=bound.bias,
                norm=norm,
                way=self._way(packed, rows.stop - rows.start),
                is_there=is_fed or before is not None,
                feeds=feeds,
                before=before,
                after=None if deferred is None else deferred[1],
                alone=rows.stop == num_rows and self._is_alone(each, packed, num_rows),
            )
        self._deferred = deferred

    def _fed_by(
        self, op: LinearOp, out: Tensor, num_rows: int, decodes: bool
    ) -> tuple[Tensor, int]:
        """Return the output buffer and its places. If `gemm_block.cu` is the only reader, this
        memory has its layout. Otherwise the places are 0.
        """
        num_places = self._feed(self._reader_of(op), num_rows, decodes)
        return (self._fed, num_places) if num_places else (out, 0)

    def arranged_for(self, attention: AttentionOp, num_rows: int) -> ArrangedOutput | None:
        """Return the output of a decode step's attention if `gemm_block.cu` is its only reader.

        This matmul must run next. None: the output has plain rows.
        """
        reader = self._readers.get(id(attention))  # with any format: attention writes both layouts
        num_places = self._feed(reader, num_rows, decodes=True)
        if reader is None or not num_places:
            return None
        is_coded = self._weights.weight_of(reader).format in gemv.CODED
        return ArrangedOutput(self._fed, num_places, is_coded)

    def _feed(self, reader: LinearOp | None, num_rows: int, decodes: bool) -> int:
        """Mark the next matmul's input as arranged for `BLOCK`, and return its places.

        0: the matmul reads rows.
        """
        if reader is None:
            return 0
        bound = self._bound(reader, decodes)
        if bound.unaligned.at(num_rows) != BLOCK or num_rows > gemm_block.MAX_TOKENS:
            return 0
        self._fed_reader = reader
        return gemm_block.num_places(self._way(bound.packed, num_rows), num_rows)

    def _defer(
        self, first: BoundMatmul, num_rows: int
    ) -> tuple[LinearOp, gemm_block.DeferredNorm] | None:
        """Return the next matmul with its norm, if the first matmul defers this norm.

        The first matmul reads ``_fed``, because it writes the next x to ``_arranged``.
        """
        reader = self._norm_readers.get(id(first.each))
        if reader is None:
            return None
        groups = gemm_block.norm_groups_of(first.packed, self._way(first.packed, num_rows))
        bound = self._bound(reader, decodes=True)
        way = self._way(bound.packed, num_rows)
        is_split = bound.aligned.at(num_rows) == BLOCK and isinstance(way, SplitTileConfig)
        if not groups or not is_split or bound.norm is None:
            return None
        places = gemm_block.num_places(way, num_rows)
        x, squares = self._arranged, self._squares
        return bound.each, gemm_block.DeferredNorm(*bound.norm, x, squares, groups, places)

    def _native_product(
        self,
        each: LinearOp,
        out: Tensor,
        x: Tensor,
        packed: PackedWeight,
        bias: Tensor | None,
        norm: tuple[Tensor, float] | None,
        decodes: bool,
    ) -> None:
        """Launch a matmul for up to `most_tokens` rows at a time. Each launch reads the weight."""
        num_rows, most = len(x), gemv.most_tokens(packed)
        if norm is not None and (num_rows > 1 or not gemv.takes_norm(packed.num_columns)):
            x, norm = self._norm(x, norm, decodes), None
        epilogue = epilogue_of(each)
        for first in range(0, num_rows, most):
            part = slice(first, min(first + most, num_rows))
            gemv.linear(
                out[part],
                x[part],
                packed,
                epilogue=epilogue,
                num_tokens=part.stop - first,
                bias=bias,
                norm=norm,
                alone=part.stop == num_rows and self._is_alone(each, packed, num_rows),
            )

    def _norm(self, x: Tensor, norm: tuple[Tensor, float] | None, decodes: bool) -> Tensor:
        """Return x, or its norm in a separate buffer. Float32 rows of a model with norms after its
        layers are rounded there.
        """
        if norm is None and (x.dtype == self._operand or self._operand == torch.float32):
            return x
        stride = padded(x.shape[1])
        if len(x) * stride <= self._normed.numel():
            out = self._normed[: len(x) * stride].view(-1, stride)
        else:
            out = torch.empty(len(x), stride, dtype=self._operand, device=self.device)
        if norm is None:
            out[:, x.shape[1] :] = 0
            return out[:, : x.shape[1]].copy_(x)
        weight, eps = norm
        if self._norms[gemv.takes_norm(weight.numel()), decodes].at(len(x)) == CPP:
            gemv.rms_norm(out, x, weight, eps=eps, num_tokens=len(x))
        else:
            rms_norm(out, x, weight, eps=eps)
        return out[:, : x.shape[1]]

    def _lofi_product(
        self, bound: BoundMatmul, out: Tensor, x: Tensor, decodes: bool, *, is_ours: bool
    ) -> None:
        """Run an e4m3 operand matmul, by `BLOCK_E4M3` if ``is_ours``."""
        each, packed, bias, copy = bound.each, bound.packed, bound.bias, bound.codes
        assert copy is not None and copy.scales is not None
        codes, scales = self._codes(x, bound.norm, decodes, is_arranged=is_ours)
        if is_ours:
            out, feeds = self._fed_by(each, out, len(x), decodes)
            gemm_block_e4m3.linear(
                out,
                (codes, scales),
                packed,
                copy.scales,
                epilogue=epilogue_of(each),
                bias=bias,
                feeds=feeds,
                alone=self._is_alone(each, packed, len(x)),
            )
            return
        if not each.swiglu:
            found = codes_product(codes, copy.values, self._one)
            scale_rows(out, found, scales, copy.scales, bias=bias, adds=each.residual)
            return
        # Scales are powers of two: they do not change the rounding.
        gate_up = codes_product(codes, copy.values, self._one, dtype=torch.bfloat16)
        if bias is None:
            swiglu(out, gate_up, paired=packed.is_paired, scales=(scales, copy.scales))
            return
        scale_rows(gate_up, gate_up, scales, copy.scales, bias=bias)
        swiglu(out, gate_up, paired=packed.is_paired)

    def _dense_product(
        self,
        each: LinearOp,
        out: Tensor,
        x: Tensor,
        packed: PackedWeight,
        bias: Tensor | None,
        decodes: bool,
    ) -> None:
        out, feeds = self._fed_by(each, out, len(x), decodes)
        gemm_bf16.linear(
            out,
            x,
            packed,
            epilogue=epilogue_of(each),
            bias=bias,
            feeds=feeds,
            alone=self._is_alone(each, packed, len(x)),
        )

    def _codes(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None,
        decodes: bool,
        *,
        is_arranged: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return e4m3 codes and row scales for x or for its norm. ``is_arranged``: in the order of
        `BLOCK_E4M3`.
        """
        if norm is None:
            return round_rows(x, is_arranged=is_arranged)
        if self._has_dense and gemv.takes_norm(norm[0].numel()) and gemm_bf16.has_room(x):
            return gemm_block_e4m3.norm_codes(x, *norm, is_arranged=is_arranged)
        return round_rows(self._norm(x, norm, decodes), is_arranged=is_arranged)

    def _library_product(
        self, each: LinearOp, out: Tensor, x: Tensor, packed: PackedWeight, bias: Tensor | None
    ) -> None:
        stride = out.stride(0)
        # Include the weight's zero rows: cuBLAS is slow at odd widths.
        is_whole = packed.kind == "bf16" and stride == len(packed.data) > packed.num_rows
        is_whole = is_whole and not (each.swiglu or each.residual)
        weight = self._bound(each, False).values
        if weight is None:
            weight = self._dense(packed, stride if is_whole else packed.num_rows)
        if each.swiglu:
            gate_up = torch.mm(x, weight.T)
            if bias is not None:
                gate_up += bias
            swiglu(out, gate_up, paired=packed.is_paired)
            return
        if each.residual:
            add_product(out, x, weight)
        elif is_whole:
            assert out.storage_offset() % stride == 0
            store_product(out.as_strided((len(out), stride), (stride, 1)), x, weight)
        else:
            store_product(out, x, weight)
        if bias is not None:
            out += bias

    def _dense(self, packed: PackedWeight, num_rows: int) -> Tensor:
        """Return the weight as ``[num_rows, in]`` in the operand type. Blocks are dequantized into
        new memory.
        """
        columns = packed.num_columns
        if packed.kind == "bf16":
            return packed.data[:num_rows, :columns].to(self._operand)
        shape = num_rows, padded(columns)
        dense = torch.empty(shape, dtype=self._operand, device=self.device)[:, :columns]
        dequantise(dense, packed)
        return dense
