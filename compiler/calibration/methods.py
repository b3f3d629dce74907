"""Calibration methods on one weight: diagonal (imatrix), GPTQ with candidate scales, and descent.

Legend: N rows (outputs), D columns (inputs), B elements in a block, C candidate scales, M blocks.
A weight ``[N, D]`` is processed as ``[D, N]``, all rows at once. Results are on the input's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.calibration.grids import Grid, ScaledGrid, Scales
from tilewright.compiler.formats.base import Encoded
from tilewright.errors import CompileError

DAMPING = 0.1
PASSES = 3
_GROUP = 32
"""Columns in a descent matmul, and in an update with blocks along out."""
_CPU_ROWS = 2048
"""Rows processed together on a CPU: the working set stays in its cache."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factorized second moments, shared by all weights with the same input.

    ``order`` [D]: the order in which columns are quantized. ``damped`` [D, D]: second
    moments with damping, in that order. ``upper`` [D, D]: the upper Cholesky factor for the inverse
    moments.
    """

    order: Tensor
    damped: Tensor
    upper: Tensor


def factorize(moments_DD: Tensor, block: int, *, damping: float = DAMPING) -> Factors:
    """Order column blocks by second moments, descending; damp and factorize.

    ``block`` is 1 if blocks run along the outputs. A partial last block is padded: the factors
    have whole blocks.

    Raises:
        CompileError: for second moments without a Cholesky factorization.
    """
    size = moments_DD.shape[0]
    diagonal = moments_DD.diagonal()
    padding = -size % block
    padded_D = torch.nn.functional.pad(diagonal, (0, padding))
    blocks_M = padded_D.view(-1, block).sum(1).argsort(descending=True, stable=True)
    inside_B = torch.arange(block, device=moments_DD.device)
    order_D = (blocks_M.unsqueeze(1) * block + inside_B).flatten()
    damped = torch.nn.functional.pad(moments_DD, (0, padding, 0, padding))
    mean = float(diagonal.mean())
    damped = damped + torch.eye(size + padding, device=damped.device) * (damping * mean)
    damped = damped[order_D][:, order_D]
    lower, failed = torch.linalg.cholesky_ex(damped.double())
    if mean <= 0 or int(failed):
        raise CompileError(
            "second moments: not positive definite; allowed: a longer text, or --method imatrix"
        )
    inverse = torch.cholesky_inverse(lower)
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed):
        raise CompileError("second moments: not invertible; allowed: a longer text")
    return Factors(order_D, damped, upper.float())


def imatrix(weight_NK: Tensor, grid: Grid, importance_K: Tensor | None) -> Encoded:
    """Choose each block's scale by squared error, weighted by ``importance_K`` (None: 1).

    Blocks run along the last axis; a row may be a weight's column.
    """
    size, block = weight_NK.shape[1], grid.format.block
    pad = torch.nn.functional.pad
    weight_NK = pad(weight_NK, (0, -size % block))
    even = weight_NK.new_ones(size) if importance_K is None else importance_K.float()
    even_BM = pad(even, (0, -size % block)).view(-1, block).T
    codes, scales, minimums = [], [], []
    for rows_RK in weight_NK.split(max(1, (1 << 20) // weight_NK.shape[1])):
        blocks_BX = rows_RK.reshape(-1, block).T.contiguous()
        found = grid.candidates(blocks_BX)
        importance_BX = even_BM.repeat(1, rows_RK.shape[0])
        losses = []
        for index in range(found.scale.shape[0]):
            one = _candidate(found, index)
            off = grid.values(grid.codes(blocks_BX, one), one).sub_(blocks_BX)
            losses.append(off.square_().mul_(importance_BX).sum(0))
        chosen = found.pick(torch.stack(losses).argmin(0))
        codes.append(grid.codes(blocks_BX, chosen).T.reshape(rows_RK.shape))
        scales.append(chosen.scale.view(rows_RK.shape[0], -1))
        minimums.append(None if chosen.minimum is None else chosen.minimum.view_as(scales[-1]))
    joined = None if minimums[0] is None else torch.cat([m for m in minimums if m is not None])
    return grid.encode(torch.cat(codes)[:, :size], Scales(torch.cat(scales), joined))


def gptq(
    weight_ND: Tensor,
    grid: Grid,
    factors: Factors,
    *,
    along_out: bool = False,
    passes: int = PASSES,
) -> Encoded:
    """Quantize a weight for the least output error, by GPTQ and ``passes`` descent passes.

    The encoding has blocks along the last axis: of ``[N, D]``, or of ``[D, N]`` if ``along_out``.
    """
    num_rows, size = weight_ND.shape
    padding = factors.order.numel() - size
    weight_ND = torch.nn.functional.pad(weight_ND.float(), (0, padding))
    back_D = factors.order.argsort()
    step = _CPU_ROWS if weight_ND.device.type == "cpu" else num_rows
    step = -(-step // grid.format.block) * grid.format.block
    codes, scales, minimums = [], [], []
    for rows_RD in weight_ND.split(step):
        start_DR = rows_RD.T[factors.order].contiguous()
        if along_out:
            start_DR = torch.nn.functional.pad(start_DR, (0, -rows_RD.shape[0] % grid.format.block))
        run = _along_out if along_out else _along_in
        codes_DR, chosen = run(start_DR, grid, factors)
        how: Any = {"along_out": along_out, "passes": passes}
        chosen = _descend(start_DR, codes_DR, chosen, grid, factors, **how)
        codes.append(codes_DR[back_D][:size, : rows_RD.shape[0]])
        block = 1 if along_out else grid.format.block
        back_M = back_D.view(-1, block)[:, 0].div(block, rounding_mode="floor")
        scales.append(chosen.scale[back_M][: -(-size // block)])
        if chosen.minimum is not None:
            minimums.append(chosen.minimum[back_M][: -(-size // block)])
    minimum = torch.cat(minimums, 1) if minimums else None
    codes_DN, joined = torch.cat(codes, 1), Scales(torch.cat(scales, 1), minimum)
    if along_out:
        return grid.encode(codes_DN, joined)
    transposed = Scales(joined.scale.T, None if minimum is None else minimum.T)
    return grid.encode(codes_DN.T.contiguous(), transposed)


def _along_in(start_DN: Tensor, grid: Grid, factors: Factors) -> tuple[Tensor, Scales]:
    """GPTQ with blocks along the inputs: codes ``[D, N]`` and scales ``[M, N]``.

    Every candidate scale runs the recursion inside its block; each row keeps the candidate of
    least accumulated loss.
    """
    work_DN, upper, block = start_DN.clone(), factors.upper, grid.format.block
    codes_DN = torch.empty_like(work_DN)
    scales, minimums = [], []
    for start in range(0, work_DN.shape[0], block):
        end = start + block
        found = grid.candidates(work_DN[start:end]).inverted()
        count = found.scale.shape[0]
        inner_BCN = work_DN[start:end].unsqueeze(1).repeat(1, count, 1)
        code_BCN, error_BCN = torch.empty_like(inner_BCN), torch.empty_like(inner_BCN)
        loss_CN = torch.zeros_like(found.scale)
        part_BB = upper[start:end, start:end]
        inverses = part_BB.diagonal().reciprocal()
        for k in range(block):
            code_BCN[k] = grid.codes(inner_BCN[k], found)
            error = (inner_BCN[k] - grid.values(code_BCN[k], found)) * inverses[k]
            error_BCN[k] = error
            loss_CN.addcmul_(error, error)
            if k + 1 < block:
                inner_BCN[k + 1 :].addcmul_(part_BB[k, k + 1 :, None, None], error, value=-1)
        best_N = loss_CN.argmin(0)
        index = best_N.expand(block, 1, -1)
        codes_DN[start:end] = code_BCN.gather(1, index)[:, 0]
        chosen = found.pick(best_N)
        scales.append(chosen.scale)
        if chosen.minimum is not None:
            minimums.append(chosen.minimum)
        if end < work_DN.shape[0]:
            work_DN[end:].addmm_(
                upper[start:end, end:].T, error_BCN.gather(1, index)[:, 0], alpha=-1
            )
    return codes_DN, Scales(torch.stack(scales), torch.stack(minimums) if minimums else None)


def _along_out(start_DN: Tensor, grid: Grid, factors: Factors) -> tuple[Tensor, Scales]:
    """GPTQ with blocks along the outputs: codes ``[D, N]`` and scales ``[D, N / B]``.

    A column chooses its scales by squared error on its current values.
    """
    work_DN, upper, block = start_DN.clone(), factors.upper, grid.format.block
    size, num_rows = work_DN.shape
    codes_DN, errors_DN = torch.empty_like(work_DN), torch.empty_like(work_DN)
    scales, minimums = [], []
    for start in range(0, size, _GROUP):
        end = min(start + _GROUP, size)
        for j in range(start, end):
            column_BX = work_DN[j].view(-1, block).T.contiguous()
            found = grid.candidates(column_BX)
            tried = [_candidate(found, index) for index in range(found.scale.shape[0])]
            codes = torch.stack([grid.codes(column_BX, one) for one in tried])
            values = torch.stack([grid.values(c, one) for c, one in zip(codes, tried, strict=True)])
            best_X = (values - column_BX).square().sum(1).argmin(0)
            chosen = found.pick(best_X)
            index = best_X.expand(1, block, -1)
            codes_DN[j] = codes.gather(0, index)[0].T.reshape(num_rows)
            off_BX = column_BX - values.gather(0, index)[0]
            errors_DN[j] = off_BX.T.reshape(num_rows) / upper[j, j]
            work_DN[j + 1 : end].addr_(upper[j, j + 1 : end], errors_DN[j], alpha=-1)
            scales.append(chosen.scale)
            if chosen.minimum is not None:
                minimums.append(chosen.minimum)
        work_DN[end:].addmm_(upper[start:end, end:].T, errors_DN[start:end], alpha=-1)
    return codes_DN, Scales(torch.stack(scales), torch.stack(minimums) if minimums else None)


def _descend(
    start_DN: Tensor,
    codes_DN: Tensor,
    scales: Scales,
    grid: Grid,
    factors: Factors,
    *,
    along_out: bool,
    passes: int,
) -> Scales:
    """Lower the damped error by changing single codes, column by column. Return the scales.

    ``codes_DN`` is changed in place. Between passes, float scales along the inputs are fitted to
    the codes.
    """
    if not passes:
        return scales
    damped = factors.damped
    columns = _columns(scales, grid, codes_DN.shape[0], along_out=along_out)
    off_DN = start_DN.clone()
    for j, one in enumerate(columns):
        off_DN[j] -= grid.values(codes_DN[j], one)
    residual_DN = damped @ off_DN
    del off_DN
    for index in range(passes):
        if index and isinstance(grid, ScaledGrid) and not along_out:
            scales = _fit_scales(codes_DN, scales, grid, damped, residual_DN)
            columns = _columns(scales, grid, codes_DN.shape[0], along_out=along_out)
        _sweep(codes_DN, columns, grid, damped, residual_DN)
    return scales


def _sweep(
    codes_DN: Tensor, columns: list[Scales], grid: Grid, damped: Tensor, residual_DN: Tensor
) -> None:
    """Round every column again, with all others fixed. A column group costs a single matmul."""
    inverses = damped.diagonal().reciprocal()
    for start in range(0, codes_DN.shape[0], _GROUP):
        end = min(start + _GROUP, codes_DN.shape[0])
        own_GG, own_GN = damped[start:end, start:end], residual_DN[start:end].clone()
        changes_GN = torch.empty_like(own_GN)
        for j in range(end - start):
            one = columns[start + j]
            before = grid.values(codes_DN[start + j], one)
            codes = grid.codes((own_GN[j] * inverses[start + j]).add_(before), one)
            codes_DN[start + j] = codes
            torch.sub(grid.values(codes, one), before, out=changes_GN[j])
            own_GN[j + 1 :].addr_(own_GG[j, j + 1 :], changes_GN[j], alpha=-1)
        residual_DN.addmm_(damped[:, start:end], changes_GN, alpha=-1)


def _fit_scales(
    codes_DN: Tensor, scales: Scales, grid: ScaledGrid, damped: Tensor, residual_DN: Tensor
) -> Scales:
    """Move each block's scale to the smallest damped error for its codes, block after block."""
    fitted, block = scales.scale.clone(), grid.format.block
    for m, scale_N in enumerate(fitted):
        inside = slice(m * block, (m + 1) * block)
        codes_BN = codes_DN[inside]
        slope_N = (codes_BN * residual_DN[inside]).sum(0)
        curvature_N = (codes_BN * (damped[inside, inside] @ codes_BN)).sum(0)
        step_N = (slope_N / curvature_N).masked_fill_(curvature_N <= 0, 0)
        stored_N = grid.stored_scales(scale_N + step_N)
        change_N = (stored_N - scale_N).masked_fill_(curvature_N <= 0, 0)
        scale_N += change_N
        residual_DN.addmm_(damped[:, inside], codes_BN * change_N, alpha=-1)
    return Scales(fitted, scales.minimum)


def _columns(scales: Scales, grid: Grid, size: int, *, along_out: bool) -> list[Scales]:
    """Return the scales of each column. Columns of a block share them."""
    block, found = grid.format.block, list[Scales]()
    for j in range(size):
        is_first = along_out or j % block == 0
        found.append(_column(scales, j, block, along_out=along_out) if is_first else found[-1])
    return found


def _column(scales: Scales, j: int, block: int, *, along_out: bool) -> Scales:
    """Return column ``j``'s scales, one for each row."""
    if not along_out:
        j //= block
    scale, minimum = scales.scale[j], None if scales.minimum is None else scales.minimum[j]
    if along_out:
        scale = scale.repeat_interleave(block)
        minimum = None if minimum is None else minimum.repeat_interleave(block)
        return Scales(scale, minimum)
    return Scales(scale, minimum).inverted()


def _candidate(scales: Scales, index: int) -> Scales:
    minimum = None if scales.minimum is None else scales.minimum[index]
    return Scales(scales.scale[index], minimum)
