"""Graph node metadata: a frozen NodeInfo per node, read with ``info``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
from torch.fx import Node

from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.mesh import Split

_KEY = "tilewright"

INPUT, WEIGHT, CONSTANT, STATE, COMPUTE = "input", "weight", "constant", "state", "compute"


@dataclass(frozen=True, slots=True)
class EdgeFormats:
    """Requested data formats for a matmul.

    Attributes:
        in0: The input's format.
        in1: The weight's format. None: no weight.
        out: The result's format before the residual add. ``mixed``: selected by the target.
    """

    in0: str = "fp32"
    in1: str | None = None
    out: str = "mixed"


@dataclass(frozen=True, slots=True)
class Compute:
    """The fidelity for a node's multiplications, by phase."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class ShardedAxis:
    """An axis sharded over a mesh axis, with each rank's ranges."""

    axis: int
    over: str
    split: Split


class Sharding(msgspec.Struct, frozen=True, rename={"sharded": "dealt"}):
    """Sharding on a mesh, for a value or a weight. Compiled folders contain the old key.

    Attributes:
        sharded: Sharded axes.
        partial: Mesh axis with partial sums on its ranks. Empty: no partial sums.
    """

    sharded: tuple[ShardedAxis, ...] = ()
    partial: str = ""

    def along(self, axis: int) -> ShardedAxis | None:
        """Return an axis's sharding. None if every rank has the whole axis."""
        return next((each for each in self.sharded if each.axis == axis), None)

    def over(self, axis: int) -> str:
        """Return an axis's mesh axis. Empty if every rank has the whole axis."""
        return next((each.over for each in self.sharded if each.axis == axis), "")

    def split(self, axis: int) -> Split | None:
        """Return an axis's ranges by rank. None if every rank has the whole axis."""
        return next((each.split for each in self.sharded if each.axis == axis), None)


WHOLE = Sharding()
"""The whole value on every rank."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Node metadata. Passes replace the record and never modify it.

    Attributes:
        fqn: Path of the source module, or of the parameter for a weight.
        role: input, weight, constant, state or compute.
        layer: Decoder layer index. None outside layers.
        tensor_group: Group with a common format (``ff2``).
        op_group: Group with a common fidelity (``li_ff2``).
        formats: Requested matmul formats.
        compute: Matmul fidelities.
        recipe: Source of a weight or constant.
        state: A state input's description.
        placement: Sharding during the sharding passes. None before and after.
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
    placement: Sharding | None = None


_EMPTY = NodeInfo()


def info(node: Node) -> NodeInfo:
    """Return the node's metadata, or an empty NodeInfo."""
    found = node.meta.get(_KEY, _EMPTY)
    assert isinstance(found, NodeInfo)
    return found


def product_info(node: Node, weight: Node) -> NodeInfo:
    """Return the metadata for a node's matmul with ``weight``.

    A node with several matmuls (``experts``) has a fidelity per weight.
    """
    return info(weight) if info(weight).compute is not None else info(node)


def set_info(node: Node, facts: NodeInfo | None = None, **changes: Any) -> NodeInfo:
    """Replace the node's metadata with ``facts`` (default: current metadata), modified by
    ``changes``.
    """
    updated = dataclasses.replace(facts if facts is not None else info(node), **changes)
    node.meta[_KEY] = updated
    return updated
