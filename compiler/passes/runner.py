"""Runs passes: lint, dead code, timing, op-count differences, dumps. It knows no pass by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule

from tilewright.compiler.ir.info import CONSTANT, WEIGHT, info
from tilewright.compiler.ir.text import graph_text, operator_name
from tilewright.compiler.precision import ResolvedPrecision
from tilewright.distributed.parallel import ALONE, Parallel
from tilewright.errors import ConfigError


@dataclass(slots=True)
class PassContext:
    """What passes may ask and tell: the precision asked for, notes for the user, a report of each
    pass that ran, and the folder that graphs are dumped to (None: nowhere). ``stored_type`` tells
    the type that a checkpoint's tensor is stored in, by its name (None: nobody knows).
    ``calibrated`` returns format and block axis of a calibrated tensor (None: not calibrated).
    ``target_axis``: the only axis of blocks that the target has, if it has only one.
    ``parallel`` and ``rank``: the group that a graph is dealt over, and whose program it becomes;
    ``places`` tells of each tensor group which axes of its weights are dealt, and what each rank
    has of them.
    """

    precision: ResolvedPrecision
    notes: list[str] = field(default_factory=list)
    reports: list[PassReport] = field(default_factory=list)
    dump_dir: Path | None = None
    stored_type: Callable[[str], str] | None = None
    calibrated: Callable[[str], tuple[str, str] | None] | None = None
    target_axis: str = ""
    parallel: Parallel = ALONE
    rank: int = 0
    places: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did: places rewritten, seconds, and how the op counts changed."""

    name: str
    num_rewrites: int
    seconds: float
    op_changes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """A named graph rewrite. Where it ``changes_numerics`` its results are checked against a
    format, and not for equality.
    """

    name: str
    function: Callable[[GraphModule, PassContext], int]
    changes_numerics: bool = False

    def __call__(self, graph_module: GraphModule, ctx: PassContext) -> int:
        """Rewrites the graph in place; returns how many places were rewritten."""
        return self.function(graph_module, ctx)


def graph_pass(function: Callable[[GraphModule, PassContext], int]) -> Pass:
    """Declares a pass of the function's name that preserves numerics."""
    return Pass(function.__name__, function)


def numerics_changing_pass(function: Callable[[GraphModule, PassContext], int]) -> Pass:
    """Declares a pass of the function's name that changes results, as one that assigns formats."""
    return Pass(function.__name__, function, changes_numerics=True)


def run_passes(
    graph_module: GraphModule,
    passes: Sequence[Pass],
    ctx: PassContext,
    *,
    verify: Callable[[GraphModule], None] | None = None,
) -> None:
    """Runs one stage's passes in order, then its verification; reports are added to ``ctx``.

    Raises:
        ConfigError: where a graph cannot be dumped.
    """
    for current in passes:
        before = _op_counts(graph_module)
        started = time.perf_counter()
        num_rewrites = current(graph_module, ctx)
        graph_module.graph.eliminate_dead_code(is_impure_node=_is_impure)
        _erase_unused_weights(graph_module)
        graph_module.graph.lint()
        seconds = time.perf_counter() - started
        after = _op_counts(graph_module)
        changes = {op: after[op] - before[op] for op in sorted(before | after)}
        report = PassReport(
            current.name, num_rewrites, seconds, {op: n for op, n in changes.items() if n}
        )
        ctx.reports.append(report)
        if ctx.dump_dir is not None:
            _dump(ctx.dump_dir, len(ctx.reports), current.name, graph_module)
    if verify is not None:
        verify(graph_module)
    graph_module.recompile()


def _is_impure(node: object) -> bool:
    """Inputs and the output stay; everything else lives by its users (state writes have users)."""
    return getattr(node, "op", "") in ("placeholder", "output")


def _erase_unused_weights(graph_module: GraphModule) -> None:
    """Weights that a merge replaced must not be loaded; step inputs keep their places."""
    for node in list(graph_module.graph.nodes):
        if node.op == "placeholder" and not node.users and info(node).role in (WEIGHT, CONSTANT):
            graph_module.graph.erase_node(node)


def _op_counts(graph_module: GraphModule) -> Counter[str]:
    return Counter(
        operator_name(node) for node in graph_module.graph.nodes if node.op == "call_function"
    )


def _dump(folder: Path, number: int, name: str, graph_module: GraphModule) -> None:
    path = folder / f"{number:02d}_{name}.txt"
    try:
        path.write_text(graph_text(graph_module.graph), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the dump cannot be written ({error.strerror})") from None
