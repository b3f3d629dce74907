"""The typed program as the plan of a generated engine: values by name, one layer for all."""

from __future__ import annotations

import re

from tilewright.compiler.errors import CompileError
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cuda.engine.parts import plan as parts
from tilewright.compiler.targets.program import instructions as typed

_LAYER = re.compile(r"layers\.(\d+)\.")
_NAMES = "allowed: a model of Llama's form, without biases, head norms, windows or experts"


def engine_plan(plan: typed.Plan) -> parts.Plan:
    """The plan of a generated engine that computes what a typed program does.

    Sizes are left to the configuration, so every layer must be the same but for its weights.

    Raises:
        CompileError: for an instruction that generated engines have not, or layers that differ.
    """
    written = _Writer(plan)
    steps = [(_layer_of(each), written.instruction(each)) for each in plan.instructions]
    inside = [index for index, (layer, _) in enumerate(steps) if layer is not None]
    if not inside:
        raise CompileError(f"a program without layers; {_NAMES}")
    first, stop = inside[0], inside[-1] + 1
    layers: dict[int, list[parts.Instruction]] = {}
    current = 0
    for layer, step in steps[first:stop]:
        current = current if layer is None else layer
        layers.setdefault(current, []).append(step)
    for index, layer_steps in layers.items():
        if layer_steps != layers[0]:
            raise CompileError(f"layers 0 and {index} differ; {_NAMES}")
    before, after = ([step for _, step in part] for part in (steps[:first], steps[stop:]))
    return parts.Plan(tuple(before), tuple(layers[0]), tuple(after))


class _Writer:
    """Gives values their names: a buffer is called after what it holds first."""

    def __init__(self, plan: typed.Plan) -> None:
        self._plan = plan
        self._attended = {
            each.qkv.buffer for each in plan.instructions if isinstance(each, typed.Attend)
        }
        self._names: dict[int, str] = {}

    def instruction(self, each: typed.Instruction) -> parts.Instruction:
        if isinstance(each, typed.Embed):
            return parts.Embed(self._out(each.out, "x"), _one_name(each.table))
        if isinstance(each, typed.Linear) and each.bias is None:
            return self._linear(each)
        if isinstance(each, typed.Norm):
            x = self._name(each.x)
            return parts.Norm(self._out(each.out, "normed"), x, _one_name(each.weight))
        if isinstance(each, typed.Gather):
            x = self._name(each.x)
            return parts.Gather(self._out(each.out, "last"), x)
        if isinstance(each, typed.Attend) and _is_plain(each):
            qkv = self._name(each.qkv)
            return parts.Attend(self._out(each.out, "heads"), qkv)
        what = getattr(each, "fqn", "") or type(each).__name__
        raise CompileError(f"{what}: no instruction of generated engines; {_NAMES}")

    def _linear(self, each: typed.Linear) -> parts.Linear:
        x = self._name(each.x)
        role = self._plan.buffers[each.out.buffer].role
        first = "qkv" if each.out.buffer in self._attended else "y"
        first = "logits" if role == typed.LOGITS else "inner" if each.swiglu else first
        return parts.Linear(
            out=self._name(each.out) if each.residual else self._out(each.out, first),
            x=x,
            weights=_names(each.weight),
            norm="" if each.norm is None else _one_name(each.norm),
            residual=each.residual,
            swiglu=each.swiglu,
        )

    def _out(self, place: typed.Place, name: str) -> str:
        """The name of a value that is written anew; buffers are used for several values."""
        _check_whole(place)
        self._names[place.buffer] = name
        return name

    def _name(self, place: typed.Place) -> str:
        _check_whole(place)
        return self._names[place.buffer]


def _check_whole(place: typed.Place) -> None:
    if place.first or place.stride not in (0, place.width):
        raise CompileError(f"a value among the columns of another; {_NAMES}")


def _is_plain(each: typed.Attend) -> bool:
    return not each.window and not each.soft_cap and each.factor == 1.0


def _layer_of(each: typed.Instruction) -> int | None:
    """The layer that an instruction's weights or state are of."""
    found = _LAYER.search(str(each))
    return int(found[1]) if found else None


def _names(recipe: WeightRecipe) -> tuple[str, ...]:
    """Names without what stands before a layer's own: whole tensors, stacked."""
    if recipe.pad_rows or any(each.rows is not None or each.offset for each in recipe.segments):
        raise CompileError(f"{recipe.names[0]}: not a whole tensor; {_NAMES}")
    return tuple(_LAYER.sub("", name.removeprefix("model.")) for name in recipe.names)


def _one_name(recipe: WeightRecipe) -> str:
    (name,) = _names(recipe)
    return name
