"""A graph's lowering to instructions over a few buffers, without devices and weights.

A residual sum is written in the residual's buffer. The three linears before an attention write
columns of a common buffer.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.verify import ELEMENTWISE
from tilewright.compiler.targets.program.instructions import (
    LOGITS,
    OPERAND,
    PRODUCT,
    RESIDUAL,
    AddGatedOp,
    AllReduceAdd,
    AllReduceOp,
    AttentionOp,
    Buffer,
    BufferView,
    CrossAttentionOp,
    Elementwise,
    EmbedOp,
    GatherOp,
    Instruction,
    KernelProgram,
    LinearOp,
    Needs,
    NormHeads,
    NormOp,
    ReadHiddenOp,
    SwiGLUOp,
)
from tilewright.compiler.targets.program.plan_mixers import EXPERTS, MIXERS, recipe_of, values_read
from tilewright.errors import CompileError

aten = torch.ops.aten
_PRODUCTS = (ops.linear.overload, ops.fused_linear.overload)
_CROSS = (ops.cross_attention.overload, ops.mask_text_rows.overload, ops.add_gated.overload)
_PIECES = (aten.split_with_sizes.default, operator.getitem)
_PAIRS = (ops.all_reduce_add.overload,)
_FUNCTIONS: dict[Any, str] = {
    ops.gelu.overload: "gelu",
    aten.add.Tensor: "add",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.tanh.default: "tanh",
}


def lower_to_program(graph_module: GraphModule, needs: Needs) -> KernelProgram:
    """Return the kernel program for a graph after a target's last stage.

    Raises:
        CompileError: An operator has no instruction.
    """
    return Lowering(graph_module, needs).run()


class Lowering:
    """A single pass over the nodes. ``_places`` maps values to buffer columns."""

    def __init__(self, graph_module: GraphModule, needs: Needs) -> None:
        self.needs = needs
        self._nodes = list(graph_module.graph.nodes)
        self._last_reader = {
            _whole(read): node
            for node in self._nodes
            if node.target not in _PIECES
            for read in values_read(node)
        }
        self._places: dict[Node, BufferView] = {}
        self._buffers: list[Buffer] = []
        self._free: dict[tuple[str, int], list[int]] = {}
        self._instructions: list[Instruction] = []
        self.routed: Node | None = None  # the router for the current selection
        self._logit_columns: tuple[int, ...] = ()

    def run(self) -> KernelProgram:
        for node in self._nodes:
            if node.op == "call_function":
                self._lower(node)
                for read in values_read(node) if node.target not in _PIECES else ():
                    self._release(_whole(read), node)
        return KernelProgram(tuple(self._instructions), tuple(self._buffers), self._logit_columns)

    def append(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self._instructions.append(instruction)

    def place(self, node: Node) -> BufferView:
        """Return the columns of a node's value."""
        return self._places[node]

    def _lower(self, node: Node) -> None:
        target: Any = node.target
        args: Any = node.args
        if target is ops.embedding.overload:
            tokens, table = args[:2]
            assert tokens.target == "tokens"
            self.append(EmbedOp(self.take(node, RESIDUAL), recipe_of(table)))
            for hidden in self._nodes:
                if hidden.op == "placeholder" and hidden.target == "hidden":
                    self.append(ReadHiddenOp(self.take(hidden, RESIDUAL)))
        elif target is ops.linear.overload or target is ops.fused_linear.overload:
            self._linear(node, ops.FusedArguments.of(args))
        elif target is ops.rope_attention_step.overload:
            self._attend(node)
        elif target is torch.ops.aten.index_select.default:
            x = self._places[args[0]]
            self.append(GatherOp(self.take(node, RESIDUAL), x))
        elif target is ops.swiglu.overload:
            gate, up = (self._places[part] for part in args)
            self.append(SwiGLUOp(self.take(node, OPERAND), gate, up))
        elif target is ops.rms_norm.overload:
            x, weight, eps = args
            if _is_joined_norm(node):
                self._places[node] = self._places[x]
            out = self._places.get(node) or self.take(node, self.role(node))
            self.append(NormOp(out, self._places[x], recipe_of(weight), eps))
        elif target in _FUNCTIONS:
            self._elementwise(node)
        elif target is ops.all_reduce.overload:
            x = self._places[args[0]]
            self.append(AllReduceOp(self.take(node, self.role(node)), x, args[2]))
        elif target is ops.all_reduce_add.overload:
            self._all_reduce_add(node)
        elif target is ops.all_gather.overload and _becomes_the_output(next(iter(node.users))):
            self._places[node] = self._places[args[0]]
            self._logit_columns = tuple(args[1])
        elif target is operator.getitem:
            if _is_piece(node) and args[0].target is not ops.router.overload:
                self._places[node] = self._piece(node)
        elif target in MIXERS:
            MIXERS[target](self, node)
        elif target in _CROSS and self.needs.has_cross_layers:
            self._cross(node)
        elif target is not aten.split_with_sizes.default:
            raise CompileError(
                f"{info(node).fqn or node.name}: {target} has no kernel on target "
                f"{self.needs.target}; allowed: --target {self.needs.others}"
            )

    def _cross(self, node: Node) -> None:
        """Emit instructions of a cross-attention layer. A gated sum masks rows without images."""
        args: Any = node.args
        if node.target is ops.mask_text_rows.overload:
            self._places[node] = self._places[args[0]]
        elif node.target is ops.add_gated.overload:
            out = self.add_to(node, args[0])
            self.append(AddGatedOp(out, self._places[args[1]], recipe_of(args[2])))
        else:
            q, _, _, norm, eps, num_kv_heads, layer, scale = args
            weight, x = recipe_of(norm), self._places[q]
            (head_dim,) = weight.shape
            first = 2 * layer * num_kv_heads * head_dim
            out = self.take(node, self.role(node))
            heads = x.width // head_dim, num_kv_heads
            self.append(CrossAttentionOp(out, x, weight, eps, *heads, first, scale))

    def _linear(self, node: Node, given: ops.FusedArguments) -> None:
        facts = info(node)
        linear = LinearOp(
            fqn=facts.fqn,
            out=self._out_of_product(node, given.residual, given.swiglu),
            x=self.place(given.x),
            weight=recipe_of(given.weight),
            bias=None if given.bias is None else recipe_of(given.bias),
            norm=None if given.norm_weight is None else recipe_of(given.norm_weight),
            eps=given.eps,
            residual=given.residual is not None,
            swiglu=given.swiglu,
            group=facts.tensor_group or "",
            compute=facts.compute,
        )
        self.append(linear)

    def _out_of_product(self, node: Node, residual: Node | None, swiglu: bool) -> BufferView:
        if residual is not None:
            return self.add_to(node, residual)
        if node in self._places:  # columns in a buffer allocated by another linear
            return self._places[node]
        if swiglu:
            return self.take(node, OPERAND)
        reader = next(iter(node.users))
        if _becomes_the_output(reader):
            return self.take(node, LOGITS)
        if _is_joined_norm(reader):
            reader = next(iter(reader.users))
        if reader.target is ops.rope_attention_step.overload and reader.args[1] is not None:
            self._open([_before_norm(value) for value in reader.args[:3]])  # type: ignore[arg-type]
            return self._places[node]
        return self.take(node, PRODUCT)

    def add_to(self, node: Node, residual: Node) -> BufferView:
        """Return a sum's columns: the residual's own."""
        if self._last_reader[residual] is not node:
            raise CompileError(f"{info(node).fqn}: its residual is read again later")
        self._places[node] = self._places[residual]
        return self._places[node]

    def _open(self, parts: list[Node]) -> None:
        """Allocate a common buffer for linears with adjacent outputs."""
        widths = [width_of(part) for part in parts]
        buffer = self._buffer(PRODUCT, sum(widths))
        for index, part in enumerate(parts):
            self._places[part] = BufferView(
                buffer, widths[index], sum(widths[:index]), stride=sum(widths)
            )

    def _all_reduce_add(self, node: Node) -> None:
        """Update the stream in place. Its norm has separate columns."""
        x, residual, norm, eps, _, wire = node.args
        assert isinstance(x, Node) and isinstance(residual, Node) and isinstance(wire, str)
        found = {reader.args[1]: reader for reader in node.users}
        out, normed = self.add_to(node, residual), None
        if 1 in found:
            self._places[found[1]] = out
        if norm is not None:
            normed = self.take(found[0], OPERAND)
        elif 0 in found:
            raise CompileError(f"{info(node).fqn}: a sum is read as a norm that there is not")
        recipe = None if norm is None else recipe_of(norm)
        assert isinstance(eps, float)
        self.append(AllReduceAdd(out, self._places[x], wire, normed, recipe, eps))

    def _elementwise(self, node: Node) -> None:
        """Emit an elementwise instruction. Logits are updated in place."""
        inputs = tuple(self._places[each] if isinstance(each, Node) else each for each in node.args)
        if _becomes_the_output(next(iter(node.users))):
            self._places[node] = self._places[node.all_input_nodes[0]]
        else:
            self.take(node, self.role(node))
        function = _FUNCTIONS[node.target]
        self.append(Elementwise(self._places[node], function, inputs))  # type: ignore[arg-type]

    def role(self, node: Node) -> str:
        """Return a value's role from another instruction than a matmul.

        Direct inputs of matmuls are operands.
        """
        return OPERAND if any(_reads_as_it_is(each, node) for each in node.users) else RESIDUAL

    def _piece(self, node: Node) -> BufferView:
        """Return an output slice's columns."""
        pieces: Any = node.args[0]
        index: Any = node.args[1]
        whole, sizes = self._places[pieces.args[0]], pieces.args[1]
        first = whole.first + sum(sizes[:index])
        return BufferView(whole.buffer, sizes[index], first, stride=whole.pitch)

    def _attend(self, node: Node) -> None:
        given = ops.RopeAttentionArguments.of(node.args)
        state = info(given.kv_cache).state
        assert state is not None
        self._check_attention(node, given, state.shape[-1])
        columns = normed = self._qkv_of(given)
        if given.q_norm is not None:
            if columns.stride:  # columns of a wider buffer: write to a separate buffer
                normed = BufferView(self._buffer(PRODUCT, columns.width), columns.width)
            norms = recipe_of(given.q_norm), recipe_of(given.k_norm)
            self.append(NormHeads(normed, columns, *norms, given.num_heads, given.norm_eps))
        inv_freq = recipe_of(given.inv_freq)
        turns_all = 2 * inv_freq.shape[0] == state.shape[-1]
        attend = AttentionOp(
            out=self.take(node, OPERAND),
            qkv=normed,
            state=state,
            inv_freq=inv_freq,
            num_heads=given.num_heads,
            scale=given.scale * given.factor**2 if turns_all else given.scale,  # for q and k
            window=given.window,
            interleaved=given.interleaved,
            soft_cap=given.soft_cap,
            factor=1.0 if turns_all else given.factor,
            sinks=None if given.sinks is None else recipe_of(given.sinks),
        )
        self.append(attend)
        if normed != columns:
            self._give(normed)

    def _qkv_of(self, given: ops.RopeAttentionArguments) -> BufferView:
        """Return the adjacent columns of q, k and v."""
        q = self.place(given.q)
        if given.key is None:
            return q
        k, v = self.place(given.key), self.place(given.value)
        ends = [part.first + part.width for part in (q, k)]
        assert ends == [k.first, v.first] and q.buffer == k.buffer == v.buffer
        width = q.width + k.width + v.width
        stride = 0 if width == q.stride else q.stride
        return BufferView(q.buffer, width, q.first, stride)

    def _check_attention(
        self, node: Node, given: ops.RopeAttentionArguments, head_dim: int
    ) -> None:
        missing = ""
        if given.soft_cap:
            missing = "a soft cap on scores"
        if given.factor != 1.0 and 2 * recipe_of(given.inv_freq).shape[0] != head_dim:
            missing = "a rotation of some channels with a factor"
        if missing and not self.needs.has_soft_caps:
            raise CompileError(
                f"{info(node).fqn}: {missing} has no kernel on target {self.needs.target}; "
                f"allowed: --target {self.needs.others}"
            )

    def take(self, node: Node, role: str) -> BufferView:
        """Allocate columns for a value. Matmul outputs are padded to whole tiles of weight rows."""
        width, stride, whole = width_of(node), 0, self.needs.row_multiple
        if role == PRODUCT and width % whole:
            stride = -(-width // whole) * whole
        place = BufferView(self._buffer(role, stride or width), width, stride=stride)
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
        """Free a value's buffer after its last reader."""
        place = self._places.get(read)
        if place is None or self._last_reader[read] is not reader:
            return
        if self._places.get(reader) == place:  # a sum is written in its residual's buffer
            return
        self._give(place)

    def _give(self, place: BufferView) -> None:
        """Mark a buffer as free."""
        buffer = self._buffers[place.buffer]
        free = self._free.setdefault(_kind(buffer.role, buffer.width), [])
        if place.buffer not in free:
            free.append(place.buffer)


def _reads_as_it_is(reader: Node, x: Node) -> bool:
    """Return whether a matmul reads ``x`` without a norm."""
    if reader.target in EXPERTS:
        return ops.FusedExpertArguments.of(reader.args).x is x
    if reader.target not in _PRODUCTS:
        return False
    args = ops.FusedArguments.of(reader.args)
    return args.x is x and args.norm_weight is None


def _is_joined_norm(node: Node) -> bool:
    """Return whether a node normalizes all heads of q or k for attention.

    Attention reads q, k and v in adjacent columns.
    """
    if node.target is not ops.rms_norm.overload:
        return False
    readers = [reader.target for reader in node.users]
    return readers == [ops.rope_attention_step.overload] and len(node.all_input_nodes[0].users) == 1


def _before_norm(node: Node) -> Node:
    """Return a joined norm's input, or the node itself."""
    return node.all_input_nodes[0] if _is_joined_norm(node) else node


def _whole(node: Node) -> Node:
    """Return an output slice's linear, or the node itself."""
    while _is_piece(node):
        node = node.all_input_nodes[0]
    return node


def _is_piece(node: Node) -> bool:
    """Return whether a node is a slice of another value."""
    is_own = node.target is operator.getitem and node.args[0].target in _PAIRS  # type: ignore[union-attr]
    return node.target in _PIECES and not is_own


def _becomes_the_output(reader: Node) -> bool:
    """Return whether a reader is the graph's output, or elementwise arithmetic before it."""
    by_value = {*ELEMENTWISE, ops.all_gather.overload}
    while reader.target in by_value and len(reader.all_input_nodes) == 1 and reader.users:
        reader = next(iter(reader.users))
    return reader.op == "output"


def _kind(role: str, width: int) -> tuple[str, int]:
    """Return the key of interchangeable buffers.

    Operands need equal widths: the padding of their rows stays zero.
    """
    return role, width if role == OPERAND else 0


def width_of(node: Node) -> int:
    """Return a value's elements per token."""
    return math.prod(int(size) for size in node.meta["val"].shape[1:])
