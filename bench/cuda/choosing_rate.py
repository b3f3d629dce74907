"""How long the choice of a step's tokens takes on a GPU, by rows, vocabulary and kind of draw.

``python -m bench.cuda.choosing_rate`` prints a table of microseconds, medians of graph replays,
beside the sort of the same logits that a draw took before. Random logits: nearly all of them are
in a nucleus of 0.95, which is the hardest case. Knows no model.
"""

from __future__ import annotations

import functools
import sys

import torch

from bench.cuda.replays import replayed
from tilewright.compiler.targets.cuda.outputs.sampling_batch import Drawing, make_choice
from tilewright.compiler.targets.cuda.state.slot_table import SeatTable
from tilewright.compiler.targets.interface.step import Choosing, Seat

ROWS = (1, 8, 64, 256)
VOCABULARIES = (128_256, 248_320)
KINDS: dict[str, tuple[Choosing, Drawing | None]] = {
    "greedy": (Choosing(), None),
    "temperature": (Choosing(temperature=1.0), Drawing(False, False)),
    "top-k": (Choosing(temperature=1.0, top_k=20), Drawing(True, False)),
    "top-p": (Choosing(temperature=1.0, top_p=0.95), Drawing(False, True)),
    "all": (Choosing(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01), Drawing(True, True)),
}


_median = functools.partial(replayed, num_replays=20)


def measure(num_rows: int, vocabulary: int) -> list[float]:
    """Microseconds of each kind, of one row in a hundred that draws, and of a sort."""
    device = torch.device("cuda")
    logits = torch.randn(num_rows, vocabulary, device=device)
    found = []
    kinds = [(kind, drawing, num_rows) for kind, drawing in KINDS.values()]
    kinds.append((*KINDS["all"], max(1, num_rows // 100)))
    for choosing, drawing, num_drawn in kinds:
        rows = [choosing if row < num_drawn else Choosing() for row in range(num_rows)]
        table = SeatTable(num_rows, 16, device)
        table.open({Seat(row): each for row, each in enumerate(rows)})
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        choice = make_choice(num_rows, vocabulary, 16, tokens)
        choice.gather(table, table.index([Seat(row) for row in range(num_rows)]))
        found.append(_median(lambda _, made=choice, how=drawing: made.apply(logits, how)))  # type: ignore[misc]
    found.append(_median(lambda _: torch.sort(logits, dim=-1, descending=True, stable=True)))
    return found


def main() -> int:
    """Print a line for each number of rows and vocabulary."""
    if not torch.cuda.is_available():
        print("no GPU: nothing is measured", file=sys.stderr)
        return 2
    heads = ["rows", "vocabulary", *KINDS, "one in 100: all", "a sort"]
    print(torch.cuda.get_device_name(), "- microseconds")
    print(" | ".join(heads))
    for vocabulary in VOCABULARIES:
        for num_rows in ROWS:
            figures = [f"{each:,.0f}" for each in measure(num_rows, vocabulary)]
            print(" | ".join([str(num_rows), f"{vocabulary:,}", *figures]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
