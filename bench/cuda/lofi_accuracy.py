"""What FP8 products cost in accuracy, emulated on a CPU: ``python -m bench.cuda.lofi_accuracy``.

A model's windows (those of ``compare-targets``) go through the reference target with the operands
of the cuda target's products: bfloat16 x everywhere, and in the layers whose weight is bfp4 and
whose fidelity is lofi also e4m3. Sums are float32. Every counted position takes the path of a
prompt. What rounds elsewhere on a GPU (its cache, the matrix unit's sums) is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from bench.targets.windows import cut_windows
from tilewright.cli.measure.measure import compile_reference
from tilewright.compiler import ops
from tilewright.compiler.driver import compile_model
from tilewright.compiler.ir.info import info
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.weights.e4m3 import exact_rows, round_rows, values
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import Choosing, Chunk, Open, Seat, Step
from tilewright.compiler.targets.reference import ReferenceExecutable
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, ACCURACY_PREFILL
from tilewright.evaluate.results.record import Paired
from tilewright.evaluate.results.stats import mean_and_error
from tilewright.loading.source import open_source
from tilewright.models import find_model

_PRECISIONS = "performance", "all-bfp4"
_DEFAULT_WAYS = "bf16", "row", "chunk"
_CHUNK = 128
_ROW_MOST = 448.0


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _by_row(x: Tensor) -> Tensor:
    return values(*round_rows(x.bfloat16()))


def _by_largest(x: Tensor) -> Tensor:
    """The usual scale: a row's largest value becomes 448."""
    scales = x.bfloat16().float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / _ROW_MOST
    return (_bf16(x) / scales).to(torch.float8_e4m3fn).float() * scales


def _by_chunk(x: Tensor) -> Tensor:
    """A power of two for every 128 columns of a row."""
    width = x.shape[-1]
    chunks = torch.nn.functional.pad(x, (0, -width % _CHUNK)).view(-1, _CHUNK)
    return _by_row(chunks).view(*x.shape[:-1], -1)[..., :width]


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": _bf16,
    "row": _by_row,
    "largest": _by_largest,
    "chunk": _by_chunk,
}


class _Rounded(fx.Interpreter):
    """A graph whose products read x as the cuda target's do."""

    def __init__(self, graph_module: fx.GraphModule, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__(graph_module)
        self._way = way

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not ops.linear.overload:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        way = self._way if is_lofi(n) else _bf16
        return self.call_function(n.target, (way(args[0]), *args[1:]), kwargs)  # type: ignore[arg-type]


def is_lofi(node: fx.Node) -> bool:
    """Whether a product's weight is bfp4 and its fidelity in prompts lofi."""
    facts, recipe = info(node), info(node.args[1]).recipe  # type: ignore[arg-type]
    is_asked = facts.compute is not None and facts.compute.prefill == "lofi"
    return is_asked and recipe is not None and recipe.format == "bfp4"


def _count_inexact(executable: ReferenceExecutable) -> tuple[int, int]:
    graph = executable.graph_module.graph
    nodes = [each for each in graph.nodes if each.target is ops.linear.overload and is_lofi(each)]
    held = [executable._values[each.args[1].name] for each in nodes]
    return len(held), sum(exact_rows(each) is None for each in held)


def _logits(executable: ReferenceExecutable, tokens: tuple[int, ...]) -> Tensor:
    executable.reset()
    whole = Chunk(Seat(0), 0, tokens[:-1], echoes=True)
    opened = (Open(Seat(0), Choosing()),)
    (part,) = executable.step(Step(prompts=(whole,), edits=opened, want_logits=True)).parts
    assert part.logits is not None
    return part.logits()[ACCURACY_PREFILL - 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda.lofi_accuracy")
    parser.add_argument("--model", default=None)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--precisions", nargs="+", default=_PRECISIONS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=_DEFAULT_WAYS)
    asked = parser.parse_args()
    source = open_source(find_model(asked.model))
    windows = cut_windows(source.tokenizer.encode, asked.windows)
    model = source.checkpoint_model()
    oracle = compile_reference(model, lambda what, done, total: None)
    assert isinstance(oracle, ReferenceExecutable)
    compiled: dict[str, ReferenceExecutable] = {}
    for name in asked.precisions:
        options = CompileOptions(max_context=ACCURACY_CONTEXT)
        made = compile_model(model, load_precision(name), target="reference", options=options)
        assert isinstance(made.executable, ReferenceExecutable)
        compiled[name] = made.executable
        count, inexact = _count_inexact(made.executable)
        print(f"{name}: {count} lofi weights, {inexact} of them not exact in e4m3", flush=True)
    hits: dict[tuple[str, str], list[bool]] = {}
    fives: dict[tuple[str, str], list[bool]] = {}
    divergences: dict[tuple[str, str], list[float]] = {}
    for index, tokens in enumerate(windows):
        truth = _logits(oracle, tokens)
        five, wanted = truth.topk(5).indices, truth.double().log_softmax(-1)
        for name, executable in compiled.items():
            for way in dict.fromkeys(("bf16", *asked.ways)):
                executable._run = _Rounded(executable.graph_module, WAYS[way]).run
                found = _logits(executable, tokens)
                guesses = found.argmax(-1)
                log_p = found.double().log_softmax(-1)
                kl = (wanted.exp() * (wanted - log_p)).sum(-1).clamp(min=0)
                hits.setdefault((name, way), []).extend((guesses == five[:, 0]).tolist())
                among = (five == guesses[:, None]).any(-1).tolist()
                fives.setdefault((name, way), []).extend(among)
                divergences.setdefault((name, way), []).extend(kl.tolist())
        print(f"window {index + 1} of {len(windows)}", flush=True)
        _show(hits, fives, divergences)
    return 0


_Found = dict[tuple[str, str], list[bool]]


def _show(hits: _Found, fives: _Found, divergences: dict[tuple[str, str], list[float]]) -> None:
    """All windows so far, each way beside bfloat16."""
    for (name, way), right in hits.items():
        base = name, "bf16"
        others, kls = hits[base], divergences[name, way]
        paired = Paired.from_hits("bf16", theirs=others, ours=right)
        row = {
            "precision": name,
            "x": way,
            "positions": len(right),
            "top1": 100 * sum(right) / len(right),
            "top5": 100 * sum(fives[name, way]) / len(right),
            "kl": mean_and_error(kls),
            "top1 - bf16, points": _less(right, others),
            "top5 - bf16, points": _less(fives[name, way], fives[base]),
            "kl - bf16": mean_and_error(
                [a - b for a, b in zip(kls, divergences[base], strict=True)]
            ),
            "lost, won, p": [paired.b, paired.c, paired.p],
        }
        print(json.dumps(row), flush=True)


def _less(ours: list[bool], theirs: list[bool]) -> tuple[float | None, ...]:
    """The difference of two shares in points, and its standard error over the positions."""
    points = [100 * (float(a) - float(b)) for a, b in zip(ours, theirs, strict=True)]
    return mean_and_error(points)


if __name__ == "__main__":
    sys.exit(main())
