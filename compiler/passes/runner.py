"""The pass runner: lint, dead-code removal, timing, differences in op counts, and dumps.

Passes are arguments. The runner does not depend on any of them.
"""

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
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.errors import ConfigError


@dataclass(slots=True)
class PassContext:
    """Inputs and outputs common to all passes.

    Attributes:
        precision: The resolved configuration.
        notes: Messages for the user.
        reports: Completed pass reports.
        dump_dir: Directory for graph dumps. None: no dumps.
        stored_type: Returns a checkpoint tensor's type by name. None: no checkpoint.
        calibrated: Returns a calibrated tensor's format and block axis, or None.
        target_axis: The target's only supported block axis. Empty: both are supported.
        parallel: The group of ranks for sharding.
        rank: The compiled program's rank.
        places: Sharding of weights for reports: tensor group, axis, size per rank.
    """

    precision: ResolvedPrecision
    notes: list[str] = field(default_factory=list)
    reports: list[PassReport] = field(default_factory=list)
    dump_dir: Path | None = None
    stored_type: Callable[[str], str] | None = None
    calibrated: Callable[[str], tuple[str, str] | None] | None = None
    target_axis: str = ""
    parallel: ParallelConfig = SINGLE_RANK
    rank: int = 0
    places: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PassReport:
    """A pass's report: rewrite count, seconds, and changes in op counts."""

    name: str
    num_rewrites: int
    seconds: float
    op_changes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """A named graph rewrite.

    If it ``changes_numerics``, tests compare its results within a format's precision, else exactly.
    """

    name: str
    function: Callable[[GraphModule, PassContext], int]
    changes_numerics: bool = False

    def __call__(self, graph_module: GraphModule, ctx: PassContext) -> int:
        """Rewrite the graph in place. Return the rewrite count."""
        return self.function(graph_module, ctx)


def graph_pass(function: Callable[[GraphModule, PassContext], int]) -> Pass:
    """Declare a numerics-preserving pass, named after the function."""
    return Pass(function.__name__, function)


def numerics_changing_pass(function: Callable[[GraphModule, PassContext], int]) -> Pass:
    """Declare a pass with changed results, for example by formats, named after the function."""
    return Pass(function.__name__, function, changes_numerics=True)


def run_passes(
    graph_module: GraphModule,
    passes: Sequence[Pass],
    ctx: PassContext,
    *,
    verify: Callable[[GraphModule], None] | None = None,
) -> None:
    """Run a stage's passes in order, then its verification. Append reports to ``ctx``.

    Raises:
        ConfigError: A dump cannot be written.
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
    """Return whether to keep a node without users: inputs and the output. State writes have
    users.
    """
    return getattr(node, "op", "") in ("placeholder", "output")


def _erase_unused_weights(graph_module: GraphModule) -> None:
    """Erase weights replaced by a merge, so that they are not loaded. Step inputs remain."""
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
