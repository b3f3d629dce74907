"""How long a layer of experts takes in decode steps of a few rows, by the kernels that there are.

``python -m bench.cuda.few_expert_rate`` prints a table of microseconds of one layer's routing, gate
and up with SwiGLU, and down with the weighted sum, all in one chain and each product by itself, of
Qwen3.5-35B-A3B's experts unless told otherwise. Every layer of a chain has other experts chosen at
random, together more than the L2 holds; a figure is the median of a captured graph's replays. The
last column says how many values differ from the first way's: bits are to be the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.cuda.random_experts import random_experts
from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import experts_few as few_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts.experts import Shared
from tilewright.compiler.targets.cuda.kernels.experts.route import Choice, Tiles
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS
from tilewright.compiler.targets.cuda.weights.packing import hold
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option

_LENGTH = 12
_CHAIN = tuple(range(_LENGTH)) * 2
_REPLAYS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes of a layer, numbers of rows and formats."""

    rows: tuple[int, ...] = option(
        "of a decode step", default=(1, 2, 4), type=integer(1, 64), metavar="N"
    )
    kinds: tuple[str, ...] = option(
        "formats of the weights", default=("bfp8", "bf16"), choices=("bf16", "bfp8", "bfp4")
    )
    experts: int = option("of a layer", default=256, type=integer(1, 256), metavar="N")
    top_k: int = option("of a token", default=8, type=integer(1, 16), metavar="N")
    hidden: int = option("columns of a token", default=2048, type=integer(128, 8192), metavar="N")
    inner: int = option("columns of an expert", default=512, type=integer(128, 1024), metavar="N")


@dataclass(frozen=True, slots=True)
class Way:
    """Steps in flight of a product and of a sum, 0: experts.cu; whether they find experts."""

    linear: int
    sum: int
    is_inside: bool = False

    def __str__(self) -> str:
        if not self.linear and not self.sum:
            return "experts.cu"
        how = f"experts_few.cu, {self.linear} and {self.sum} steps"
        return f"{how}, experts found within" if self.is_inside else how


def ways_of(kind: str, num_rows: int) -> list[Way]:
    """The ways to compare."""
    found = [Way(0, 0)]
    if num_rows <= few_experts.FEW_TOKENS:
        found.append(Way(*few_experts.DEPTHS[kind]))
    if num_rows == 1:
        found.append(Way(*few_experts.DEPTHS[kind], is_inside=True))
    return found


class Step:
    """Weights of a layer, and what some rows of a step have in each layer of the chain."""

    def __init__(self, options: Options, kind: str) -> None:
        self._options = options
        hidden, inner = options.hidden, options.inner
        self.up = random_experts(options.experts, (2 * inner, hidden), kind, paired=True)
        self.down = random_experts(options.experts, (hidden, inner), kind, paired=False)
        dense = torch.randn(2 * inner, hidden, device="cuda") / hidden**0.5
        self.shared_up = hold(dense, kind, paired=True)
        dense = torch.randn(hidden, inner, device="cuda") / inner**0.5
        self.shared_down = hold(dense, kind, paired=False)

    def take(self, num_rows: int) -> None:
        """Rows and logits of steps of so many."""
        options, count = self._options, num_rows
        self.x = torch.randn(count, options.hidden, device="cuda").bfloat16()
        self.logits = torch.randn(_LENGTH, count, options.experts, device="cuda")
        self.gate = torch.randn(count, 1, device="cuda")
        self.positions = torch.zeros(count, dtype=torch.long, device="cuda")
        self.inner = torch.empty(count, options.top_k * options.inner, device="cuda").bfloat16()
        self.shared = torch.empty(count, options.inner, device="cuda").bfloat16()
        self.out = torch.empty(_LENGTH, count, options.hidden, device="cuda")
        self._tiles = [
            Tiles.empty(count, options.top_k, options.experts, self.x.device)
            for _ in range(_LENGTH)
        ]
        self._weights = torch.empty(_LENGTH, count, options.top_k, device="cuda")
        self._chosen = torch.empty_like(self._weights, dtype=torch.int32)

    def route(self, index: int) -> None:
        """The experts of a layer, by the router's kernel."""
        native_route.route(
            self._weights[index], self._chosen[index], self.logits[index], self.positions,
            self._tiles[index], renormalise=True,
        )  # fmt: skip

    def first(self, index: int, way: Way) -> None:
        """Gate and up of a layer."""
        native_experts.expert_linear(
            self.inner, self.x, self.up, self._tiles[index], top_k=self._options.top_k, swiglu=True,
            shared=Shared(self.x, self.shared_up, self.shared), few=way.linear,
            choice=self._choice(index, way),
        )  # fmt: skip

    def second(self, index: int, way: Way) -> None:
        """Down of a layer, and the sum."""
        native_experts.expert_sum(
            self.out[index], self.inner, self.down, self._tiles[index], self._weights[index],
            residual=False, gate=self.gate, shared=Shared(self.shared, self.shared_down),
            few=way.sum, choice=self._choice(index, way),
        )  # fmt: skip

    def layer(self, index: int, way: Way) -> None:
        """All of a layer."""
        if not way.is_inside:
            self.route(index)
        self.first(index, way)
        self.second(index, way)

    def _choice(self, index: int, way: Way) -> Choice | None:
        return Choice(self.logits[index], self.positions, True) if way.is_inside else None

    def num_experts(self) -> float:
        """Different experts of a layer, in the mean: what the router's kernel has chosen."""
        return sum(len(each.unique()) for each in self._chosen) / _LENGTH


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where there is no GPU."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.few_expert_rate",
        description="Measure experts of decode steps of a few rows.",
    )


def _measured(options: Options) -> str:
    for name, count in (("hidden", options.hidden), ("inner", options.inner)):
        if count % TILE_COLUMNS:
            raise ConfigError(f"--{name} {count}; allowed: multiples of {TILE_COLUMNS}")
    if options.top_k > options.experts:
        raise ConfigError(f"--top-k {options.top_k}; allowed: up to --experts {options.experts}")
    need_gpu()
    lines = []
    for kind in options.kinds:
        step = Step(options, kind)
        for num_rows in options.rows:
            step.take(num_rows)
            for index in range(_LENGTH):
                step.route(index)
            lines += [
                [kind, str(num_rows), *line, decimal(step.num_experts(), 1)]
                for line in _lines(step, ways_of(kind, num_rows))
            ]
    heads = ["format", "rows", "kernels", "layer", "gate and up", "down", "other values"]
    return Table.of([*heads, "experts"], lines).markdown()


def _lines(step: Step, ways: Sequence[Way]) -> list[list[str]]:
    """Names and microseconds of some ways, which run in turn, twice; the faster turn of each."""
    times: dict[Way, list[float]] = {}
    differ, expected = {}, torch.empty(0)
    for _ in range(2):
        for way in ways:
            torch.cuda.synchronize()
            found = [_replayed(step.layer, way)]
            out = step.out.clone()
            found += [_replayed(each, way) for each in (step.first, step.second)]
            expected = expected if len(expected) else out
            differ[way] = int((out != expected).sum())
            times[way] = [min(pair) for pair in zip(times.get(way, found), found, strict=True)]
    return [
        [str(way), *(decimal(each, 2) for each in times[way]), f"{differ[way]:,}"] for way in ways
    ]


def _replayed(run: Callable[[int, Way], None], way: Way) -> float:
    return replayed(lambda index: run(index, way), _CHAIN, num_replays=_REPLAYS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
