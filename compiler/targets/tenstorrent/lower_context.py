"""What a lowering knows on its way: the values made so far, their formats and their places."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from tilewright.compiler.distributed.mesh import Mesh, Split, deal
from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.precision import output_format
from tilewright.compiler.targets.tenstorrent import placement
from tilewright.compiler.targets.tenstorrent.program import (
    ComputeConfig,
    Instruction,
    Memory,
    Value,
    Weight,
)

SMALL = ComputeConfig("hifi4")
"""A norm and a rotation are no configuration's choice: fp32 sums, all four phases."""

# Values that lie head by head.
_HEADS = ("q", "k", "v", "q_rotated", "k_rotated", "heads")


class LoweringContext:
    """One step's sizes, and what each node of its graph became.

    ``tokens``, ``positions``: the step's inputs. ``instructions``: those made so far.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        device: str,
        mesh: Mesh,
        *,
        phase: str,
        batch: int,
        length: int,
        context: int,
    ) -> None:
        self.device, self.mesh, self.phase = device, mesh, phase
        self.batch, self.length, self.context = batch, length, context
        self.instructions: list[Instruction] = []
        rows, dram = batch * length, Memory()
        self.tokens = Value("tokens", rows, 1, "int32", dram)
        self.positions = Value("positions", rows, 1, "int32", dram)
        self._values: dict[Node, Value] = {}
        self._settings = _activation_settings(list(graph_module.graph.nodes))

    def value_of(self, argument: Any) -> Value:
        """The value on the device that a node of the graph was lowered to."""
        return self._values[as_node(argument)]

    def operands(self, node: Node) -> tuple[Value, ...]:
        """What a node reads, without weights and states."""
        return tuple(self._values[each] for each in node.all_input_nodes if each in self._values)

    def like(self, node: Node, x: Value, format_: str) -> Value:
        """Make a value that is dealt to the chips as another one is."""
        return self.value(node, x.rows, x.columns, format_, x.over, x.split)

    def value(
        self,
        node: Node,
        rows: int,
        columns: int,
        format_: str,
        over: str = "",
        split: Split | None = None,
        *,
        partial: str = "",
        suffix: str = "",
    ) -> Value:
        """A value of a node; ``suffix`` tells it from others of the same one."""
        name = node.name + (f".{suffix}" if suffix else "")
        if suffix in _HEADS:
            memory = placement.heads_memory(self.batch, self.phase)
        else:
            memory = placement.activation_memory(columns, self.phase)
        return Value(name, rows, columns, format_, memory, over, split if over else None, partial)

    def put(self, node: Node, instruction: Instruction) -> None:
        """Append an instruction; what it makes is what the node becomes."""
        self.instructions.append(instruction)
        self._values[node] = instruction.out

    def format(self, node: Node, op: str) -> str:
        """What ``op``, a key of the table of ``mixed``, writes in this phase."""
        facts = info(node)
        setting = facts.formats.in0 if facts.formats else self._settings[facts.layer]
        format_ = output_format(op, setting, self.phase)  # type: ignore[arg-type]
        return placement.check_activation_format(facts.fqn, format_)

    def axis(self, axis: str, size: int) -> tuple[str, Split | None]:
        """The deal of ``size`` columns over a mesh axis; nothing where it has one chip."""
        count = self.mesh.size(axis)
        return ("", None) if count == 1 else (axis, deal(size, count))

    def vector(
        self, name: str, recipe: WeightRecipe, over: str, split: Split | None, format_: str = "bf16"
    ) -> Weight:
        """A norm's weight or a bias: one row."""
        return Weight(
            name=name,
            recipe=recipe,
            rows=1,
            columns=split.size if split else recipe.shape[0],
            format=format_,
            memory=Memory(),
            out_over=over,
            out_split=split,
            transposed=False,
        )


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


def as_node(argument: Any) -> Node:
    """An argument of a node that is one itself."""
    assert isinstance(argument, Node)
    return argument


def recipe_of(argument: Any) -> WeightRecipe:
    """How the weight that a node stands for is loaded."""
    found = info(as_node(argument)).recipe
    assert found is not None, f"{argument} is no weight"
    return found
