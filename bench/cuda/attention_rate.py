"""How long decode attention takes on a GPU, by rows, what pages hold, position and table.

``python -m bench.cuda.attention_rate`` prints a table of microseconds a launch of Llama-3.1-8B's
heads, or of Qwen3.5-35B-A3B's. Launches are chained in a captured graph, each over a cache of its
own, so that nothing lies in the L2 that a model would not have there; a figure is the median of a
round's replays. Knows no model, and compares nothing but shares: what another tree takes, that
tree's own command says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option

if TYPE_CHECKING:
    import torch

    from tilewright.compiler.targets.cuda.state.pages import KVPages

KINDS = "bf16", "bfp8"
PAGE, BLOCK = 64, 16
"""Of a page and of bfp8: what arguments are checked by, without torch."""

HEADS = {"8b": (32, 8, 128), "35b-a3b": (16, 2, 256)}
"""Query heads, key/value heads and channels of models."""

FREE, SAME, WALKED = "free", "same", "walked"
BITS = FREE, SAME, WALKED

APART, ALL = "apart", "all"
REACHES = APART, ALL

SPREAD = 10
"""Positions that the first row is before the middle one, and the last behind it."""

CHAIN_BYTES = 240_000_000
"""What the caches of a chain hold together, about: several times the L2."""

_LEAST_CACHES, _MOST_CACHES, _LEAST_LAUNCHES = 4, 128, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured: all of these with each other, so many times over."""

    rows: tuple[int, ...] = option(
        "rows of a launch", default=(1, 8, 16, 32, 64, 128, 256), type=integer(1, 1024), metavar="N"
    )
    formats: tuple[str, ...] = option("what pages hold", default=KINDS, choices=KINDS)
    heads: tuple[str, ...] = option("whose heads", default=("8b",), choices=tuple(HEADS))
    bits: tuple[str, ...] = option(
        "blocks shared out freely, as steps of more than 4 rows are, or so that a row has the same "
        "bits among any rows; either way few rows are spread, over bfp8 pages, too, where there is "
        "room; walked: the same bits, and none is spread",
        default=(FREE,),
        choices=BITS,
    )
    reaches: tuple[str, ...] = option(
        "launches for rows of few pages, apart from others, as steps of dense plans have, or with "
        "blocks for all that a table has room for, as a hybrid's and what decodes beside prompts",
        default=(APART,),
        choices=REACHES,
    )
    positions: tuple[int, ...] = option(
        f"where the rows are, {SPREAD} before to {SPREAD} behind",
        default=(230,),
        type=integer(SPREAD),
        metavar="N",
    )
    pages: tuple[int, ...] = option(
        f"pages of a table, {PAGE} positions each", default=(7, 34), type=integer(1), metavar="N"
    )
    rounds: int = option("rounds over everything", default=2, type=integer(1), metavar="N")


@dataclass(frozen=True, slots=True)
class Case:
    """A launch of so many rows about a position, over tables of ``width`` pages."""

    num_rows: int
    kind: str
    position: int
    width: int
    heads: str = "8b"
    bits: str = FREE
    reaches: str = APART

    @property
    def positions(self) -> list[int]:
        """The position of each row."""
        if self.num_rows == 1:
            return [self.position]
        step = 2 * SPREAD / (self.num_rows - 1)
        return [self.position - SPREAD + round(step * row) for row in range(self.num_rows)]

    @property
    def num_pages(self) -> int:
        """The pages that each row has been given."""
        return max(self.positions) // PAGE + 1

    @property
    def num_caches(self) -> int:
        """The caches that launches take in turn."""
        _, num_kv_heads, head_dim = HEADS[self.heads]
        row = head_dim * 2 if self.kind == "bf16" else head_dim + head_dim // BLOCK
        num_bytes = self.num_rows * self.num_pages * 2 * num_kv_heads * PAGE * row
        return max(_LEAST_CACHES, min(_MOST_CACHES, CHAIN_BYTES // num_bytes + 1))


def choose_cases(options: Options) -> list[Case]:
    """Every launch that is asked for, in the order of measuring.

    Raises:
        ConfigError: where a table does not reach a position.
    """
    cases = [
        Case(num_rows, kind, position, width, heads, bits, reaches)
        for heads in dict.fromkeys(options.heads)
        for bits in dict.fromkeys(options.bits)
        for reaches in dict.fromkeys(options.reaches)
        for width in options.pages
        for position in options.positions
        for num_rows in options.rows
        for kind in options.formats
    ]
    for case in cases:
        if case.num_pages > case.width:
            most = case.width * PAGE - 1 - (SPREAD if case.num_rows > 1 else 0)
            raise ConfigError(
                f"--positions {case.position}: a table of {case.width} pages ends before; "
                f"allowed with --rows {case.num_rows}: up to {most}"
            )
    return cases


class Launches:
    """A case's caches and operands on the device: random, and tables in no order."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        import torch

        from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
        from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
        from tilewright.compiler.targets.cuda.kernels.attention.decode_triton import decode_scratch

        device, rows, need = generator.device, case.num_rows, case.num_pages
        num_heads, num_kv_heads, head_dim = HEADS[case.heads]
        count = rows * need
        self.caches = [_random_pages(case, count, generator) for _ in range(case.num_caches)]
        order = torch.randperm(count, generator=generator, device=device).to(torch.int32)
        self.tables = torch.zeros(rows, case.width, dtype=torch.int32, device=device)
        self.tables[:, :need] = order.view(rows, need)
        self.positions = torch.tensor(case.positions, device=device, dtype=torch.int64)
        self.slots = torch.arange(rows - 1, -1, -1, device=device)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(rows, width, device=device, generator=generator)
        half = head_dim // 2
        self.inv_freq = 1.0 / 500000.0 ** (torch.arange(half, device=device) / half)
        self.out = torch.empty(rows, num_heads * head_dim, dtype=torch.bfloat16, device=device)
        num_splits = max(case.width, attention_shares.MAX_GROUPS)
        self.scratch = decode_scratch(rows, num_heads, head_dim, num_splits, device)
        if why := native_attention.why_not(
            self.caches[0], num_heads=num_heads, num_frequencies=half
        ):
            raise TilewrightError(f"attention.cu cannot run here: {why}")
        self._num_heads, self._scale = num_heads, head_dim**-0.5
        reach = case.width
        if case.reaches == APART:
            reaches = attention_shares.reaches_of(case.width)
            reach = next(each for each in reaches if each >= need)
        sizes = rows, num_kv_heads, reach, head_dim
        self._share: attention_shares.Share | attention_shares.Spread
        self._share = attention_shares.share_of_step(*sizes, strict=case.bits == SAME)
        if case.bits == WALKED:
            self._share = attention_shares.choose_share(*sizes)
        self._attend = native_attention.attend_decode

    def run(self, index: int = 0) -> None:
        """One launch over one of the caches."""
        self._attend(
            self.caches[index],
            self.qkv,
            out=self.out,
            positions=self.positions,
            slots=self.slots,
            block_tables=self.tables,
            inv_freq=self.inv_freq,
            num_heads=self._num_heads,
            scale=self._scale,
            scratch=self.scratch,
            early=True,
            share=self._share,
        )


def _random_pages(case: Case, count: int, generator: torch.Generator) -> KVPages:
    import torch

    from tilewright.compiler.targets.cuda.state.pages import KVPages

    _, num_kv_heads, head_dim = HEADS[case.heads]
    shape, device = (count, 2, num_kv_heads, PAGE, head_dim), generator.device
    if case.kind == "bf16":
        values = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return KVPages(values.normal_(generator=generator))
    blocks = (*shape[:-1], head_dim // BLOCK)
    return KVPages(
        torch.randint(-127, 128, shape, device=device, dtype=torch.int8, generator=generator),
        torch.randint(124, 128, blocks, device=device, dtype=torch.uint8, generator=generator),
    )


def measure(case: Case, generator: torch.Generator) -> float:
    """Microseconds of a launch in a captured chain: the median of its replays."""
    launches = Launches(case, generator)
    count = max(case.num_caches, _LEAST_LAUNCHES)
    return replayed(launches.run, [index % case.num_caches for index in range(count)])


def show(options: Options, found: Mapping[Case, Sequence[float]]) -> str:
    """The figures of all rounds, a column for what pages hold."""
    kinds = dict.fromkeys(options.formats)
    heads = ["heads", "bits", "reaches", "rows", "position", "table, pages"]
    heads += [f"{kind}, us" for kind in kinds]
    lines: dict[tuple[object, ...], list[str]] = {}
    for case, figures in found.items():
        sizes = case.num_rows, case.position, case.width
        key = case.heads, case.bits, case.reaches, *sizes
        lines.setdefault(key, [*key[:3], *(f"{each:,}" for each in sizes)]).append(
            ", ".join(f"{each:.2f}" for each in figures)
        )
    return Table.of(heads, lines.values()).markdown()


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where nothing can be measured."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.attention_rate",
        description="Measure decode attention on a GPU by itself.",
    )


def _measured(options: Options) -> str:
    cases = choose_cases(options)
    need_gpu()
    import torch

    generator = torch.Generator(device="cuda").manual_seed(7)
    found: dict[Case, list[float]] = {case: [] for case in cases}
    try:
        for _ in range(options.rounds):
            for case, figures in found.items():
                figures.append(measure(case, generator))
    except torch.OutOfMemoryError:
        raise TilewrightError("the caches do not fit this GPU: ask for fewer rows") from None
    return f"{torch.cuda.get_device_name()}, decode attention\n\n{show(options, found)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
