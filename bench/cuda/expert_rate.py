"""How long products with experts take in prompts on a GPU, by tokens, pairs of a tile and tiling.

``python -m bench.cuda.expert_rate`` prints a table of microseconds of one layer's two products, of
Qwen3.5-35B-A3B's experts in bfloat16 unless told otherwise, with experts chosen at random. A figure
is the median of a captured graph's replays over several layers, more than the L2 holds. All have
the same bits: the last column says how many values differ from the first tiling's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cuda.random_experts import random_experts
from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import (
    MANY_PAIRS,
    MOST_PAIRS,
    Tiling,
    expert_linear,
)
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups, group
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option

_NUM_LAYERS = 2
_CHAIN = tuple(range(_NUM_LAYERS)) * 4
TILINGS = (
    (MANY_PAIRS, None),
    (MANY_PAIRS, Tiling(128, 64, 8, 6)),
    (MANY_PAIRS, Tiling(256, 64, 8, 4)),
    (MOST_PAIRS, Tiling(128, 64, 8, 3)),
    (MOST_PAIRS, Tiling(128, 64, 8, 6)),
    (MOST_PAIRS, Tiling(256, 64, 8, 4)),
    (MOST_PAIRS, Tiling(256, 64, 8, 3)),
)
"""Pairs of a tile and the rest of a tiling; None: that which is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes of a layer, and numbers of tokens."""

    tokens: tuple[int, ...] = option(
        "of a prompt", default=(1024, 2048, 4096, 8192), type=integer(1), metavar="N"
    )
    experts: int = option("of a layer", default=256, type=integer(1), metavar="N")
    top_k: int = option("of a token", default=8, type=integer(1), metavar="N")
    hidden: int = option("columns of a token", default=2048, type=integer(16), metavar="N")
    inner: int = option("columns of an expert", default=512, type=integer(16), metavar="N")


class Layers:
    """Weights of some layers of experts, random."""

    def __init__(self, options: Options) -> None:
        self._options = options
        hidden, inner = options.hidden, options.inner
        count, layers = options.experts, range(_NUM_LAYERS)
        self.up = [random_experts(count, (2 * inner, hidden), paired=True) for _ in layers]
        self.down = [random_experts(count, (hidden, inner), paired=False) for _ in layers]

    def measure(
        self, x: Tensor, experts: Tensor, tile_size: int, tiling: Tiling | None
    ) -> tuple[float, float, Tensor]:
        """Microseconds of the first product and of the second, and what came out."""
        options, count = self._options, len(x)
        groups = Groups.empty(experts.numel(), options.experts, tile_size, x.device)
        group(groups, experts)
        inner = torch.empty(count, options.top_k * options.inner, device="cuda").bfloat16()
        out = torch.empty(count, options.top_k * options.hidden, device="cuda").bfloat16()
        how = {"top_k": options.top_k, "tiling": tiling}

        def first(layer: int) -> None:
            expert_linear(inner, x, self.up[layer], groups, swiglu=True, **how)  # type: ignore[arg-type]

        def second(layer: int) -> None:
            expert_linear(out, inner, self.down[layer], groups, **how)  # type: ignore[arg-type]

        return replayed(first, _CHAIN), replayed(second, _CHAIN), out


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where there is no GPU."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.expert_rate",
        description="Measure products with experts in prompts.",
    )


def _measured(options: Options) -> str:
    if options.top_k > options.experts:
        raise ConfigError(f"--top-k {options.top_k}; allowed: up to --experts {options.experts}")
    need_gpu()
    layers, lines = Layers(options), []
    flops = 6 * options.hidden * options.inner * options.top_k
    for count in options.tokens:
        x = torch.randn(count, options.hidden, device="cuda").bfloat16()
        scores = torch.rand(count, options.experts, device="cuda")
        experts = scores.topk(options.top_k).indices.int()
        expected = None
        for tile_size, tiling in TILINGS:
            up, down, out = layers.measure(x, experts, tile_size, tiling)
            expected = out if expected is None else expected
            name = f"{tiling.rows} rows, {tiling.num_stages} steps" if tiling else "as it is"
            rate = decimal(1e-6 * flops * count / (up + down))
            values = f"{int((out != expected).sum()):,}"
            lines.append([f"{count:,}", str(tile_size), name, decimal(up, 1), decimal(down, 1)])
            lines[-1] += [rate, values]
    heads = ["tokens", "pairs of a tile", "tiling", "gate and up", "down", "TFLOP/s"]
    heads.append("other values")
    return Table.of(heads, lines).markdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
