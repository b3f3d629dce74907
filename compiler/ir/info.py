"""What Tilewright knows about a graph node: one frozen NodeInfo, reached only through ``info``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.mesh import Split

_KEY = "tilewright"

INPUT, WEIGHT, CONSTANT, STATE, COMPUTE = "input", "weight", "constant", "state", "compute"


@dataclass(frozen=True, slots=True)
class EdgeFormats:
    """The data formats asked for of a product's operands: of its input, ``in0``, and of its weight,
    ``in1``, where it has one; and of its result, ``out``, before it is added to the residual stream
    (``mixed``: whatever the target has).
    """

    in0: str = "fp32"
    in1: str | None = None
    out: str = "mixed"


@dataclass(frozen=True, slots=True)
class Compute:
    """The fidelity of a node's multiplies, by phase."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Dealt:
    """One axis of a value or a weight that is dealt over a mesh axis, and who has what of it."""

    axis: int
    over: str
    split: Split


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a value or a weight lies on a mesh: which of its axes are ``dealt``, and over which
    mesh axis, if any, what the ranks have must still be added (``partial``).
    """

    dealt: tuple[Dealt, ...] = ()
    partial: str = ""

    def along(self, axis: int) -> Dealt | None:
        """How an axis is dealt; None where every rank has all of it."""
        return next((each for each in self.dealt if each.axis == axis), None)

    def over(self, axis: int) -> str:
        """The mesh axis over which an axis is dealt; empty where every rank has all of it."""
        return next((each.over for each in self.dealt if each.axis == axis), "")

    def split(self, axis: int) -> Split | None:
        """The shares of an axis; None where every rank has all of it."""
        return next((each.split for each in self.dealt if each.axis == axis), None)


WHOLE = Placement()
"""All of it on every rank."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Facts about one node. Passes replace it whole; they never write into it.

    ``fqn``: path of the module it came from (weights: of the parameter). ``role``: one of input,
    weight, constant, state, compute. ``layer``: index of the decoder layer, None outside.
    ``tensor_group`` names what a configuration gives one format (``ff2``), ``op_group`` what it
    gives one fidelity (``li_ff2``). ``placement``: where its value lies while a graph is dealt over
    ranks, None before and after.
    """

    fqn: str = ""
    role: str = COMPUTE
    layer: int | None = None
    tensor_group: str | None = None
    op_group: str | None = None
    formats: EdgeFormats | None = None
    compute: Compute | None = None
    recipe: WeightRecipe | None = None
    state: StateSpec | None = None
    placement: Placement | None = None


_EMPTY = NodeInfo()


def info(node: Node) -> NodeInfo:
    """The node's facts; an empty NodeInfo where none were set."""
    found = node.meta.get(_KEY, _EMPTY)
    assert isinstance(found, NodeInfo)
    return found


def product_info(node: Node, weight: Node) -> NodeInfo:
    """The facts of a node's product with a weight: its own, or the weight's where a node makes
    several products, each with its own fidelity (``experts``).
    """
    return info(weight) if info(weight).compute is not None else info(node)


def set_info(node: Node, facts: NodeInfo | None = None, **changes: Any) -> NodeInfo:
    """Replace the node's facts by ``facts`` (default: its own) with ``changes`` applied."""
    updated = dataclasses.replace(facts if facts is not None else info(node), **changes)
    node.meta[_KEY] = updated
    return updated
