"""What a lowering knows on its way: the values made so far, their formats and their places."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from tilewright.compiler.devices import DeviceSpec
from tilewright.compiler.ir.info import WHOLE, NodeInfo, Placement, info
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
from tilewright.compiler.targets.tenstorrent.program.places import OUT, Places, as_node, recipe_of

SMALL = ComputeConfig("hifi4")
"""A norm and a rotation are no configuration's choice: fp32 sums, all four phases."""

HEAD_NORM = ComputeConfig("hifi2")
"""The vendor's norms of q and k: two phases, fp32 sums."""

# Op groups whose output format is the router's.
_OPS = {"li_router": "router", "li_delta_gates": "router"}

# Values that lie head by head.
_HEADS = ("q", "k", "v", "q_normed", "k_normed", "q_rotated", "k_rotated", "heads")


class LoweringContext:
    """One step's sizes, and what each node of its graph became.

    ``tokens``, ``positions``: the step's inputs. ``instructions``: those made so far. ``places``:
    where all values and weights of the graph lie.
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
        self.places = Places(graph_module, mesh)
        self.instructions: list[TtInstruction] = []
        rows, dram = batch * length, Memory()
        self.tokens = TtValue("tokens", rows, 1, "int32", dram)
        self.positions = TtValue("positions", rows, 1, "int32", dram)
        self._values: dict[Node, TtValue] = {}
        self._settings = _activation_settings(list(graph_module.graph.nodes))

    def value_of(self, argument: Any) -> TtValue:
        """The value on the device that a node of the graph was lowered to."""
        return self._values[as_node(argument)]

    def __contains__(self, node: Node) -> bool:
        """Return whether a node was lowered."""
        return node in self._values

    def operands(self, node: Node) -> tuple[TtValue, ...]:
        """What a node reads, without weights and states."""
        return tuple(self._values[each] for each in node.all_input_nodes if each in self._values)

    def like(self, node: Node, x: TtValue, format_: str) -> TtValue:
        """Make a value that lies on the chips as another one does."""
        return self.value(node, x.rows, x.columns, format_, x.placement)

    def value(
        self,
        node: Node,
        rows: int,
        columns: int,
        format_: str,
        placement: Placement = WHOLE,
        *,
        suffix: str = "",
    ) -> TtValue:
        """A value of a node; ``suffix`` tells it from others of the same one."""
        name = node.name + (f".{suffix}" if suffix else "")
        if suffix in _HEADS:
            memory = heads_memory(self.batch, self.phase)
        else:
            memory = activation_memory(columns, self.phase)
        return TtValue(name, rows, columns, format_, memory, placement)

    def put(self, node: Node, instruction: TtInstruction) -> None:
        """Append an instruction; what it makes is what the node becomes."""
        self.instructions.append(instruction)
        self._values[node] = instruction.out

    def alias(self, node: Node, value: TtValue) -> None:
        """Record that a node is a value of another node: nothing runs on the device."""
        self._values[node] = value

    def format(self, node: Node, op: str) -> str:
        """What ``op``, a key of the table of ``mixed``, writes in this phase."""
        facts = info(node)
        setting = facts.formats.in0 if facts.formats else self._settings[facts.layer]
        format_ = output_format(_OPS.get(op, op), setting, self.phase)  # type: ignore[arg-type]
        return check_activation_format(facts.fqn, format_)

    def vector(self, name: str, argument: Any, format_: str = "bf16") -> TtWeight:
        """A norm's weight or a bias: one row."""
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

    def place_of(self, weight: Any) -> Placement:
        """The placement of a weight or a state on the mesh."""
        return self.places.weights.get(as_node(weight), WHOLE)


def _activation_settings(nodes: list[Node]) -> dict[int | None, str]:
    """What ``activation`` is in each layer; outside layers, as the head has it."""
    found: dict[int | None, str] = {}
    for node in nodes:
        facts: NodeInfo = info(node)
        if facts.formats is not None:
            found.setdefault(facts.layer, facts.formats.in0)
    return found


def whose(node: Node) -> tuple[str, int | None]:
    """The module and the layer of an instruction."""
    return info(node).fqn, info(node).layer


def share_of(placement: Placement, axis: int, size: int) -> int:
    """The number of positions that a chip has of ``size`` along an axis."""
    dealt = placement.along(axis)
    return size if dealt is None else dealt.split.size
