"""The byte plan as the commands print it, before they compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.compiler.bench.record import RANDOM_WEIGHTS
from tilewright.compiler.commands.console import print_table
from tilewright.compiler.errors import CompileError

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.precision import PrecisionConfig
    from tilewright.compiler.sweep.byte_plan import BytePlan, Share
    from tilewright.models import LoadedModel

_COLUMNS = ("group", "formats", "held as", "weights (M)", "held (MB)", "moved a step (MB)")


def print_byte_plan(
    screen: Console,
    model: LoadedModel,
    precision: PrecisionConfig,
    *,
    target: str,
    batch: int,
    context: int,
    compute: str,
) -> None:
    """What the model and its state are going to take, and what a decode step is to move of them.

    Nothing is printed for weights that the target cannot hold: compiling refuses them, and can
    say where they are.
    """
    from tilewright.compiler.driver import resolve_precision
    from tilewright.compiler.sweep.byte_plan import byte_plan
    from tilewright.compiler.targets.table import get_target

    resolved = resolve_precision(model, precision)
    try:
        plan = byte_plan(
            model, resolved, get_target(target), batch=batch, context=context, compute=compute
        )
    except CompileError:
        return
    name = f"{model.name} {RANDOM_WEIGHTS}" if model.weights == "random" else model.name
    users = "1 sequence" if batch == 1 else f"{batch} sequences"
    title = f"bytes of {name} on {target}, {precision.name}: {users} of {context:,} positions"
    rows = [_row(share) for share in (*plan.shares, plan.total)]
    print_table(screen, title, _COLUMNS, rows, numbers=True)
    for note in plan_notes(plan):
        screen.print(note, style="dim", soft_wrap=True)


def plan_notes(plan: BytePlan) -> list[str]:
    """What the table does not say, a line each."""
    cache = f"cache: {plan.position_bytes:,} bytes a position of a sequence"
    if plan.memory_bytes:
        cache += f"; memory: {plan.memory_bytes:,} bytes a sequence, whatever its length"
    if plan.experts_read is None:
        return [cache]
    share = f"{100 * plan.experts_read:.1f} % of the experts"
    return [
        cache,
        f"a decode step at batch {plan.batch} is expected to read {share} (all equally likely)",
    ]


def _row(share: Share) -> tuple[str, ...]:
    is_total = share.group == "total"
    return (
        share.group,
        "" if is_total else ", ".join(share.formats),
        "" if is_total else ", ".join(share.kinds),
        f"{share.num_weights / 1e6:,.2f}" if share.num_weights else "-",
        f"{share.held / 1e6:,.2f}",
        f"{share.moved / 1e6:,.2f}",
    )
