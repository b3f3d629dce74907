"""How long what a hybrid's decode step does beside its experts takes, by the ways that there are.

``python -m bench.cuda.hybrid_rate`` prints two tables of microseconds a launch, of
Qwen3.5-35B-A3B's sizes unless told otherwise, medians of captured chains, each way measured in
turn, twice; the faster turn. One has the delta rule's launch with its state, which the L2 does not
hold, kept by caches and streamed past them, beside ``x *= c`` of as many bytes; the other a
router's product, the product and the choice behind it, and both in one launch, of weights that the
L2 holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.cuda.replays import need_gpu, replayed
from bench.script import run_script
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step as native_delta
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.matmul import dense as native_dense
from tilewright.compiler.targets.cuda.kernels.matmul import linear as native
from tilewright.compiler.targets.cuda.weights.packing import hold
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option

_CHAIN_BYTES = 400_000_000
_ROUTERS = 12  # of 1 MB each
_WIDTH = 4  # of the convolution
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes of a layer, and numbers of rows."""

    rows: tuple[int, ...] = option(
        "of a decode step", default=(1, 4, 8, 16, 24, 32, 64), type=integer(1, 256), metavar="N"
    )
    key_heads: int = option("of the rule", default=16, type=integer(1, 64), metavar="N")
    heads: int = option("of its values", default=32, type=integer(1, 128), metavar="N")
    dim: int = option("channels of a head", default=128, type=integer(64, 128), metavar="N")
    hidden: int = option("columns of a token", default=2048, type=integer(128, 2048), metavar="N")
    experts: int = option("of a layer", default=256, type=integer(1, 256), metavar="N")
    top_k: int = option("of a token", default=8, type=integer(1, 16), metavar="N")


class Rule:
    """Layers of the delta rule, together more than the L2 holds, for steps of some rows."""

    def __init__(self, options: Options, num_rows: int) -> None:
        key_heads, heads, dim, device = options.key_heads, options.heads, options.dim, "cuda"
        channels, inner = (2 * key_heads + heads) * dim, heads * dim
        each = num_rows * inner * dim * 4
        self.layers = range(max(2, -(-_CHAIN_BYTES // each)))
        self._state = [torch.randn(num_rows, heads, dim, dim, device=device) for _ in self.layers]
        self._window = torch.randn(num_rows, channels, _WIDTH - 1, device=device)
        x, self._z = (torch.randn(num_rows, count, device=device) for count in (channels, inner))
        a, b = torch.randn(2, num_rows, heads, device=device)
        a_log, dt_bias = torch.randn(2, heads, device=device)
        self._inputs = DeltaInputs(x, a, b, a_log, dt_bias, key_heads, dim)
        self._norm = torch.ones(dim, device=device), _EPS
        self._weight = torch.randn(channels, _WIDTH, device=device)
        self._positions = torch.full((num_rows,), 5, device=device)
        self._slots = torch.arange(num_rows, device=device)
        self._out = torch.empty(num_rows, inner, dtype=torch.bfloat16, device=device)

    def run(self, layer: int, *, streams: bool) -> None:
        """A step of one layer."""
        native_delta.delta_step(
            self._out, self._inputs, self._z, self._norm, weight=self._weight,
            window=self._window, state=self._state[layer], positions=self._positions,
            slots=self._slots, early=True, streams=streams,
        )  # fmt: skip

    def scale(self, layer: int) -> None:
        """As many bytes, read and written by a plain kernel."""
        self._state[layer].mul_(0.9999)


class Router:
    """Routers of some layers, for steps of some rows."""

    def __init__(self, options: Options, num_rows: int) -> None:
        count, device = options.experts, "cuda"
        dense = torch.randn(_ROUTERS, count + 1, options.hidden, device=device) / 50
        self._held = [hold(each.bfloat16(), "bf16", paired=False) for each in dense]
        self._x = torch.randn(num_rows, options.hidden, device=device).bfloat16()
        self._logits = torch.empty(num_rows, count + 1, device=device)
        self._positions = torch.arange(num_rows, device=device)
        self._weights = torch.empty(num_rows, options.top_k, device=device)
        self._chosen = torch.empty_like(self._weights, dtype=torch.int32)
        self._tiles = native_route.Tiles.empty(num_rows, options.top_k, count, self._x.device)
        self._num_experts = count

    def product(self, layer: int) -> None:
        """The logits of all experts, as steps of more than four rows have them."""
        held = self._held[layer]
        native_dense.linear(self._logits, self._x, held, epilogue=native.STORE)

    def apart(self, layer: int) -> None:
        """The product, and what chooses behind it."""
        self.product(layer)
        native_route.route(
            self._weights, self._chosen, self._logits[:, : self._num_experts], self._positions,
            self._tiles, renormalise=True,
        )  # fmt: skip

    def joined(self, layer: int) -> None:
        """Both in one launch."""
        native_router.router(
            self._weights, self._chosen, self._logits, self._x, self._held[layer],
            self._positions, self._tiles, renormalise=True, num_experts=self._num_experts,
        )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the tables; 2 for a mistake in the arguments, or where there is no GPU."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.hybrid_rate",
        description="Measure the delta rule's launch and routers of decode steps.",
    )


def _measured(options: Options) -> str:
    if options.heads % options.key_heads:
        raise ConfigError(f"--heads {options.heads}; allowed: multiples of {options.key_heads}")
    if options.dim not in native_delta.HEAD_DIMS:
        raise ConfigError(f"--dim {options.dim}; allowed: {native_delta.HEAD_DIMS}")
    if options.hidden % 64:
        raise ConfigError(f"--hidden {options.hidden}; allowed: multiples of 64")
    need_gpu()
    rules, routers = [], []
    for num_rows in options.rows:
        rule = Rule(options, num_rows)
        kept, streamed = (partial(rule.run, streams=streams) for streams in (False, True))
        rules.append([str(num_rows), *_in_turn([kept, streamed, rule.scale], rule.layers)])
        if native_dense.FEW_TOKENS < num_rows <= native_route.MAX_TOKENS:
            router = Router(options, num_rows)
            ways = [router.product, router.apart]
            ways += [router.joined] if num_rows <= native_router.MAX_TOKENS else []
            line = [str(num_rows), *_in_turn(ways, range(_ROUTERS))]
            routers.append([*line, ""][:4])
    heads = ["rows", "rule, state kept", "streamed", "x *= c of as many bytes"]
    text = Table.of(heads, rules).markdown()
    if routers:
        heads = ["rows", "router's product", "and choice, apart", "in one launch"]
        text += "\n\n" + Table.of(heads, routers).markdown()
    return text


def _in_turn(ways: Sequence[Callable[[int], None]], layers: Sequence[int]) -> list[str]:
    """Microseconds of each."""
    turns = [[replayed(each, layers) for each in ways] for _ in range(2)]
    return [decimal(min(pair), 2) for pair in zip(*turns, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
