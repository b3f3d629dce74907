"""How long products with weights whose rows lie as they are take on a GPU, by shape and way.

``python -m bench.cuda.dense_rate`` prints a table of microseconds: of the ways that `native_dense`
has, of SwiGLU `native_many` (the one that is chosen has a star), of the kernels of few tokens, and
of the library with all that is fused behind it here. ``--kinds e4m3``: of codes, x rounded before.
Launches are chained in a captured graph over weights of several times the L2; a figure is the
median of its replays. Random values; knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cuda.product_tables import read_shape, table_of
from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.elementwise.swiglu import swiglu
from tilewright.compiler.targets.cuda.kernels.matmul import dense as native_dense
from tilewright.compiler.targets.cuda.kernels.matmul import dense_many as native_many
from tilewright.compiler.targets.cuda.kernels.matmul import linear as native
from tilewright.compiler.targets.cuda.kernels.matmul.dense import Codes, Way
from tilewright.compiler.targets.cuda.kernels.matmul.e4m3 import round_rows, scale_rows
from tilewright.compiler.targets.cuda.steps.cublas import (
    add_product,
    codes_product,
    scaled_product,
    store_product,
)
from tilewright.compiler.targets.cuda.weights.e4m3 import exact_rows
from tilewright.compiler.targets.cuda.weights.packed_weight import HeldWeight
from tilewright.compiler.targets.cuda.weights.packing import hold
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import decimal
from tilewright.options.arguments import integer, option

CHAIN_BYTES = 1_000_000_000
EPILOGUES = {"store": native.STORE, "add": native.ADD, "swiglu": native.SWIGLU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured: all of these with each other."""

    shapes: tuple[str, ...] = option(
        "rows x columns of weights, and what becomes of the product",
        default=("28672x4096:swiglu", "4096x14336:add", "6144x4096:store", "4096x4096:add"),
        metavar="NxK:END",
    )
    kinds: tuple[str, ...] = option("operands", default=("bf16",), choices=("bf16", "e4m3"))
    tokens: tuple[int, ...] = option(
        "rows of x",
        default=(16, 32, 64, 128),
        type=integer(1, native_many.MAX_TOKENS),
        metavar="N",
    )


def ways_of(held: HeldWeight, kind: str, count: int) -> Iterator[Way]:
    """Those that there are kernels for, whose blocks are on the device at once or walk on."""
    processors = num_processors(held.data.device)
    for of, eights, groups in native_dense.MADE:
        tiles = -(-held.num_rows // (64 * groups))
        for resident, slices in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 8)):
            way = Way(eights, groups, slices, resident)
            is_one_turn = slices == 1 or tiles * slices <= resident * processors
            fits = count <= 8 * eights <= max(32, 2 * count) and way.depth > 1
            if of == kind and fits and is_one_turn:
                yield way


class Products:
    """Weights of one shape and kind, several times the L2, and the products with them."""

    def __init__(self, num_rows: int, num_columns: int, kind: str, end: str) -> None:
        self.is_codes, self.end, self.is_paired = kind == "e4m3", end, end == "swiglu"
        size = num_rows, num_columns
        self._one = torch.ones((), device="cuda")
        if self.is_codes:
            exact = exact_rows(torch.randint(-7, 8, size, device="cuda").float() / 256)
            assert exact is not None
            each = num_rows * num_columns
            self._codes = [(exact[0].clone(), exact[1]) for _ in range(max(2, CHAIN_BYTES // each))]
            self.held = [HeldWeight("bfp4", *size, torch.empty(0, device="cuda"), self.is_paired)]
            self.chain = range(len(self._codes))
            return
        dense = (0.02 * torch.randn(size, device="cuda")).bfloat16()
        count = max(2, CHAIN_BYTES // dense.nbytes)
        self.held = [hold(dense, "bf16", paired=self.is_paired) for _ in range(count)]
        self.chain = range(count)

    def operands(self, count: int) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """Where a product of so many tokens goes, and x, or its codes."""
        rows, columns = self.held[0].num_rows, self.held[0].num_columns
        width, kind = (rows // 2, torch.bfloat16) if self.is_paired else (rows, torch.float32)
        x = torch.randn(count, columns, device="cuda").bfloat16()
        out = torch.zeros(count, width, dtype=kind, device="cuda")
        return out, round_rows(x) if self.is_codes else x

    def by_way(
        self, out: Tensor, x: Tensor | tuple[Tensor, Tensor], way: Way
    ) -> Callable[[int], None]:
        """A product by `dense.cu`."""
        end = EPILOGUES[self.end]

        def run(index: int) -> None:
            if isinstance(x, Tensor):
                native_dense.linear(out, x, self.held[index], epilogue=end, way=way)
            else:
                codes = Codes(*self._codes[index], *x)
                native_dense.linear(out, codes, self.held[0], epilogue=end, way=way)

        return run

    def of_many(self, out: Tensor, x: Tensor, way: native_many.Way) -> Callable[[int], None]:
        """SwiGLU by `dense_many.cu`."""
        return lambda index: native_many.swiglu(
            out, x, self.held[index].data, self.held[index], way=way
        )

    def few(self, out: Tensor, x: Tensor) -> Callable[[int], None]:
        """One by the kernels of few tokens."""
        end, count = EPILOGUES[self.end], len(x)
        return lambda index: native.linear(out, x, self.held[index], epilogue=end, num_tokens=count)

    def library(self, out: Tensor, x: Tensor | tuple[Tensor, Tensor]) -> Callable[[int], None]:
        """The library's, with what is fused behind ours."""

        def of_codes(index: int) -> None:
            assert isinstance(x, tuple)
            weight, scales = self._codes[index]
            if self.is_paired:
                swiglu(out, scaled_product(x, (weight, scales)), paired=True)
            else:
                found = codes_product(x[0], weight, self._one)
                scale_rows(out, found, x[1], scales, adds=self.end == "add")

        def of_values(index: int) -> None:
            assert isinstance(x, Tensor)
            weight = self.held[index].data[: self.held[index].num_rows]
            if self.is_paired:
                swiglu(out, torch.mm(x, weight.T), paired=True)
            else:
                (add_product if self.end == "add" else store_product)(out, x, weight)

        return of_codes if self.is_codes else of_values


def measure(text: str, kind: str, counts: Sequence[int]) -> Iterator[list[str]]:
    """Lines of the table: a way, its microseconds by number of tokens."""
    shape, _, end = text.partition(":")
    products = Products(*read_shape(shape), kind, end)
    sizes = {count: products.operands(count) for count in counts}
    held = products.held[0]
    lines: dict[str, dict[int, str]] = {}
    for count, (out, x) in sizes.items():
        is_many, chosen = _is_many(products, count), None
        if count <= native_dense.MAX_TOKENS and not is_many:
            chosen = native_dense.choose_way(held, count, is_codes=products.is_codes)
        for way in ways_of(held, kind, count):
            star = " *" if way == chosen else ""
            figure = replayed(products.by_way(out, x, way), products.chain)
            name = f"{way.kernel(kind)}, {way.slices} slices, {way.resident} a multiprocessor"
            lines.setdefault(name, {})[count] = decimal(figure, 1) + star
        if isinstance(x, Tensor) and end == "swiglu" and count >= native_many.LEAST_TOKENS:
            for name, cell in _of_many(products, out, x, is_chosen=is_many):
                lines.setdefault(name, {})[count] = cell
        figure = replayed(products.library(out, x), products.chain)
        lines.setdefault("library", {})[count] = decimal(figure, 1)
        if isinstance(x, Tensor) and count <= native.most_tokens(held):
            figure = replayed(products.few(out, x), products.chain)
            lines.setdefault("few tokens", {})[count] = decimal(figure, 1)
    for name, cells in lines.items():
        yield [text, kind, name, *(cells.get(count, "") for count in counts)]


def _is_many(products: Products, count: int) -> bool:
    """Whether `dense_many.cu` takes a product of so many tokens."""
    held, is_swiglu = products.held[0], products.end == "swiglu" and not products.is_codes
    processors = num_processors(held.data.device)
    return is_swiglu and native_many.takes(held.num_rows, count, processors)


def _of_many(
    products: Products, out: Tensor, x: Tensor, *, is_chosen: bool
) -> Iterator[tuple[str, str]]:
    """Blocks of each form and size: a name, and microseconds."""
    sizes = products.held[0].num_rows, len(x), num_processors(x.device)
    chosen = native_many.choose_way(*sizes) if is_chosen else None
    for turned, eights in native_many.MADE:
        way = native_many.way_of(eights, *sizes, turned=turned)
        figure = replayed(products.of_many(out, x, way), products.chain)
        yield way.kernel, decimal(figure, 1) + (" *" if way == chosen else "")


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where there is no GPU."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.dense_rate",
        description="Measure products with weights whose rows lie as they are.",
    )


def _measured(options: Options) -> str:
    for text in options.shapes:
        shape, _, end = text.partition(":")
        read_shape(shape)
        if end not in EPILOGUES:
            raise ConfigError(f"--shapes {text!r}: {end!r}; {allowed(EPILOGUES)}")
    need_gpu()
    return table_of(measure, "operands", options.shapes, options.kinds, options.tokens)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
