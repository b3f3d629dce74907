"""Translation for a typed program's mixers in generated engines: several instructions become
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cuda.engine_generator.parts import plan as parts
from tilewright.compiler.targets.program import instructions as typed
from tilewright.errors import CompileError

GATES = "gates"
"""Name for linear attention gates. They become columns in its input."""

_LAYER = re.compile(r"^model\.layers\.\d+\.")

_Started = typed.NormHeads | typed.AttentionOp | typed.TopKRouteOp | typed.ExpertLinearOp
_TAKEN = _Started | typed.SigmoidGate | typed.DeltaRuleOp | typed.ExpertSum


class MixerWriter:
    """Collects instructions for attention or experts until the last.

    Args:
        name: Returns a value's name.
        out: Names a new value.
        norm: Returns a norm weight's name.
    """

    def __init__(
        self,
        name: Callable[..., str],
        out: Callable[[typed.BufferView, str], str],
        norm: Callable[[WeightRecipe], str],
    ) -> None:
        self._name, self._out, self._norm = name, out, norm
        self._started: list[_Started] = []

    def takes(self, each: typed.Instruction) -> bool:
        """Return whether an instruction belongs to a mixer."""
        return isinstance(each, _TAKEN)

    def instruction(self, each: typed.Instruction) -> parts.Mixer | None:
        """Return the mixer that ends with this instruction, or None.

        Raises:
            CompileError: Generated engines do not support the mixer.
        """
        if isinstance(each, _Started):
            self._started.append(each)
            return None
        started, self._started = self._started, []
        if isinstance(each, typed.SigmoidGate):
            return self._gated_attend(started, each)
        if isinstance(each, typed.ExpertSum):
            return self._experts(started, each)
        assert isinstance(each, typed.DeltaRuleOp) and not started
        return self._delta_rule(each)

    def _gated_attend(self, started: list[_Started], gated: typed.SigmoidGate) -> parts.GatedAttend:
        match started:
            case [typed.NormHeads() as normed, typed.AttentionOp() as attend]:
                width = normed.qkv.width
                x = self._name(normed.qkv, width=width)
                self._same(x, self._name(gated.gate, first=width, width=gated.gate.width))
                self._same(normed.out, attend.qkv)
                self._same(attend.out, gated.x)
                self._same((attend.window, attend.soft_cap, attend.factor), (0, 0.0, 1.0))
                out = self._out(gated.out, "heads")
                q_norm, k_norm = self._norm(normed.q_norm), self._norm(normed.k_norm)
                return parts.GatedAttend(out, x, q_norm, k_norm)
        raise CompileError("a gate of something else than attention with head norms")

    def _delta_rule(self, each: typed.DeltaRuleOp) -> parts.DeltaRule:
        convolve = each.convolve
        if convolve is None:
            raise CompileError(f"{each.state.name}: linear attention without a convolution")
        width, heads = convolve.x.width, each.a.width
        x = self._name(convolve.x, width=width)
        self._same(x, self._name(each.z, first=width, width=each.z.width))
        gates = self._name(each.a, width=heads)
        self._same((gates, gates), (GATES, self._name(each.b, first=heads, width=heads)))
        return parts.DeltaRule(
            out=self._out(each.out, "heads"),
            x=x,
            convolution=_plain(convolve.weight),
            a_log=_plain(each.a_log),
            dt_bias=_plain(each.dt_bias),
            norm=_plain(each.norm),
        )

    def _experts(self, started: list[_Started], total: typed.ExpertSum) -> parts.Experts:
        match started:
            case [typed.TopKRouteOp() as route, typed.ExpertLinearOp() as inner]:
                if total.shared is None or not (total.residual and route.renormalise):
                    raise CompileError(f"{total.fqn}: without an expert of all tokens, or shares")
                shared, gate = total.shared
                count = route.logits.width
                logits = self._name(route.logits, width=count)
                self._same(logits, self._name(gate, first=count, width=1))
                self._same((inner.out, inner.swiglu), (total.x, True))
                return parts.Experts(
                    out=self._name(total.out),
                    x=self._name(inner.x),
                    logits=logits,
                    shared=self._name(shared),
                    gates_ups=_plain(inner.weight),
                    downs=_plain(total.weight),
                )
        raise CompileError(f"{total.fqn}: experts without a router")

    def _same(self, one: object, other: object) -> None:
        if one != other:
            raise CompileError(f"{one} and {other}: mixers of another form")


def _plain(recipe: WeightRecipe) -> str:
    """Return the name for a weight's only tensor, without the layer prefix."""
    names = set(recipe.names)
    if len(names) != 1 or recipe.pad_rows or any(each.offset for each in recipe.segments):
        raise CompileError(f"{recipe.names[0]}: not a whole tensor")
    return _LAYER.sub("", names.pop())
