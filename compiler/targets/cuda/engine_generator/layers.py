"""Translation from a typed program to an engine plan, with one layer for all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cuda.engine_generator.mixers import GATES, MixerWriter
from tilewright.compiler.targets.cuda.engine_generator.parts import plan as parts
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import DeltaRule, HybridPlan
from tilewright.compiler.targets.program import instructions as typed
from tilewright.errors import CompileError

_LAYER = re.compile(r"layers\.(\d+)\.")
_NAMES = (
    "allowed: a model of Llama's form, without biases, head norms, windows or experts, or one with "
    "gated and linear attention and experts in every layer (qwen3_5_moe)"
)

_VALUES = {
    "wqkv": "qkv",
    "delta_in": "mixed",
    "delta_gates": GATES,
    "router": "logits",
    "shared_ff2": "shared",
    "lm_head": "logits",
}
"""Names for matmul results, by the weight's tensor group."""


def engine_plan(plan: typed.KernelProgram) -> parts.Plan:
    """Return the engine plan for a typed program.

    Sizes come from the configuration. Therefore layers with the same kind must be equal except for
    their weights.

    Raises:
        CompileError: Generated engines do not support an instruction, or layers differ.
    """
    written = _Writer(plan)
    steps = _with_gates((_layer_of(each), written.instruction(each)) for each in plan.instructions)
    inside = [index for index, (layer, _) in enumerate(steps) if layer is not None]
    if not inside:
        raise CompileError(f"a program without layers; {_NAMES}")
    first, stop = inside[0], inside[-1] + 1
    layers: dict[int, list[parts.Instruction]] = {}
    current = 0
    for layer, step in steps[first:stop]:
        current = current if layer is None else layer
        layers.setdefault(current, []).extend(_made([step]))
    kinds = _kinds(layers)
    before, after = (_made([step for _, step in part]) for part in (steps[:first], steps[stop:]))
    ends = {"first": tuple(before), "last": tuple(after)}
    if written.offset:
        return HybridPlan(**ends, layer=kinds[False], linear_layer=kinds[True])
    return parts.Plan(**ends, layer=kinds[False])


def _with_gates(
    steps: Iterable[tuple[int | None, parts.Instruction | None]],
) -> list[tuple[int | None, parts.Instruction | None]]:
    """Return the steps with linear attention gates merged into the preceding matmul."""
    found: list[tuple[int | None, parts.Instruction | None]] = []
    for layer, step in steps:
        if isinstance(step, parts.Linear) and step.out == GATES:
            _, before = found.pop()
            if not isinstance(before, parts.Linear) or before.x != step.x:
                raise CompileError(f"gates of {step.x} behind another product; {_NAMES}")
            step = replace(before, weights=(*before.weights, *step.weights))
        found.append((layer, step))
    return found


def _made(steps: Iterable[parts.Instruction | None]) -> list[parts.Instruction]:
    """Return the instructions without those merged into a later instruction."""
    return [step for step in steps if step is not None]


def _kinds(
    layers: Mapping[int, Sequence[parts.Instruction]],
) -> dict[bool, tuple[parts.Instruction, ...]]:
    """Return a layer's instructions. The key is true for linear attention."""
    found: dict[bool, tuple[int, tuple[parts.Instruction, ...]]] = {}
    for index, steps in layers.items():
        is_linear = any(isinstance(each, DeltaRule) for each in steps)
        first, expected = found.setdefault(is_linear, (index, tuple(steps)))
        if tuple(steps) != expected:
            raise CompileError(f"layers {first} and {index} differ; {_NAMES}")
    if False not in found:
        raise CompileError(f"no layer of attention; {_NAMES}")
    return {is_linear: steps for is_linear, (_, steps) in found.items()}


class _Writer:
    """Translator for instructions, with names for values. A buffer is named after its first value.

    Attributes:
        offset: Number added to norm weights.
    """

    def __init__(self, plan: typed.KernelProgram) -> None:
        self._plan = plan
        self.offset = float(any(isinstance(each, typed.DeltaRuleOp) for each in plan.instructions))
        self._values: dict[int, tuple[str, int]] = {}  # by buffer: its name and width
        self._mixers = MixerWriter(self._name, self._out, self._norm)

    def instruction(self, each: typed.Instruction) -> parts.Instruction | None:
        """Translate an instruction. Return None if it is merged into a later instruction."""
        if isinstance(each, typed.EmbedOp):
            return parts.Embed(self._out(each.out, "x"), _one_name(each.table))
        if isinstance(each, typed.LinearOp) and each.bias is None:
            return self._linear(each)
        if isinstance(each, typed.NormOp):
            x = self._name(each.x)
            return parts.Norm(self._out(each.out, "normed"), x, self._norm(each.weight))
        if isinstance(each, typed.GatherOp):
            x = self._name(each.x)
            return parts.Gather(self._out(each.out, "last"), x)
        if isinstance(each, typed.AttentionOp) and _is_plain(each) and not self.offset:
            qkv = self._name(each.qkv)
            return parts.Attend(self._out(each.out, "heads"), qkv)
        if self.offset and self._mixers.takes(each):
            return self._mixers.instruction(each)
        what = getattr(each, "fqn", "") or type(each).__name__
        raise CompileError(f"{what}: no instruction of generated engines; {_NAMES}")

    def _linear(self, each: typed.LinearOp) -> parts.Linear:
        x = self._name(each.x)
        name = "inner" if each.swiglu else _VALUES.get(each.group, "y")
        return parts.Linear(
            out=self._name(each.out) if each.residual else self._out(each.out, name),
            x=x,
            weights=_names(each.weight),
            norm="" if each.norm is None else self._norm(each.norm),
            residual=each.residual,
            swiglu=each.swiglu,
        )

    def _norm(self, recipe: WeightRecipe) -> str:
        """Return a norm weight's name, for the residual stream or the q and k heads."""
        return _one_name(recipe, self.offset)

    def _out(self, place: typed.BufferView, name: str) -> str:
        """Name a new value in a buffer. Buffers have several values in sequence."""
        if place.first:
            raise CompileError(f"a value among the columns of another; {_NAMES}")
        self._values[place.buffer] = name, place.width
        return name

    def _name(self, place: typed.BufferView, first: int = 0, width: int | None = None) -> str:
        """Return a buffer value's name: all columns, or ``width`` columns from ``first``."""
        name, whole = self._values[place.buffer]
        if (place.first, place.width) != (first, whole if width is None else width):
            raise CompileError(f"a value among the columns of another; {_NAMES}")
        return name


def _is_plain(each: typed.AttentionOp) -> bool:
    is_plain = not each.window and not each.soft_cap and each.factor == 1.0
    return is_plain and each.sinks is None


def _layer_of(each: typed.Instruction) -> int | None:
    """Return the layer that an instruction's weights or state belong to."""
    found = _LAYER.search(str(each))
    return int(found[1]) if found else None


def _names(recipe: WeightRecipe, offset: float = 0.0) -> tuple[str, ...]:
    """Return whole tensors' names without the layer prefix. A query's gate has a separate
    name.
    """
    found = []
    for each in recipe.segments:
        name = each.name
        if each.rows is not None and name.endswith("q_proj.weight") and each.part in _QUERY:
            name = name.replace("q_proj", f"{each.part}_proj")
        elif each.rows is not None:
            raise CompileError(f"{each.name}: not a whole tensor; {_NAMES}")
        if recipe.pad_rows or each.offset != offset:
            raise CompileError(f"{each.name}: padded, or of another offset; {_NAMES}")
        found.append(_LAYER.sub("", name.removeprefix("model.")))
    return tuple(dict.fromkeys(found))


_QUERY = ("q", "gate")


def _one_name(recipe: WeightRecipe, offset: float = 0.0) -> str:
    (name,) = _names(recipe, offset)
    return name
