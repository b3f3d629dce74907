"""How long products with weights in blocks take on a GPU, by shape, number of tokens and way.

``python -m bench.cuda.wide_rate`` prints a table of microseconds: of the ways that `native_wide`
has for many tokens (the one it chooses has a star), of dequantising the weight for the library, and
of the library alone, on values that are held. Launches are chained in a captured graph over weights
of several times the L2; a figure is the median of its replays. Random values; knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cuda.product_tables import read_shape, table_of
from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.compiler.targets.cuda.kernels.matmul import linear as native
from tilewright.compiler.targets.cuda.kernels.matmul import wide as native_wide
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import dequantise
from tilewright.compiler.targets.cuda.steps.cublas import store_product
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES, HeldWeight
from tilewright.compiler.targets.cuda.weights.packing import hold
from tilewright.evaluate.report.display import decimal
from tilewright.options.arguments import integer, option

CHAIN_BYTES = 240_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured: all of these with each other."""

    shapes: tuple[str, ...] = option(
        "rows x columns of weights",
        default=("8192x28672", "8192x8192", "10240x8192", "28672x4096", "4096x14336"),
        metavar="NxK",
    )
    kinds: tuple[str, ...] = option("formats", default=("bfp8",), choices=tuple(TILE_BYTES))
    tokens: tuple[int, ...] = option(
        "rows of x",
        default=(128, 192, 256, 384, 512),
        type=integer(17, native_wide.MAX_TOKENS),
        metavar="N",
    )


def ways_of(held: HeldWeight) -> Iterator[native_wide.Way]:
    """The ways of a weight's own K, and for one that is cut those of a whole K."""
    is_cut = native.num_slices(held) > 1
    for eights, groups in native_wide.WAYS["cut"] if is_cut else ():
        yield native_wide.Way(eights, groups, 3 if groups == 1 else 1)
    for eights, groups in native_wide.WAYS["wide"]:
        for resident in (1, 2) if eights <= 16 else (1,):
            yield native_wide.Way(eights, groups, resident, is_whole=True)


class Products:
    """Weights of one shape and format, several times the L2, and the products with them."""

    def __init__(self, num_rows: int, num_columns: int, kind: str) -> None:
        generator = torch.Generator(device="cuda").manual_seed(3)
        dense = torch.randn(num_rows, num_columns, device="cuda", generator=generator)
        self.dense = (0.02 * dense).bfloat16()
        first = hold(self.dense, kind, paired=False)
        count = max(2, CHAIN_BYTES // first.data.nbytes)
        self.held = [hold(self.dense, kind, paired=False) for _ in range(count)]
        self._values = torch.empty_like(self.dense)
        self._arranged = native_wide.scratch(num_columns, self.dense.device)

    def ways(self) -> list[native_wide.Way]:
        """Those that there is room for."""
        return [way for way in ways_of(self.held[0]) if way.depth(self.held[0]) > 1]

    def by_way(self, out: Tensor, x: Tensor, way: native_wide.Way) -> float:
        """A product by `wide.cu`, x put in order included."""

        def run(index: int) -> None:
            how = {"epilogue": native.STORE, "arranged": self._arranged, "way": way}
            native_wide.linear(out, x, self.held[index], **how)  # type: ignore[arg-type]

        return replayed(run, range(len(self.held)))

    def dequantised(self, out: Tensor, x: Tensor) -> float:
        """The weight dequantised, and the library."""

        def run(index: int) -> None:
            dequantise(self._values, self.held[index])
            store_product(out, x, self._values)

        return replayed(run, range(len(self.held)))

    def library(self, out: Tensor, x: Tensor) -> float:
        """The library alone, of copies that do not lie in the L2."""
        copies = [self.dense.clone() for _ in range(max(2, CHAIN_BYTES // self.dense.nbytes))]
        return replayed(lambda index: store_product(out, x, copies[index]), range(len(copies)))


def measure(shape: str, kind: str, counts: Sequence[int]) -> Iterator[list[str]]:
    """Lines of the table: a way, its microseconds by number of tokens."""
    num_rows, num_columns = read_shape(shape)
    products = Products(num_rows, num_columns, kind)
    sizes = []
    for count in counts:
        x = torch.randn(count, num_columns, device="cuda").bfloat16()
        sizes.append((torch.empty(count, num_rows, device="cuda"), x))
    for way in products.ways():
        held, cells = products.held[0], []
        for out, x in sizes:
            star = " *" if native_wide.choose_way(held, len(x), same_bits=False) == way else ""
            cells.append(decimal(products.by_way(out, x, way), 1) + star)
        yield [shape, kind, f"{way.kernel(held)}, {way.resident} a multiprocessor", *cells]
    for name, run in (("dequantised", products.dequantised), ("library", products.library)):
        yield [shape, kind, name, *(decimal(run(out, x), 1) for out, x in sizes)]


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where there is no GPU."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.wide_rate",
        description="Measure products with weights in blocks.",
    )


def _measured(options: Options) -> str:
    for shape in options.shapes:
        read_shape(shape)
    need_gpu()
    return table_of(measure, "format", options.shapes, options.kinds, options.tokens)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
