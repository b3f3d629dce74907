"""The byte plan as the commands print it, before they compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.compiler.bench.record import RANDOM_WEIGHTS
from tilewright.compiler.bench.table import Columns, Table
from tilewright.compiler.commands.console import print_table
from tilewright.compiler.errors import CompileError

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.bench.roofline import Share
    from tilewright.compiler.precision import PrecisionConfig
    from tilewright.models import LoadedModel

_COLUMNS: Columns[Share] = {
    "group": lambda share: share.group,
    "formats": lambda share: ", ".join(share.formats) * (share.group != "total"),
    "held as": lambda share: ", ".join(share.kinds) * (share.group != "total"),
    "weights (M)": lambda share: f"{share.num_weights / 1e6:,.2f}" if share.num_weights else "-",
    "held (MB)": lambda share: f"{share.held / 1e6:,.2f}",
    "moved a step (MB)": lambda share: f"{share.moved / 1e6:,.2f}",
}


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
    from tilewright.compiler.precision import EXPERT_GROUPS
    from tilewright.compiler.sweep.byte_plan import byte_plan
    from tilewright.compiler.sweep.model import experts_share
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
    notes = [f"cache: {plan.position_bytes:,} bytes a position of a sequence"]
    if plan.memory_bytes:
        notes[0] += f"; memory: {plan.memory_bytes:,} bytes a sequence, whatever its length"
    if any(share.group in EXPERT_GROUPS for share in plan.shares):
        read = f"{100 * experts_share(model, batch):.1f} % of the experts (all equally likely)"
        notes.append(f"a decode step at batch {batch} is expected to read {read}")
    table = Table.by(_COLUMNS, (*plan.shares, plan.total), *notes)
    print_table(screen, title, table, numbers=True)
