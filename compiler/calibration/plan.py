"""Tensors in a calibrated folder: formats, block axes, and the weights to calibrate."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.calibration.forward import PRODUCTS, LayerSegment, segments_of
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import WEIGHT, info
from tilewright.compiler.ir.recipe import WeightRecipe, cut
from tilewright.errors import CompileError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXACT_BITS = 8
"""Element bits from which every method rounds to nearest: the error is below evaluation noise."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix with blocks: some rows in a checkpoint tensor.

    Attributes:
        name: Tensor name in the folder.
        first: Its first row there, counted over all axes but the last.
        recipe: The rows in the checkpoint, as a two-axis weight.
        start: First row in the graph's weight, counted over all axes but the last.
        product: The matmul with this matrix. None for an embedding.
        expert: Expert index, or None.
    """

    name: str
    first: int
    recipe: WeightRecipe
    start: int = 0
    product: Node | None = None
    expert: int | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether every method rounds this matrix to nearest."""
        return self.product is None or _is_rounded(self.recipe)


@dataclass(frozen=True, slots=True)
class FloatPlan:
    """A tensor without blocks: ``format`` is a float format, or None to keep the stored type."""

    name: str
    source: str
    format: str | None


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The tensors in a graph segment's file."""

    segment: LayerSegment
    matrices: tuple[MatrixPlan, ...]
    floats: tuple[FloatPlan, ...]


def plan_segments(graph_module: GraphModule, *, is_tied: bool) -> tuple[SegmentPlan, ...]:
    """Assign every model tensor to its first segment.

    A tied head is a tensor of its own, unless both uses have the same codes.

    Raises:
        CompileError: for a weight with its file's own codes.
    """
    known: set[tuple[str, int]] = set()
    found = []
    embedding = None
    for segment in segments_of(graph_module):
        matrices: list[MatrixPlan] = []
        floats: list[FloatPlan] = []
        for weight in segment.weights:
            recipe = info(weight).recipe
            if recipe is None or info(weight).role != WEIGHT:
                continue
            reader = next(iter(weight.users))
            product = reader if reader.target in PRODUCTS and reader.args[1] is weight else None
            is_head = is_tied and product is not None and recipe.names == (EMBEDDING,)
            is_shared = is_head and _codes_of(recipe) == embedding and _is_rounded(recipe)
            name = HEAD if is_head and not is_shared else None
            if reader.target is ops.embedding.overload:
                embedding = _codes_of(recipe)
            elif product is None:
                floats += [FloatPlan(s, s, None) for s in recipe.names]
                continue
            if recipe.is_stored:
                raise CompileError(
                    f"{info(weight).fqn}: precision stored keeps the codes of the file; allowed: "
                    "a configuration with named formats, as performance"
                )
            assert recipe.format is not None
            if get_format(recipe.format).block == 1:
                floats += [FloatPlan(name or s, s, recipe.format) for s in recipe.names]
            else:
                matrices += _matrices(recipe, product, name)
        found.append(
            SegmentPlan(
                segment,
                tuple(m for m in matrices if _is_new(known, (m.name, m.first))),
                tuple(f for f in floats if _is_new(known, (f.name, -1))),
            )
        )
    return tuple(found)


def _is_rounded(recipe: WeightRecipe) -> bool:
    """Return whether every method rounds to nearest in the recipe's format."""
    return recipe.format is not None and get_format(recipe.format).element_bits >= EXACT_BITS


def _codes_of(recipe: WeightRecipe) -> tuple[str | None, str]:
    return recipe.format, recipe.block_axis


def _is_new(known: set[tuple[str, int]], key: tuple[str, int]) -> bool:
    if key in known:
        return False
    known.add(key)
    return True


def _matrices(recipe: WeightRecipe, product: Node | None, name: str | None) -> list[MatrixPlan]:
    """Return a weight's rows, cut at experts and at checkpoint tensors."""
    is_stack = len(recipe.shape) == 3
    count, num_rows = (recipe.shape[0], recipe.shape[1]) if is_stack else (1, recipe.shape[0])
    found = []
    start = 0
    for index in range(count):
        for rows in cut(recipe, index * num_rows, (index + 1) * num_rows):
            part = WeightRecipe(
                (rows,), (rows.num_rows, recipe.shape[-1]), recipe.format, recipe.block_axis
            )
            first = rows.rows[0] if rows.rows is not None else 0
            expert = index if is_stack else None
            found.append(MatrixPlan(name or rows.name, first, part, start, product, expert))
            start += rows.num_rows
    return found
