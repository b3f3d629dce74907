"""A lowered graph as JSON for compiled directories: structure and metadata, no weights.

Only inputs have stored shapes. The fakes of the ops compute all other shapes, so an inconsistent
file fails to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.fx import Graph, GraphModule, Node

from tilewright.compiler.ir.info import INPUT, STATE, NodeInfo, info, set_info
from tilewright.compiler.ir.lazy import module_of
from tilewright.compiler.ir.rewrite import dynamic_size, emit
from tilewright.compiler.ir.text import dimension_names, operator_name
from tilewright.compiler.ir.verify import BESIDE_OURS, verify_lowered
from tilewright.compiler.ops import OPERATORS
from tilewright.distributed.parallel import WIRES
from tilewright.errors import CheckpointError, one_line

_DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}
_WORDS = ("none", "tanh", *WIRES)
"""All string arguments of ops: GELU variants and formats of collectives."""

_MAX_SIZE = 1 << 40
_FIRST_HINT = 7  # above 1: torch makes smaller sizes constants


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A graph input. Sizes are numbers or names of dynamic dimensions (``T``, ``R``, ``L``)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    facts: NodeInfo


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call to an op. Arguments are literals, lists, or ``{"node": name}`` entries."""

    name: str
    op: str
    args: list[Any]
    facts: NodeInfo


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph with its nodes in order. ``output`` is the returned node's name."""

    inputs: tuple[InputRecord, ...]
    calls: tuple[CallRecord, ...]
    output: str


def graph_json(graph_module: GraphModule) -> bytes:
    """Write the lowered graph with its formats and fidelities as a JSON object."""
    graph = graph_module.graph
    named = dimension_names(graph)
    inputs, calls, output = [], [], ""
    for node in graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            shape = tuple(s if isinstance(s, int) else named[str(s)] for s in fake.shape)
            dtype = str(fake.dtype).removeprefix("torch.")
            inputs.append(InputRecord(str(node.target), dtype, shape, info(node)))
        elif node.op == "call_function":
            assert not node.kwargs, f"{node.name}: keyword arguments"
            args = [_written(argument) for argument in node.args]
            calls.append(CallRecord(node.name, operator_name(node), args, info(node)))
        elif node.op == "output":
            output = node.args[0].name
    return msgspec.json.encode(GraphRecord(tuple(inputs), tuple(calls), output))


def read_graph(data: bytes, where: Path, *, is_fixed: bool = False) -> GraphModule:
    """Read a graph from :func:`graph_json`. Only known ops are accepted.

    ``is_fixed`` gives each dynamic dimension a number. It avoids the import of torch's symbolic
    shapes, which takes two seconds. Use it for graphs without a need for dynamic sizes.

    Raises:
        CheckpointError: for data without a lowered graph. The message contains ``where``.
    """
    try:
        record = msgspec.json.decode(data, type=GraphRecord)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: not a graph: {one_line(error)}") from None
    try:
        return (_FixedBuilder if is_fixed else _Builder)(record).build()
    except Exception as error:  # the fakes run on file data, so any error is the file's
        raise CheckpointError(f"{where}: not a lowered graph: {one_line(error)}") from None


def _written(argument: Any) -> Any:
    if isinstance(argument, Node):
        # FX renames nodes, for example A_log to a_log. The target keeps the original name.
        name = str(argument.target) if argument.op == "placeholder" else argument.name
        return {"node": name}
    if isinstance(argument, list | tuple):
        return [_written(item) for item in argument]
    is_word = isinstance(argument, str) and argument in _WORDS
    assert argument is None or is_word or isinstance(argument, bool | int | float), repr(argument)
    return argument


def _functions() -> Mapping[str, Any]:
    """Return all allowed functions by their name in the file."""
    allowed = [*OPERATORS, *BESIDE_OURS]
    graph = Graph()
    return {operator_name(graph.call_function(function)): function for function in allowed}


class _Builder:
    """Builds a graph from its record, node by node."""

    def __init__(self, record: GraphRecord) -> None:
        self._record = record
        self._graph = Graph()
        self._nodes: dict[str, Node] = {}
        self._functions = _functions()
        self._sizes: dict[str, Any] = {}
        self._mode = self._make_mode()

    def build(self) -> GraphModule:
        for each in self._record.inputs:
            self._add_input(each)
        if self._record.output not in {call.name for call in self._record.calls}:
            raise ValueError(f"the output {self._record.output!r} is no call of the graph")
        end = self._graph.output(None)
        for call in self._record.calls:
            self._add_call(call, end)
        end.args = (self._nodes[self._record.output],)
        self._graph.lint()
        graph_module = module_of(self._graph)
        verify_lowered(graph_module)
        return graph_module

    def _add_input(self, each: InputRecord) -> None:
        if each.name in self._nodes or not each.name.isidentifier():
            raise ValueError(f"input {each.name!r} occurs twice, or is no name")
        if each.facts.role not in (INPUT, STATE) and each.facts.recipe is None:
            raise ValueError(f"input {each.name!r} has no recipe")
        if any(isinstance(size, int) and not 0 <= size < _MAX_SIZE for size in each.shape):
            raise ValueError(f"input {each.name!r} has shape {list(each.shape)}")
        node = self._graph.placeholder(each.name)
        shape = [size if isinstance(size, int) else self._size(size) for size in each.shape]
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=_DTYPES[each.dtype], device="meta")
        set_info(node, each.facts)
        self._nodes[each.name] = node

    def _add_call(self, call: CallRecord, end: Node) -> None:
        if call.op not in self._functions:
            raise ValueError(f"{call.name!r} calls {call.op!r}, which is no op of a lowered graph")
        arguments = [self._read(argument) for argument in call.args]
        if call.name in self._nodes:
            raise ValueError(f"node {call.name!r} occurs twice")
        function = self._functions[call.op]
        node = emit(end, function, arguments, facts=call.facts, name=call.name)
        self._nodes[call.name] = node

    def _size(self, name: str) -> Any:
        """Return the dynamic size for a name, shared by all inputs."""
        if name not in self._sizes:
            self._sizes[name] = self._make_size(name, _FIRST_HINT + len(self._sizes))
        return self._sizes[name]

    def _make_mode(self) -> AbstractContextManager[Any]:
        """Return the context for fake tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return FakeTensorMode(shape_env=ShapeEnv())

    def _make_size(self, name: str, hint: int) -> Any:
        return dynamic_size(self._mode, name, hint)

    def _read(self, argument: Any) -> Any:
        if isinstance(argument, dict):
            return self._nodes[argument["node"]]
        if isinstance(argument, list):
            return [self._read(item) for item in argument]
        if isinstance(argument, str) and argument not in _WORDS:
            raise ValueError(f"argument {argument[:40]!r}")
        return argument


class _FixedBuilder(_Builder):
    """Builds with hints as sizes and plain tensors on the meta device."""

    def _make_mode(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _make_size(self, name: str, hint: int) -> Any:
        return hint
