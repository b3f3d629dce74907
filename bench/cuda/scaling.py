"""What decoding on n GPUs is expected to take: the cost model, and its tables.

``python -m bench.cuda.scaling`` prints it. No figure of this file ever
stands in a column of measured ones: it measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.evaluate.report.table import Table

RATE = 4.49e12
"""Bytes a second that one GPU reads."""

LAUNCH_US = 2.89
"""What a kernel of a decode step costs beside its bytes: the gap before it, its ramp and tail."""

LINK_RATE = 350e9
"""Bytes a second between two GPUs, one way."""

EXCHANGE_US = {1: 0.0, 2: 2.7, 4: 3.1, 8: 3.7}
"""What an exchange adds to a step: at 2, measured alone with its residual and norm (3.4), less the
norm of a step that has none (0.7); at 4 and 8, 0.4 and 1.0 more for the parts of the others."""

KEYS_US = 3.0
"""The exchange of the best keys, and what counts a step's exchanges."""

CROSSING_US = 0.75
"""The microseconds from a GPU's store until another GPU reads it."""

_COUNTS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Load:
    """A decode step of one GPU as it was measured, and what it consists of.

    Attributes:
        tokens_per_s: of all rows on one GPU, measured unless ``is_computed``.
        num_bytes: that a step reads; dealt evenly.
        num_launches: kernels of a step.
        num_exchanges: sums over ranks in a step.
        hidden: columns of what is summed, four bytes each.
        on_two: tokens a second measured on two GPUs, where they were.
        is_computed: the model does not fit one GPU, which loses beside bytes and launches what a
            smaller one was measured to, in proportion to layers times hidden columns: with one row
            nothing is lost, so it is the rows' values, not the weights, that cost it.
    """

    name: str
    rows: int
    tokens_per_s: float
    num_bytes: float
    num_launches: int
    num_exchanges: int
    hidden: int
    on_two: float | None = None
    is_computed: bool = False

    @property
    def seconds(self) -> float:
        """The seconds of a step on one GPU."""
        return self.rows / self.tokens_per_s

    @property
    def loss(self) -> float:
        """Seconds of a step that are neither its bytes' nor its launches'; dealt like the bytes."""
        return max(0.0, self.seconds - self.num_bytes / RATE - 1e-6 * LAUNCH_US * self.num_launches)


def step_seconds(load: Load, count: int, *, exchange_us: float | None = None) -> float:
    """A step on so many GPUs. ``exchange_us``: of one exchange beside its bytes' time."""
    if count == 1:
        return load.seconds
    each = EXCHANGE_US[count] if exchange_us is None else exchange_us
    message = 4.0 * load.rows * load.hidden
    sent = (count - 1) * message  # to each of the others, in one hop
    exchanges = load.num_exchanges * (1e-6 * each + sent / LINK_RATE)
    own = (load.num_bytes / RATE + load.loss) / count
    return own + 1e-6 * (LAUNCH_US * load.num_launches + KEYS_US) + exchanges


def group_seconds(solo: float, count: int, *, num_exchanges: int, num_bytes: float) -> float:
    """A step of a group of ``count``, from the seconds of one rank by itself, whose exchanges have
    every kernel and nothing to wait for: each crosses once, and its bytes go to all of the others.
    """
    each = 1e-6 * CROSSING_US + (count - 1) * num_bytes / LINK_RATE
    return solo + num_exchanges * each


def pays_from(load: Load, count: int) -> float:
    """Seconds of a step on one GPU from which on ``count`` GPUs decode it faster than half as many
    do: where half of what these read takes as long as the exchanges that come on top.
    """
    rest = replace(load, num_bytes=0.0, tokens_per_s=float("inf"))
    more = step_seconds(rest, count) - (
        1e-6 * LAUNCH_US * load.num_launches if count == 2 else step_seconds(rest, count // 2)
    )
    return count * more + 1e-6 * LAUNCH_US * load.num_launches


def tokens_per_s(load: Load, count: int) -> float:
    """The tokens a second of all rows together, on so many GPUs."""
    return load.rows / step_seconds(load, count)


def byte_limit(load: Load, count: int, *, crossing_us: float = 0.0) -> float:
    """Tokens a second where nothing took time but the largest rank's bytes, and of every exchange
    one crossing between GPUs.
    """
    seconds = load.num_bytes / count / RATE + 1e-6 * crossing_us * load.num_exchanges
    return load.rows / seconds


def _70b(like: Load, on_two: float) -> Load:
    """Llama-3.1-70B in bf16, which no one GPU holds: see `Load.is_computed`."""
    num_bytes, num_layers, hidden = 139e9, 80, 8192
    launches, exchanges = 4 + 5 * num_layers, 2 * num_layers
    loss = like.loss * exchanges * hidden / (like.num_exchanges * like.hidden)
    seconds = num_bytes / RATE + 1e-6 * LAUNCH_US * launches + loss
    size = (num_bytes, launches, exchanges, hidden)
    return Load(
        *("Llama-3.1-70B bf16", like.rows, like.rows / seconds, *size, on_two), is_computed=True
    )


_8B: tuple[float, int, int, int] = (15.01e9, 164, 64, 4096)
_ONE_8B = Load("Llama-3.1-8B bf16", 1, 262, *_8B, 458)
_MANY_8B = Load("Llama-3.1-8B bf16", 32, 6339, *_8B, 9893)

LOADS: Sequence[Load] = (
    _ONE_8B,
    Load("Llama-3.1-8B bf16", 8, 1902, *_8B, 2976),
    _MANY_8B,
    Load("Llama-3.1-8B bf16", 64, 11_769, *_8B, 18_282),
    Load("Llama-3.1-8B performance", 1, 515.1, 6.11e9, 164, 64, 4096, 685),
    _70b(_ONE_8B, 57.9),
    _70b(_MANY_8B, 1581),
    Load("Llama-3.1-70B performance", 1, 62.9, 55.1e9, 404, 160, 8192, 111),
    Load("Qwen3.5-35B-A3B bf16", 1, 448, 6.0e9, 346, 80, 2048, 556),
    Load("Qwen3.5-35B-A3B bf16", 4, 1041, 12.2e9, 387, 80, 2048, 1452),
    Load("Qwen3.5-35B-A3B bf16", 16, 1833, 32.0e9, 387, 80, 2048, 3013),
    Load("Qwen3.5-35B-A3B bf16", 64, 3544, 69.8e9, 387, 80, 2048, 6227),
)
"""Of one H200; on two H200s at 0e7c322
(2026-11-23), behind prompts of 128, of 1,024 for 35B-A3B. The model was made before these, but for
how a larger model's loss follows from a smaller one's, which an earlier run of 70B with 32 rows has
chosen; it is 7 % off at most.
"""


def table() -> Table:
    """Every load on 2, 4 and 8 GPUs: tokens a second as predicted, and the two limits on 2."""
    crossing = CROSSING_US
    titles = (
        *("model, rows", "1 GPU, measured", "2, measured"),
        *(f"{count}, predicted" for count in _COUNTS),
        *("limit of bytes on 2", f"and {crossing} us an exchange"),
    )
    rows = [
        (
            f"{load.name}, {load.rows}",
            "-" if load.is_computed else f"{load.tokens_per_s:,.0f}",
            "-" if load.on_two is None else f"{load.on_two:,.0f}",
            *(f"{tokens_per_s(load, count):,.0f}" for count in _COUNTS),
            f"{byte_limit(load, 2):,.0f}",
            f"{byte_limit(load, 2, crossing_us=crossing):,.0f}",
        )
        for load in LOADS
    ]
    return Table.of(titles, rows)


def shortest() -> Table:
    """Every load's step on one GPU, and from which length on more GPUs decode it faster."""
    titles = (
        *("model, rows", "a step on one GPU, ms"),
        *(f"{count} pay from, ms" for count in _COUNTS),
    )
    rows = [
        (
            f"{load.name}, {load.rows}",
            f"{1e3 * load.seconds:.2f}" + (" (predicted)" if load.is_computed else ""),
            *(f"{1e3 * pays_from(load, count):.2f}" for count in _COUNTS),
        )
        for load in LOADS
    ]
    return Table.of(titles, rows)


if __name__ == "__main__":
    sys.stdout.write(f"{table().markdown()}\n{shortest().markdown()}")
