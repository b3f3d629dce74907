"""Lowering state: the lowered values with their formats and placements."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from tilewright.compiler.devices import DeviceSpec
from tilewright.compiler.ir.info import WHOLE, NodeInfo, Sharding, info
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import output_format
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    ComputeConfig,
    Memory,
    TtInstruction,
    TtValue,
    TtWeight,
)
from tilewright.compiler.targets.tenstorrent.program.placement import (
    activation_memory,
    check_activation_format,
    heads_memory,
)
from tilewright.compiler.targets.tenstorrent.program.placements import (
    OUT,
    Placements,
    as_node,
    recipe_of,
)

SMALL = ComputeConfig("hifi4")
"""Fidelity for norms and rotations: fp32 sums and four phases, independent of the configuration."""

HEAD_NORM = ComputeConfig("hifi2")
"""Fidelity for the vendor's q and k norms: two phases and fp32 sums."""

# Op groups with the router's output format.
_OPS = {"li_router": "router", "li_delta_gates": "router"}

# Values in the memory layout for heads.
_HEADS = ("q", "k", "v", "q_normed", "k_normed", "q_rotated", "k_rotated", "heads")


class LoweringContext:
    """Step sizes and the lowered value for each node.

    Attributes:
        tokens, positions: Step inputs.
        instructions: Instructions for the nodes lowered so far.
        places: Placements for all values and weights.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        device: DeviceSpec,
        mesh: Mesh,
        *,
        phase: str,
        batch: int,
        length: int,
        context: int,
    ) -> None:
        self.device, self.mesh, self.phase = device.name, mesh, phase
        self.num_banks = device.num_banks
        self.batch, self.length, self.context = batch, length, context
        self.places = Placements(graph_module, mesh)
        self.instructions: list[TtInstruction] = []
        rows, dram = batch * length, Memory()
        self.tokens = TtValue("tokens", rows, 1, "int32", dram)
        self.positions = TtValue("positions", rows, 1, "int32", dram)
        self._values: dict[Node, TtValue] = {}
        self._settings = _activation_settings(list(graph_module.graph.nodes))

    def value_of(self, argument: Any) -> TtValue:
        """Return a lowered node's device value."""
        return self._values[as_node(argument)]

    def __contains__(self, node: Node) -> bool:
        """Return whether a node was lowered."""
        return node in self._values

    def operands(self, node: Node) -> tuple[TtValue, ...]:
        """Return the values that a node reads, without weights and states."""
        return tuple(self._values[each] for each in node.all_input_nodes if each in self._values)

    def like(self, node: Node, x: TtValue, format_: str) -> TtValue:
        """Return a new value with the shape and placement of ``x``."""
        return self.value(node, x.rows, x.columns, format_, x.placement)

    def value(
        self,
        node: Node,
        rows: int,
        columns: int,
        format_: str,
        placement: Sharding = WHOLE,
        *,
        suffix: str = "",
    ) -> TtValue:
        """Return a new value for a node. ``suffix`` distinguishes several values from one node."""
        name = node.name + (f".{suffix}" if suffix else "")
        if suffix in _HEADS:
            memory = heads_memory(self.batch, self.phase)
        else:
            memory = activation_memory(columns, self.phase)
        return TtValue(name, rows, columns, format_, memory, placement)

    def put(self, node: Node, instruction: TtInstruction) -> None:
        """Append an instruction. Its ``out`` becomes the node's value."""
        self.instructions.append(instruction)
        self._values[node] = instruction.out

    def alias(self, node: Node, value: TtValue) -> None:
        """Record ``value`` as the value for a node without an instruction."""
        self._values[node] = value

    def format(self, node: Node, op: str) -> str:
        """Return the output format for ``op``, a key in the ``mixed`` format table, in this
        phase.
        """
        facts = info(node)
        setting = facts.formats.in0 if facts.formats else self._settings[facts.layer]
        format_ = output_format(_OPS.get(op, op), setting, self.phase)  # type: ignore[arg-type]
        return check_activation_format(facts.fqn, format_)

    def vector(self, name: str, argument: Any, format_: str = "bf16") -> TtWeight:
        """Return a one-row weight: a norm's weight or a bias."""
        placement, recipe = self.place_of(argument), recipe_of(argument)
        return TtWeight(
            name=name,
            recipe=recipe,
            rows=1,
            columns=share_of(placement, OUT, recipe.shape[0]),
            format=format_,
            memory=Memory(),
            placement=placement,
            transposed=False,
        )

    def place_of(self, weight: Any) -> Sharding:
        """Return the placement of a weight or a state."""
        return self.places.weights.get(as_node(weight), WHOLE)


def _activation_settings(nodes: list[Node]) -> dict[int | None, str]:
    """Return the ``activation`` setting by layer. The key None has the LM head's setting."""
    found: dict[int | None, str] = {}
    for node in nodes:
        facts: NodeInfo = info(node)
        if facts.formats is not None:
            found.setdefault(facts.layer, facts.formats.in0)
    return found


def whose(node: Node) -> tuple[str, int | None]:
    """Return a node's module name and layer."""
    return info(node).fqn, info(node).layer


def share_of(placement: Sharding, axis: int, size: int) -> int:
    """Return the size of a chip's shard along an axis with ``size`` elements."""
    sharded = placement.along(axis)
    return size if sharded is None else sharded.split.size
