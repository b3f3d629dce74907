"""Graph rewriting: patterns, matches, and new nodes with shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tilewright.compiler.ir.info import NodeInfo, set_info
from tilewright.compiler.ops import Operator

Bindings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Var:
    """Binds any node to a name. A repeated name must bind the same node."""

    name: str


@dataclass(frozen=True, slots=True)
class LiteralPattern:
    """Binds a number, string, list or None to a name."""

    name: str


@dataclass(frozen=True, slots=True, init=False)
class CallPattern:
    """Matches a call to any of ``targets`` with these arguments. Further arguments are free.

    Calls with keyword arguments (``alpha``, ``dtype``) never match. ``commutative`` tries the first
    two arguments in both orders.
    """

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    commutative: bool

    def __init__(self, targets: Any, *args: Any, commutative: bool = False) -> None:
        object.__setattr__(self, "targets", targets if isinstance(targets, tuple) else (targets,))
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "commutative", commutative)


def match(pattern: Any, value: Any, bindings: Bindings | None = None) -> Bindings | None:
    """Return the bindings if ``value`` (a node or an argument) matches the pattern, else None."""
    bound = {} if bindings is None else bindings
    if isinstance(pattern, Var):
        return _bind(pattern.name, value, bound) if isinstance(value, Node) else None
    if isinstance(pattern, LiteralPattern):
        return None if isinstance(value, Node) else _bind(pattern.name, value, bound)
    if isinstance(pattern, CallPattern):
        return _match_call(pattern, value, bound)
    if isinstance(pattern, list | tuple):
        if not isinstance(value, list | tuple):
            return None
        return _match_all(tuple(pattern), tuple(value), bound)
    return bound if type(pattern) is type(value) and pattern == value else None


def _bind(name: str, value: Any, bindings: Bindings) -> Bindings | None:
    if name in bindings:
        return bindings if bindings[name] is value or _equal(bindings[name], value) else None
    return {**bindings, name: value}


def _equal(left: Any, right: Any) -> bool:
    return not isinstance(left, Node) and not isinstance(right, Node) and bool(left == right)


def _match_call(pattern: CallPattern, value: Any, bindings: Bindings) -> Bindings | None:
    if not isinstance(value, Node) or value.op != "call_function":
        return None
    if value.target not in pattern.targets or value.kwargs:
        return None
    arguments = tuple(value.args)
    orders = [arguments]
    if pattern.commutative and len(arguments) >= 2:
        orders.append((arguments[1], arguments[0], *arguments[2:]))
    for order in orders:
        found = _match_all(pattern.args, order[: len(pattern.args)], bindings)
        if found is not None:
            return found
    return None


def _match_all(patterns: tuple[Any, ...], values: tuple[Any, ...], bound: Bindings) -> Any:
    if len(patterns) != len(values):
        return None
    found: Bindings | None = bound
    for pattern, value in zip(patterns, values, strict=True):
        found = match(pattern, value, found)
        if found is None:
            return None
    return found


def emit(
    before: Node,
    operation: Operator | Any,
    args: Sequence[Any],
    *,
    facts: NodeInfo | None = None,
    name: str | None = None,
) -> Node:
    """Insert a call before a node, with its result shape and its NodeInfo.

    The op's fake computes the shape from the arguments' fakes. torch selects the default name.
    """
    target = operation.overload if isinstance(operation, Operator) else operation
    with before.graph.inserting_before(before):
        node = before.graph.create_node("call_function", target, tuple(args), name=name)
    fakes = map_arg(tuple(args), lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*fakes)
    set_info(node, facts if facts is not None else NodeInfo())
    return node


def replace(node: Node, replacement: Node) -> None:
    """Redirect all users of a node to its replacement and erase the node."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def add_input(graph: Graph, name: str, value: Any, facts: NodeInfo) -> Node:
    """Add a placeholder after the existing placeholders. ``value`` is its fake."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        node = graph.placeholder(name)
    node.meta["val"] = value
    set_info(node, facts)
    return node


def fake_input(like: Node, sizes: Sequence[int | str], dtype: torch.dtype) -> Any:
    """Return a fake tensor in the graph's fake mode. String sizes are names of dynamic
    dimensions.
    """
    mode = like.meta["val"].fake_mode
    shape = [
        size if isinstance(size, int) else dynamic_size(mode, f"tilewright_{size}", 7 + index)
        for index, size in enumerate(sizes)
    ]
    with mode:
        return torch.empty(shape, dtype=dtype, device="meta")


def dynamic_size(mode: Any, name: str, hint: int) -> Any:
    """Return the dynamic dimension for a name and hint. The first call in a fake mode creates it.

    A new symbol clears torch's caches for all other symbols. A symbol per layer would be slow.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = vars(mode).setdefault("_tilewright_sizes", {})
    if (name, hint) not in sizes:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        tensor = torch.empty(hint, device="meta")
        fake = mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)
        sizes[name, hint] = fake.shape[0]
    return sizes[name, hint]


def find_calls(graph: Graph, *targets: Any) -> list[Node]:
    """Return the calls to any of these operators or overloads, in graph order."""
    overloads = {t.overload if isinstance(t, Operator) else t for t in targets}
    return [node for node in graph.nodes if node.op == "call_function" and node.target in overloads]


def rewrite_matches(
    graph: Graph, pattern: CallPattern, build: Callable[[Node, Bindings], Node | None]
) -> int:
    """Replace each match of ``pattern`` with the result of ``build(root, bindings)``. Return the
    count.

    A match remains unchanged if ``build`` returns None.
    """
    count = 0
    for node in list(graph.nodes):
        found = match(pattern, node)
        if found is None:
            continue
        replacement = build(node, found)
        if replacement is not None:
            replace(node, replacement)
            count += 1
    return count
