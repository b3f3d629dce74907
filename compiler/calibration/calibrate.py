"""Model calibration for one precision: forward, second moments, codes, segment by segment."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilewright.compiler.calibration.forward import (
    LayeredForward,
    LayerSegment,
    Moments,
    rounded_inputs,
)
from tilewright.compiler.calibration.grids import grid_of
from tilewright.compiler.calibration.methods import (
    DAMPING,
    PASSES,
    Factors,
    factorize,
    gptq,
    imatrix,
)
from tilewright.compiler.calibration.plan import (
    FloatPlan,
    MatrixPlan,
    SegmentPlan,
    plan_segments,
)
from tilewright.compiler.driver import CompilableModel, ModelWeights, lower_model, weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.formats.coded_rows import code_rows
from tilewright.compiler.ir.recipe import load_rows
from tilewright.compiler.precision import ResolvedPrecision
from tilewright.compiler.targets.interface.base import Progress
from tilewright.compiler.targets.pipeline import MATCH, PRECISION
from tilewright.errors import CompileError

T = TypeVar("T")
R = TypeVar("R")

METHODS = ("gptq", "imatrix", "rtn")
_PIECE_ROWS = 4096
"""Rows in a CPU thread's job."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its settings; ``importance``: mean squares by weight name, instead."""

    name: str = "gptq"
    damping: float = DAMPING
    passes: int = PASSES
    importance: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """Rows ``[first, first + num_rows)`` as bytes in the tensor's format."""

    name: str
    first: int
    num_rows: int
    format: str
    axis: str
    data: Tensor


class SegmentWriter(Protocol):
    """A folder under construction, a segment at a time."""

    def has(self, segment: str) -> bool:
        """Return whether a segment's tensors are written."""

    def write(
        self, segment: str, matrices: Iterable[CodedMatrix], floats: Mapping[str, Tensor]
    ) -> None:
        """Write a segment's tensors, all or none."""


class KnownCodes(Protocol):
    """An earlier calibration's codes with the same text and method."""

    def has(self, name: str, first: int, num_rows: int, format: str, axis: str) -> bool:
        """Return whether these rows are known in this format."""

    def read(self, name: str, first: int, num_rows: int, format: str, axis: str) -> Tensor:
        """Return the rows as bytes in their format."""

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the earlier notes about a tensor."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model's graph with its precision, and the plan for each segment."""

    graph_module: GraphModule
    plans: tuple[SegmentPlan, ...]


def prepare(model: CompilableModel, precision: ResolvedPrecision, progress: Progress) -> Prepared:
    """Plan a model's calibration for a precision.

    Raises:
        CompileError: for a precision without weights in blocks, or with a file's own codes.
    """
    graph_module, _ = lower_model(model, precision, (MATCH, PRECISION), progress)
    plans = plan_segments(graph_module, is_tied=model.config.tie_embeddings)
    if not any(plan.matrices for plan in plans):
        raise CompileError(
            f"{model.name}: the configuration has no weight in blocks; allowed: one with bfp4 or "
            "q40 weights, as performance"
        )
    return Prepared(graph_module, plans)


def calibrate(
    model: CompilableModel,
    prepared: Prepared,
    tokens_ST: Tensor,
    writer: SegmentWriter,
    *,
    method: Method,
    device: torch.device,
    progress: Progress,
    known: KnownCodes | None = None,
) -> tuple[str, ...]:
    """Write a model's calibrated weights. Return notes for the user.

    Segments in the writer's folder are skipped, and ``known`` codes are copied. The forward ends
    after the last missing segment.

    Raises:
        CompileError: for NaN or infinite moments, or a format without a grid.
    """
    plans, graph_module = prepared.plans, prepared.graph_module
    source = weight_source(model, model.config.max_positions)
    run = _CalibrationRun(model, source, writer, method, device, known)
    needs_text = method.name != "rtn" and method.importance is None
    forward = LayeredForward(graph_module, source, tokens_ST, device) if needs_text else None
    open_plans = [index for index, plan in enumerate(plans) if not writer.has(plan.segment.name)]
    last = max((i for i in open_plans if run.products(plans[i])), default=-1)
    total = len(plans)
    for index, plan in enumerate(plans):
        moments, weights = None, dict[Node, Tensor]()
        if forward is not None and index <= last:
            weights = forward.load(plan.segment)
            moments = _observe(
                forward,
                plan.segment,
                weights,
                device=device,
                full=method.name == "gptq",
                watched=run.products(plan) if index in open_plans else set(),
                report=partial(_report_part, progress, index, total),
            )
        if index in open_plans:
            run.write(plan, moments, weights)
        progress("calibrate", (index + 1) * 100, total * 100)
    return tuple(run.notes)


def _report_part(progress: Progress, index: int, total: int, percent: int) -> None:
    """Report a segment's progress, in percent."""
    progress("calibrate", index * 100 + percent, total * 100)


def _observe(
    forward: LayeredForward,
    segment: LayerSegment,
    weights: Mapping[Node, Tensor],
    *,
    device: torch.device,
    full: bool,
    watched: Collection[Node | None],
    report: Callable[[int], None],
) -> Moments:
    """Run a segment. Return the moments for the ``watched`` products."""
    skip = _unread(segment)
    cast, total = forward.cast(segment, weights, skip), Moments(full=full)

    def observe(index: int) -> Moments:
        moments = Moments(full=full)

        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node in watched:
                moments.add(node, arguments)

        group = forward.groups[index]
        forward.groups[index] = forward.step(segment, cast, group, watch, skip=skip)
        return moments

    # Moments are added in the groups' order: sums are the same in every run.
    with rounded_inputs(device):
        for done, moments in enumerate(_in_threads(observe, range(forward.num_groups), device)):
            total.merge(moments)
            report(60 * (done + 1) // forward.num_groups)
    return total


def _in_threads(call: Callable[[T], R], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """Call a function for each item: on a CPU in a thread for each core, in order."""
    if device.type != "cpu":
        yield from map(call, items)
        return
    before = torch.get_num_threads()

    def alone(item: T) -> R:
        torch.set_num_threads(1)  # in this thread only
        return call(item)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(alone, items)
    torch.set_num_threads(before)


def _unread(segment: LayerSegment) -> frozenset[Node]:
    """Return the products whose results only the output reads: the head."""
    return frozenset(
        node for node in segment.products if all(user.op == "output" for user in node.users)
    )


class _CalibrationRun:
    """A calibration run: quantizes and writes segments."""

    def __init__(
        self,
        model: CompilableModel,
        source: ModelWeights,
        writer: SegmentWriter,
        method: Method,
        device: torch.device,
        known: KnownCodes | None,
    ) -> None:
        self._model, self._source, self._writer = model, source, writer
        self._method, self._device, self._known = method, device, known
        self._weights: Mapping[Node, Tensor] = {}
        self.notes: list[str] = []

    def products(self, segment: SegmentPlan) -> set[Node | None]:
        """Return the matmuls that need moments."""
        new = (m for m in segment.matrices if not m.is_exact and not self._has_known(m))
        return {matrix.product for matrix in new}

    def _has_known(self, matrix: MatrixPlan) -> bool:
        return self._known is not None and self._known.has(*_rows_of(matrix))

    def write(
        self, plan: SegmentPlan, moments: Moments | None, weights: Mapping[Node, Tensor]
    ) -> None:
        """Quantize and write a segment's tensors, or copy known codes."""
        self._weights = weights
        copied: list[CodedMatrix] = []
        own: list[MatrixPlan] = []
        for matrix in plan.matrices:
            if self._has_known(matrix):
                copied.append(self._copy(matrix))
            else:
                own.append(matrix)
        factors = self._factors(own, moments) if self._method.name == "gptq" else {}
        jobs = [
            (matrix, piece)
            for matrix in own
            for piece in _pieces(matrix.recipe.shape[0], self._device)
        ]

        def code(job: tuple[MatrixPlan, tuple[int, int]]) -> Tensor:
            with torch.no_grad():  # a thread has a mode of its own
                return self._code(job[0], job[1], moments, factors)

        coded = list(_in_threads(code, jobs, self._device))
        floats = {each.name: self._float(each) for each in plan.floats}
        self._writer.write(plan.segment.name, [*copied, *_joined(jobs, coded)], floats)

    def _copy(self, matrix: MatrixPlan) -> CodedMatrix:
        assert self._known is not None
        rows = _rows_of(matrix)
        self.notes += self._known.notes(matrix.name)
        return CodedMatrix(*rows, self._known.read(*rows))

    def _factors(
        self, matrices: Sequence[MatrixPlan], moments: Moments | None
    ) -> dict[object, Factors]:
        """Return the factors for each product input."""
        factors: dict[object, Factors] = {}
        for matrix in matrices:
            if matrix.is_exact or (key := _key(matrix)) in factors:
                continue
            assert moments is not None and matrix.product is not None
            values, counts = _of_expert(moments, matrix)
            if not bool(values.isfinite().all()):
                raise CompileError(
                    f"{matrix.name}: second moments are NaN or infinite; allowed: a model with "
                    "finite activations"
                )
            if int(counts) == 0:
                self.notes.append(f"{matrix.name}: no token of the text; rounded to nearest")
                continue
            assert matrix.recipe.format is not None
            is_out = matrix.recipe.block_axis == "out"
            block = 1 if is_out else get_format(matrix.recipe.format).block
            factors[key] = factorize(values, block, damping=self._method.damping)
        return factors

    def _code(
        self,
        matrix: MatrixPlan,
        piece: tuple[int, int],
        moments: Moments | None,
        factors: Mapping[object, Factors],
    ) -> Tensor:
        """Return the codes for some matrix rows: uint8, a row along the block axis."""
        assert matrix.recipe.format is not None
        format_ = get_format(matrix.recipe.format)
        grid, is_out = grid_of(format_), matrix.recipe.block_axis == "out"
        if grid is None:
            raise CompileError(f"{matrix.name}: format {format_.name} is not calibrated")
        weight = self._rows(matrix, piece)
        method = self._method.name
        importance = self._importance(matrix, moments)
        if matrix.is_exact or method == "rtn":
            encoded = format_.quantise(weight.T.contiguous() if is_out else weight)
        elif method == "gptq" and _key(matrix) in factors:
            own = factors[_key(matrix)]
            passes = self._method.passes
            encoded = gptq(weight, grid, own, along_out=is_out, passes=passes)
        elif method == "imatrix" and importance is not None:
            encoded = imatrix(weight.T if is_out else weight, grid, None if is_out else importance)
        else:
            encoded = format_.quantise(weight.T.contiguous() if is_out else weight)
        return code_rows(format_, encoded).cpu()

    def _rows(self, matrix: MatrixPlan, piece: tuple[int, int]) -> Tensor:
        """Return some matrix rows, from the loaded weight if possible."""
        node = None if matrix.product is None else matrix.product.args[1]
        if isinstance(node, Node) and node in self._weights:
            rows = self._weights[node].flatten(0, -2)
            return rows[matrix.start + piece[0] : matrix.start + piece[1]]
        return load_rows(matrix.recipe, self._source, *piece).to(self._device)

    def _importance(self, matrix: MatrixPlan, moments: Moments | None) -> Tensor | None:
        """Return the mean squares for a matrix's inputs. None: no token reached it."""
        if matrix.is_exact or self._method.name != "imatrix":
            return None
        if self._method.importance is not None:
            name = matrix.recipe.segments[0].name
            found = self._method.importance.get(matrix.name, self._method.importance.get(name))
            if found is not None and found.numel() != matrix.recipe.shape[-1]:
                raise CompileError(
                    f"{matrix.name}: importance of {found.numel()} inputs; allowed: "
                    f"{matrix.recipe.shape[-1]}"
                )
            if found is None:
                self.notes.append(f"{matrix.name}: not in the imatrix file; rounded to nearest")
            return None if found is None else found.to(self._device)
        assert moments is not None
        values, counts = _of_expert(moments, matrix)
        if not bool(values.isfinite().all()):
            raise CompileError(f"{matrix.name}: mean squares are NaN or infinite")
        if int(counts) == 0:
            self.notes.append(f"{matrix.name}: no token of the text; rounded to nearest")
            return None
        return values

    def _float(self, plan: FloatPlan) -> Tensor:
        found: Tensor = self._model.checkpoint.get(plan.source)
        if plan.format is None:
            return found
        if not bool(found.isfinite().all()):
            raise CompileError(f"{plan.source}: holds NaN or inf; allowed: finite values")
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return found.to(kinds[plan.format])


def _rows_of(matrix: MatrixPlan) -> tuple[str, int, int, str, str]:
    """Return a matrix's name, rows (first and count), format and block axis."""
    recipe = matrix.recipe
    assert recipe.format is not None
    return matrix.name, matrix.first, recipe.shape[0], recipe.format, recipe.block_axis


def _pieces(num_rows: int, device: torch.device) -> list[tuple[int, int]]:
    step = _PIECE_ROWS if device.type == "cpu" else num_rows
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _joined(
    jobs: list[tuple[MatrixPlan, tuple[int, int]]], coded: list[Tensor]
) -> Iterable[CodedMatrix]:
    """Join the pieces of each matrix."""
    whole: dict[int, tuple[MatrixPlan, list[Tensor]]] = {}
    for (matrix, _), data in zip(jobs, coded, strict=True):
        whole.setdefault(id(matrix), (matrix, []))[1].append(data)
    for matrix, parts in whole.values():
        name, first, num_rows, format_, axis = _rows_of(matrix)
        data = _beside(parts, format_) if axis == "out" else torch.cat(parts)
        yield CodedMatrix(name, first, num_rows, format_, axis, data)


def _beside(parts: list[Tensor], format_name: str) -> Tensor:
    """Join rows along the outputs: all exponents come before all codes."""
    format_ = get_format(format_name)
    if len(parts) == 1:
        return parts[0]
    if not format_.name.startswith("bfp"):
        return torch.cat(parts, 1)
    share = format_.shared_bits / (format_.block * format_.element_bits + format_.shared_bits)
    ends = [round(part.shape[1] * share) for part in parts]
    heads = [part[:, :end] for part, end in zip(parts, ends, strict=True)]
    return torch.cat([*heads, *(p[:, e:] for p, e in zip(parts, ends, strict=True))], 1)


def _key(matrix: MatrixPlan) -> object:
    """Return an equal key for matrices with the same input and block size."""
    assert matrix.product is not None and matrix.recipe.format is not None
    block = 1 if matrix.recipe.block_axis == "out" else get_format(matrix.recipe.format).block
    return matrix.product.args[0], matrix.expert, block


def _of_expert(moments: Moments, matrix: MatrixPlan) -> tuple[Tensor, Tensor]:
    assert matrix.product is not None
    values, counts = moments.of(matrix.product)
    if matrix.expert is None:
        return values, counts
    return values[matrix.expert], counts[matrix.expert]
