"""Explanations in ``tilewright bench``: bytes, answers as they arrive, and settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.cli.arguments.bench import RunOptions
from tilewright.cli.terminal.console import print_table
from tilewright.compiler.driver import resolve_precision
from tilewright.compiler.ir.cost import GroupCost, step_costs
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ops import COLLECTIVES
from tilewright.compiler.precision import DRAFT_SCOPE, EXPERT_GROUPS, PrecisionSummary
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CompileError
from tilewright.evaluate.measure.roofline import TrafficShare, compiled_weight_bytes
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.evaluate.sweep.memory_estimate import estimate_memory
from tilewright.evaluate.sweep.model import experts_share
from tilewright.options.resolve import ResolvedConfig

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.targets.contract.record import ContractEntry, NumericContract
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.models import LoadedModel
    from tilewright.models.tokenizer.tokenizer import Tokenizer

_SHOWN_CHARACTERS = 160
"""Characters per answer of a batch. The answer of a single user is streamed completely."""

_CONTRACT: Columns[ContractEntry] = {
    "field": lambda entry: entry.field,
    "layers": lambda entry: entry.layers,
    "requested": lambda entry: entry.requested,
    "status": lambda entry: entry.meaning.status,
    "used": lambda entry: entry.meaning.effective,
}
_BYTES: Columns[TrafficShare] = {
    "group": lambda share: share.group,
    "formats": lambda share: ", ".join(share.formats) * (share.group != "total"),
    "format": lambda share: ", ".join(share.kinds) * (share.group != "total"),
    "weights (M)": lambda share: f"{share.num_weights / 1e6:,.2f}" if share.num_weights else "-",
    "size (MB)": lambda share: f"{share.stored / 1e6:,.2f}",
    "moved a step (MB)": lambda share: f"{share.moved / 1e6:,.2f}",
}


class TextPrinter:
    """Streams a single user's answer, or prints a batch's complete answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        screen: Console,
        options: RunOptions,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._screen = screen
        self._shown = options.case.is_natural
        self._streams = self._shown and options.case.batch_size == 1
        self._stream = tokenizer.stream(after=prompts[0])

    def on_token(self, repeat: int, request: object, token: int) -> None:
        """Receive a token from a measured run. Only the first repeat is shown."""
        if self._streams and repeat == 0:
            self._write(self._stream.push(token))

    def close(self, outputs: Sequence[Sequence[int]]) -> None:
        """Print the first repeat's rest. ``outputs`` has its tokens by user."""
        if self._streams:
            self._write(self._stream.flush() + "\n\n")
        elif self._shown:
            for user, output in enumerate(outputs):
                text = " ".join(self._tokenizer.decode(list(output)).split())
                cut = " ..." if len(text) > _SHOWN_CHARACTERS else ""
                self._write(f"[{user}] {text[:_SHOWN_CHARACTERS]}{cut}\n")

    def _write(self, text: str) -> None:
        self._screen.file.write(text)
        self._screen.file.flush()


def explain_precision(
    screen: Console, precision: PrecisionSummary, *, has_draft_layer: bool = False
) -> None:
    """Print the settings with their origins, and the heading."""
    rows = [row for row in precision.rows if has_draft_layer or row.scope != DRAFT_SCOPE]
    table = Table.of(("where", "what", "is", "by"), rows)
    print_table(screen, f"precision {precision.name}", table)
    screen.print(precision.heading)


def explain_contract(screen: Console, contract: NumericContract) -> None:
    """Print the use of every setting by the target."""
    print_table(screen, "numeric contract of the target", Table.by(_CONTRACT, contract.entries))


def print_memory_estimate(
    screen: Console,
    model: LoadedModel | None,
    choices: ResolvedConfig,
    *,
    batch: int,
    context: int,
) -> None:
    """Print the bytes of a model and its state, and the bytes that a decode step moves.

    Prints nothing for compiled directories, or for weights in formats without support: compiling
    refuses them with their names.
    """
    precision, target = choices.precision, choices.target
    if model is None or precision is None:
        return
    resolved, backend = resolve_precision(model, precision), get_target(target)
    sizes = {"batch": batch, "context": context}
    try:
        plan = estimate_memory(model, resolved, backend, compute=choices.compute, **sizes)
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
    table = Table.by(_BYTES, (*plan.shares, plan.total), *notes)
    print_table(screen, title, table, numbers=True)


def explain_places(screen: Console, compiled: Compiled) -> None:
    """Print the slices of weights per rank. Prints nothing for a single device."""
    if compiled.places:
        table = Table.of(("group", "axis", "shares of ranks"), compiled.places)
        print_table(screen, "sharded over ranks; whole on each: all others", table)


def explain_cost(screen: Console, compiled: Compiled, context: int) -> None:
    """Print bytes and operations of a decode step by tensor group."""
    costs = step_costs(compiled.graph(), num_tokens=1, context=context)
    read = compiled_weight_bytes(compiled)
    columns: Columns[GroupCost] = {
        "group": lambda cost: cost.group,
        "formats": lambda cost: ", ".join(cost.formats) * bool(cost.num_weights),
        "weights (M)": lambda cost: f"{cost.num_weights / 1e6:,.2f}",
        "weights read (MB)": lambda cost: f"{read.get(cost.group, 0.0) / 1e6:,.2f}",
        "operations (M)": lambda cost: f"{cost.flops / 1e6:,.1f}",
    }
    if any(cost.sent_bytes for cost in costs):
        columns = {**columns, "sent (KB)": lambda cost: f"{cost.sent_bytes / 1024:,.1f}"}
        columns["formats"] = lambda cost: (
            ", ".join(cost.formats) or _wires(compiled) * bool(cost.sent_bytes)
        )
    title = f"one decode step at a context of {context}"
    print_table(screen, title, Table.by(columns, costs), numbers=True)


def _wires(compiled: Compiled) -> str:
    """Return the data types for sums between ranks."""
    calls = find_calls(compiled.graph().graph, *COLLECTIVES)
    wires = (each for call in calls for each in call.args if isinstance(each, str))
    return ", ".join(dict.fromkeys(wires))
