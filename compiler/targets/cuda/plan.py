"""The lowered graph becomes a list of instructions over a few buffers; no device, no weights yet.

A buffer is as wide as the values it holds one after another. A sum with the residual is made in the
residual's own buffer, and three products that one attention reads are columns of one buffer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.errors import CompileError
from compiler.ir.info import info
from compiler.ir.recipe import WeightRecipe
from compiler.ir.state import StateSpec
from compiler.ir.verify import ELEMENTWISE

RESIDUAL, PRODUCT, OPERAND, LOGITS = "residual", "product", "operand", "logits"
"""What a buffer is to the kernels: a stream in fp32; what a product wrote; what the next product
reads (bfloat16, columns padded); logits, fp32."""

aten = torch.ops.aten
_PRODUCTS = (ops.linear.overload, ops.fused_linear.overload)
_PIECES = (aten.split_with_sizes.default, operator.getitem)
_FUNCTIONS: dict[Any, str] = {
    ops.gelu.overload: "gelu",
    aten.add.Tensor: "add",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.tanh.default: "tanh",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Columns ``[first, first + width)`` of a buffer's rows, ``stride`` long each (0: width)."""

    buffer: int
    width: int
    first: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """Rows of a table, by token."""

    out: Place
    table: WeightRecipe


@dataclass(frozen=True, slots=True)
class Linear:
    """``fused_linear``; with ``residual`` the product is added to what ``out`` holds."""

    fqn: str
    out: Place
    x: Place
    weight: WeightRecipe
    bias: WeightRecipe | None = None
    norm: WeightRecipe | None = None
    eps: float = 0.0
    residual: bool = False
    swiglu: bool = False
    group: str = ""


@dataclass(frozen=True, slots=True)
class Attend:
    """``rope_attention_step`` of a layer on q, k and v side by side."""

    out: Place
    qkv: Place
    state: StateSpec
    inv_freq: WeightRecipe
    num_heads: int
    scale: float
    window: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Gather:
    """The rows of the stream that want logits."""

    out: Place
    x: Place


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """``silu(gate) * up`` of two products."""

    out: Place
    gate: Place
    up: Place


@dataclass(frozen=True, slots=True)
class NormHeads:
    """The heads of q and k in ``out`` normed, in place."""

    out: Place
    q_norm: WeightRecipe
    k_norm: WeightRecipe
    num_heads: int
    eps: float


@dataclass(frozen=True, slots=True)
class Norm:
    """``rms_norm`` that no product computes itself."""

    out: Place
    x: Place
    weight: WeightRecipe
    eps: float


@dataclass(frozen=True, slots=True)
class Elementwise:
    """``function`` of values and numbers: ``add``, ``mul``, ``div``, ``tanh`` or ``gelu``, whose
    ``approximate`` is the last.
    """

    out: Place
    function: str
    inputs: tuple[Place | float | str, ...]


Instruction = Embed | Linear | Attend | Gather | SwiGLU | NormHeads | Norm | Elementwise


@dataclass(frozen=True, slots=True)
class Buffer:
    """``role`` and the columns of its widest value."""

    role: str
    width: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, in order; the last instruction writes the logits."""

    instructions: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...]

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The caches, in the order of the layers."""
        return tuple(each.state for each in self.instructions if isinstance(each, Attend))

    @property
    def products(self) -> tuple[Linear, ...]:
        """The products, in order."""
        return tuple(each for each in self.instructions if isinstance(each, Linear))


def make_plan(graph_module: GraphModule) -> Plan:
    """The plan of a graph of this target's last stage.

    Raises:
        CompileError: for an operator that no instruction stands for.
    """
    return _Lowering(graph_module).run()


class _Lowering:
    """One pass over the nodes; ``_places`` knows where each value lies."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._nodes = list(graph_module.graph.nodes)
        self._last_reader = {
            _whole(read): node
            for node in self._nodes
            if node.target not in _PIECES
            for read in node.all_input_nodes
        }
        self._places: dict[Node, Place] = {}
        self._buffers: list[Buffer] = []
        self._free: dict[tuple[str, int], list[int]] = {}
        self._instructions: list[Instruction] = []

    def run(self) -> Plan:
        for node in self._nodes:
            if node.op == "call_function":
                self._lower(node)
                for read in node.all_input_nodes if node.target not in _PIECES else ():
                    self._release(_whole(read), node)
        return Plan(tuple(self._instructions), tuple(self._buffers))

    def _lower(self, node: Node) -> None:
        target: Any = node.target
        args: Any = node.args
        if target is ops.embedding.overload:
            tokens, table = args[:2]
            assert tokens.target == "tokens"
            self._instructions.append(Embed(self._take(node, RESIDUAL), _recipe(table)))
        elif target is ops.linear.overload or target is ops.fused_linear.overload:
            self._linear(node, ops.FusedArguments.of(args))
        elif target is ops.rope_attention_step.overload:
            self._attend(node)
        elif target is torch.ops.aten.index_select.default:
            x = self._places[args[0]]
            self._instructions.append(Gather(self._take(node, RESIDUAL), x))
        elif target is ops.swiglu.overload:
            gate, up = (self._places[part] for part in args)
            self._instructions.append(SwiGLU(self._take(node, OPERAND), gate, up))
        elif target is ops.rms_norm.overload:
            x, weight, eps = args
            out = self._take(node, self._role(node))
            self._instructions.append(Norm(out, self._places[x], _recipe(weight), eps))
        elif target in _FUNCTIONS:
            self._elementwise(node)
        elif target is operator.getitem:
            self._places[node] = self._piece(node)
        elif target is not aten.split_with_sizes.default:
            raise CompileError(
                f"{info(node).fqn or node.name}: {target} has no kernel on target cuda; "
                "allowed: --target reference, or cpu"
            )

    def _linear(self, node: Node, given: ops.FusedArguments) -> None:
        facts = info(node)
        linear = Linear(
            fqn=facts.fqn,
            out=self._out_of_product(node, given.residual, given.swiglu),
            x=self._places[given.x],
            weight=_recipe(given.weight),
            bias=None if given.bias is None else _recipe(given.bias),
            norm=None if given.norm_weight is None else _recipe(given.norm_weight),
            eps=given.eps,
            residual=given.residual is not None,
            swiglu=given.swiglu,
            group=facts.tensor_group or "",
        )
        self._instructions.append(linear)

    def _out_of_product(self, node: Node, residual: Node | None, swiglu: bool) -> Place:
        if residual is not None:
            if self._last_reader[residual] is not node:
                raise CompileError(f"{info(node).fqn}: its residual is read again later")
            self._places[node] = self._places[residual]
            return self._places[node]
        if node in self._places:  # columns of a buffer that another product opened
            return self._places[node]
        if swiglu:
            return self._take(node, OPERAND)
        reader = next(iter(node.users))
        if _becomes_the_output(reader):
            return self._take(node, LOGITS)
        if reader.target is ops.rope_attention_step.overload and reader.args[1] is not None:
            parts = [part for part in reader.args[:3] if isinstance(part, Node)]
            self._open(parts)
            return self._places[node]
        return self._take(node, PRODUCT)

    def _open(self, parts: list[Node]) -> None:
        """One buffer for products that are read side by side."""
        widths = [_width(part) for part in parts]
        buffer = self._buffer(PRODUCT, sum(widths))
        for index, part in enumerate(parts):
            self._places[part] = Place(
                buffer, widths[index], sum(widths[:index]), stride=sum(widths)
            )

    def _elementwise(self, node: Node) -> None:
        """Logits change where they are."""
        inputs = tuple(self._places[each] if isinstance(each, Node) else each for each in node.args)
        if _becomes_the_output(next(iter(node.users))):
            self._places[node] = self._places[node.all_input_nodes[0]]
        else:
            self._take(node, self._role(node))
        function = _FUNCTIONS[node.target]
        self._instructions.append(Elementwise(self._places[node], function, inputs))  # type: ignore[arg-type]

    def _role(self, node: Node) -> str:
        """Of a value that no product writes: what reads it as it is takes operands."""
        plain = [
            reader
            for reader in node.users
            if reader.target in _PRODUCTS
            and ops.FusedArguments.of(reader.args).x is node
            and ops.FusedArguments.of(reader.args).norm_weight is None
        ]
        return OPERAND if plain else RESIDUAL

    def _piece(self, node: Node) -> Place:
        """The columns of a product that ``getitem`` of its pieces means."""
        pieces: Any = node.args[0]
        index: Any = node.args[1]
        whole, sizes = self._places[pieces.args[0]], pieces.args[1]
        first = whole.first + sum(sizes[:index])
        return Place(whole.buffer, sizes[index], first, stride=whole.stride or whole.width)

    def _attend(self, node: Node) -> None:
        given = ops.RopeAttentionArguments.of(node.args)
        state = info(given.kv_cache).state
        assert state is not None
        place = self._places[given.q]
        if given.key is not None:
            place = Place(place.buffer, place.stride)
        self._check_attention(node, given, state.shape[-1])
        if given.q_norm is not None:
            norms = _recipe(given.q_norm), _recipe(given.k_norm)
            norm = NormHeads(place, *norms, given.num_heads, given.norm_eps)
            self._instructions.append(norm)
        attend = Attend(
            out=self._take(node, OPERAND),
            qkv=place,
            state=state,
            inv_freq=_recipe(given.inv_freq),
            num_heads=given.num_heads,
            scale=given.scale * given.factor**2,  # of q and of k, where all channels turn
            window=given.window,
            interleaved=given.interleaved,
        )
        self._instructions.append(attend)

    def _check_attention(
        self, node: Node, given: ops.RopeAttentionArguments, head_dim: int
    ) -> None:
        missing = ""
        if given.soft_cap:
            missing = "a soft cap on scores"
        if given.factor != 1.0 and 2 * _recipe(given.inv_freq).shape[0] != head_dim:
            missing = "a rotation of some channels with a factor"
        if missing:
            raise CompileError(
                f"{info(node).fqn}: {missing} has no kernel on target cuda; "
                "allowed: --target reference, or cpu"
            )

    def _take(self, node: Node, role: str) -> Place:
        place = Place(self._buffer(role, _width(node)), _width(node))
        self._places[node] = place
        return place

    def _buffer(self, role: str, width: int) -> int:
        free = self._free.setdefault(_kind(role, width), [])
        if not free:
            self._buffers.append(Buffer(role, width))
            return len(self._buffers) - 1
        buffer = free.pop()
        self._buffers[buffer] = Buffer(role, max(width, self._buffers[buffer].width))
        return buffer

    def _release(self, read: Node, reader: Node) -> None:
        """A buffer whose last value was read is free for the next of its role."""
        place = self._places.get(read)
        if place is None or self._last_reader[read] is not reader:
            return
        if self._places.get(reader) == place:  # a sum is made in its residual's buffer
            return
        buffer = self._buffers[place.buffer]
        free = self._free.setdefault(_kind(buffer.role, buffer.width), [])
        if place.buffer not in free:
            free.append(place.buffer)


def _whole(node: Node) -> Node:
    """The product that a node is a piece of, else itself."""
    while node.target in _PIECES:
        node = node.all_input_nodes[0]
    return node


def _becomes_the_output(reader: Node) -> bool:
    """Whether a reader of a value is the output, or arithmetic on its way there."""
    while reader.target in ELEMENTWISE and len(reader.all_input_nodes) == 1 and reader.users:
        reader = next(iter(reader.users))
    return reader.op == "output"


def _kind(role: str, width: int) -> tuple[str, int]:
    """Buffers of a kind are used for each other's values: operands of one width only, so that the
    padding of their rows stays zero.
    """
    return role, width if role == OPERAND else 0


def _recipe(node: Any) -> WeightRecipe:
    found = info(node).recipe
    assert found is not None, f"{node} is no weight"
    return found


def _width(node: Node) -> int:
    return int(node.meta["val"].shape[-1])
