"""PERF.md's section of boards that were not there: what was emulated, what was predicted.

Every column says which of the two it is; what the boards' vendor published stands beside, named so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tilewright.compiler.bench.perf_md import (
    BOARDS_TITLE,
    DEVICE,
    EMULATED_TOP1,
    EMULATED_TOP5,
    MODEL,
    POSITIONS,
    PRECISION,
    PREDICTED_SPEED,
    PREDICTED_TTFT,
    PUBLISHED_SPEED,
    PUBLISHED_TOP1,
    PUBLISHED_TTFT,
    PerfRow,
)
from tilewright.compiler.bench.record import Result
from tilewright.compiler.bench.selection import (
    Group,
    context_k,
    group_results,
    has_context,
    is_batch_32,
    is_short,
)

EMULATED_INTERVAL, EMULATED_KL = "Emulated top-1 95 % CI", "Emulated KL"
EMULATED_PAIRED = "Emulated vs base"
SPEED_ERROR, TTFT_ERROR, LENGTHS = "Speed error (%)", "TTFT error (%)", "Batch x prompt"

Cells = tuple[str, ...]
COLUMNS = (
    *(MODEL, DEVICE, PRECISION, LENGTHS),
    *(EMULATED_TOP1, EMULATED_TOP5, EMULATED_INTERVAL, POSITIONS, EMULATED_KL, EMULATED_PAIRED),
    *(PREDICTED_SPEED, SPEED_ERROR, PREDICTED_TTFT, TTFT_ERROR),
    *(PUBLISHED_SPEED, PUBLISHED_TTFT, PUBLISHED_TOP1),
)

INTRO = """\
No board was there. Top-1, top-5 and KL are **emulated**: the board's formats and the arithmetic of
its matrix unit, bit for bit; small operators are approximated as their sources say. Speed and TTFT
are **predicted** by a model of time that was fitted to published figures
([docs/perf_model.md](docs/perf_model.md)); an error is the share of the figure that nine of ten
predictions were off by at most: for models left out of the fit, or, where 32 users, long prompts or
replicas are never fitted, for those. A figure without one is of a model smaller than any that the
model of time was fitted to: an extrapolation. **Published**: what Tenstorrent
measured, in whole percents, where it lists the model on the device. No figure of this section is
measured here."""


def board_rows(
    results: Sequence[Result],
    published: Callable[[Result], PerfRow | None],
    cells_of: Callable[[Group], tuple[Cells, Cells]],
) -> list[Cells]:
    """A row for every group, batch and prompt length; accuracy stands in the first of a group.

    ``cells_of``: a group's names (model, device, precision) and its accuracy's six cells.
    """
    # kinds are told apart by their columns, so that both stand in one row
    rows = []
    for group in group_results(list(results)):
        names, accuracy = cells_of(group)
        blank = ("",) * len(accuracy)
        speeds = list(_speeds(group))
        for index, found in enumerate(speeds or [None]):
            figures = _figures(found, published) if found is not None else ("",) * 7
            lengths = "" if found is None else f"{found.batch} x {found.prompt_length}"
            rows.append((*names, lengths, *(blank if index else accuracy), *figures))
    return rows


def _speeds(group: Group) -> Iterable[Result]:
    lengths = {k for result in group.results if (k := context_k(result))}
    wanted: list[Callable[[Result], bool]] = [is_short, is_batch_32]
    wanted += [partial(has_context, k=k) for k in sorted(lengths)]
    return (found for each in wanted if (found := group.speed(each)) is not None)


def _figures(result: Result, published: Callable[[Result], PerfRow | None]) -> Cells:
    known = published(result)
    return (
        _decimal(result.decode_tsu),
        _percent(result.decode_error),
        _decimal(result.ttft_ms),
        _percent(result.ttft_error),
        "" if known is None else _plain(known.speed),
        "" if known is None else _plain(known.ttft),
        "" if known is None else _plain(known.top1),
    )


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


__all__ = ["BOARDS_TITLE", "COLUMNS", "INTRO", "board_rows"]
