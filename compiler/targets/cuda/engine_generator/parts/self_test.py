"""``python engine.py --self-test``: compare random calls with the reference."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.engine import (
    Engine,
    create_engine,
    read_device,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.family import FAMILY
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    EngineError,
    Settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights

ATOL = RTOL = 1e-2


def random_weights(settings: Settings, seed: int) -> dict[str, Tensor]:
    """Return random weights with the contract's names: N(0, 0.02), norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in settings.shapes().items():
        values = settings.centre(name) + torch.randn(shape, generator=generator) * 0.02
        found[name] = values.half()
    return found


def error_of(ours: Tensor, reference: Tensor) -> float:
    """Return the maximum error relative to the tolerance. Up to 1 is equal."""
    a, b = ours.float().cpu(), reference.float().cpu()
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    worst = (a - b).abs() / (ATOL + RTOL * b.abs())
    return float(worst.max()) if worst.numel() else 0.0


class Operations:
    """Random calls on an engine and a reference, in any order.

    The calls start, replace, decode and remove requests. ``num_undecided``: uncompared rows.
    """

    def __init__(self, settings: Settings, seed: int, *, most: int = 8, longest: int = 48) -> None:
        self._settings, self._random = settings, random.Random(seed)
        self._most, self._longest = most, max(1, min(longest, settings.max_positions // 2))
        self._lengths: dict[int, int] = {}
        self.num_undecided = 0

    def step(self, engine: Any, reference: Any) -> float:
        """Make a call on both, and return its logits' error."""
        chance = self._random.random()
        if chance < 0.1:
            return self._remove(engine, reference)
        alive = [i for i, n in self._lengths.items() if n < self._settings.max_positions]
        if chance < 0.3 or not alive:
            return self._prefill(engine, reference)
        ids = self._some(alive)
        for each in ids:
            self._lengths[each] += 1
        tokens = self._tokens(len(ids))
        ours, theirs = engine.decode(ids, tokens), reference.decode(ids, tokens)
        return self._error(ids, ours, theirs, reference)

    def _prefill(self, engine: Any, reference: Any) -> float:
        ids = self._some(range(2 * self._most))
        lengths = [self._random.randint(1, self._longest) for _ in ids]
        self._lengths |= dict(zip(ids, lengths, strict=True))
        prompts = [self._tokens(length) for length in lengths]
        ours, theirs = engine.prefill(ids, prompts), reference.prefill(ids, prompts)
        return self._error(ids, ours, theirs, reference)

    def _error(self, ids: list[int], ours: Tensor, theirs: Tensor, reference: Any) -> float:
        if error_of(ours, theirs) == float("inf"):
            return float("inf")
        kept = [row for row, request in enumerate(ids) if reference.is_decided(request)]
        self.num_undecided += len(ids) - len(kept)
        return error_of(ours[kept], theirs[kept])

    def _remove(self, engine: Any, reference: Any) -> float:
        ids = self._some(range(2 * self._most))
        for each in ids:
            self._lengths.pop(each, None)
        engine.remove(ids)
        reference.remove(ids)
        return 0.0

    def _some(self, ids: Any) -> list[int]:
        return self._random.sample(list(ids), self._random.randint(1, min(len(ids), self._most)))

    def _tokens(self, count: int) -> Tensor:
        vocab = self._settings.vocab_size
        return torch.tensor([self._random.randrange(vocab) for _ in range(count)])


def compare(
    engine: Engine, reference: Reference, settings: Settings, *, seed: int, operations: int
) -> tuple[float, int]:
    """Return the maximum error of random calls, and the number of uncompared rows."""
    calls = Operations(settings, seed)
    worst = max(calls.step(engine, reference) for _ in range(operations))
    return worst, calls.num_undecided


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check this engine against an eager reference.")
    parser.add_argument("--self-test", action="store_true", required=True)
    parser.add_argument("--config", help="a model_config.json; else a small model is made up")
    parser.add_argument("--weights", help="the folder of its weights; else random ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--operations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        config = json.loads(Path(given.config).read_text()) if given.config else FAMILY.small_config
        if given.operations < 1:
            raise EngineError(f"--operations {given.operations}; allowed: 1 or more")
        worst, num_undecided = _self_test(config, given)
    except (EngineError, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        said = error if isinstance(error, EngineError | OSError) else f"{given.config}: {error}"
        print(f"engine: {said}", file=sys.stderr)
        return 2
    verdict = "ok" if worst <= 1 else "WRONG"
    print(f"{verdict}: {given.operations} calls, worst error {worst:.3f} of the tolerance")
    if num_undecided:
        print(f"not compared: {num_undecided} rows with experts that are all but equal")
    return 0 if worst <= 1 else 1


def _self_test(config: Mapping[str, Any], given: argparse.Namespace) -> tuple[float, int]:
    device = read_device(given.device)
    settings = FAMILY.read_settings(config, device)
    with tempfile.TemporaryDirectory() as made:
        if given.weights is None:
            torch.save(random_weights(settings, given.seed), Path(made) / "model.pt")
        folder = given.weights or made
        engine = create_engine(config, folder, given.device)
        reference = FAMILY.reference(load_weights(folder, settings), settings, device)
        return compare(engine, reference, settings, seed=given.seed, operations=given.operations)
