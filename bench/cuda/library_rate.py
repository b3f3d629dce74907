"""What the fastest of the library's algorithms gains over the library's own choice, by product and
number of rows.

``python -m bench.cuda.library_rate`` prints microseconds of each, every product behind an empty
cache and by itself, as :mod:`tilewright.compiler.targets.cuda.fastest` measures them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.script import run_script
from tilewright.compiler.bench.display import decimal
from tilewright.compiler.bench.table import Table
from tilewright.compiler.commands.arguments import integer, option, parse
from tilewright.compiler.errors import TilewrightError

_ROWS = (32, 64, 128, 256, 512, 784, 896, 1024, 2048)
_STORED, _ADDED, _HALVES = "stored", "added", "bf16"
_HEADS = ("product", "what", "rows", "own (us)", "fastest (us)", "own / fastest", "TFLOP/s", "TB/s")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight ``[rows, columns]`` and what becomes of its product: ``stored`` in float32, in
    ``bf16``, or ``added`` to float32.
    """

    name: str
    num_rows: int
    num_columns: int
    what: str


WEIGHTS = (
    Weight("8B qkv", 6144, 4096, _STORED),
    Weight("8B o", 4096, 4096, _ADDED),
    Weight("8B gate and up", 28672, 4096, _HALVES),
    Weight("8B down", 4096, 14336, _ADDED),
    Weight("8B head", 128256, 4096, _STORED),
    Weight("35B-A3B q, k, v, z", 12352, 2048, _STORED),
    Weight("35B-A3B o", 2048, 4096, _ADDED),
)
_MOST_ROWS_OF_HEADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured: all of the weights with all of these."""

    rows: tuple[int, ...] = option(
        "numbers of rows", default=_ROWS, type=integer(1, 1 << 14), metavar="N"
    )


def measure(options: Options) -> Iterator[list[str]]:
    """A line for each weight and number of rows."""
    import torch

    from tilewright.compiler.targets.cuda.fastest import Fastest
    from tilewright.compiler.targets.cuda.library import add_product, store_product

    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device=device).manual_seed(3)
    found = Fastest(device, options.rows)
    for each in WEIGHTS:
        shape = each.num_rows, each.num_columns
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        for num_rows in options.rows:
            if each.num_rows > 1 << 16 and num_rows > _MOST_ROWS_OF_HEADS:
                continue
            x = weight.new_empty(num_rows, each.num_columns).normal_(generator=generator)
            kind = torch.bfloat16 if each.what == _HALVES else torch.float32
            out = torch.zeros(num_rows, each.num_rows, device=device, dtype=kind)
            adds = each.what == _ADDED
            found.run(out, x, weight, add_product if adds else store_product, adds=adds)
            chosen = [*found.found.values()][-1]
            operations = 2 * num_rows * each.num_rows * each.num_columns
            num_bytes = weight.nbytes + x.nbytes + (1 + adds) * out.nbytes
            yield [
                *(each.name, each.what, f"{num_rows:,}"),
                *(decimal(taken, 1) for taken in (chosen.own, chosen.time)),
                decimal(chosen.own / chosen.time, 3),
                decimal(operations / chosen.time / 1e6, 0),
                decimal(num_bytes / chosen.time / 1e6, 2),
            ]


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where nothing can be measured."""
    return run_script(_measured, argv)


def _measured(argv: Sequence[str]) -> str:
    options = parse(
        Options,
        argv,
        prog="python -m bench.cuda.library_rate",
        description="Measure the library's products by its own and by its fastest algorithm.",
    )
    import torch

    if not torch.cuda.is_available():
        raise TilewrightError("no GPU: nothing is measured")
    name = torch.cuda.get_device_name()
    return f"{name}, products of the library\n\n{Table.of(_HEADS, measure(options)).markdown()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
