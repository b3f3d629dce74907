"""Child process for the comparison between an engine.py and the reference in every case, with
times.

``python -m tilewright.evaluate.measure.engine_trial '{...}'`` writes one line of JSON; see `Trial`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import error_of
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    Settings,
    read_settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights
from tilewright.evaluate.measure.engine_calls import Trace, cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Parameters for a trial.

    Attributes:
        engine: Path of the engine. None: time the reference and write its logits to ``expected``.
        repeats: Timed repeats of every case after the first run. 0: time the first run.
        fresh: Create an engine for every repeat, as evaluators do.
    """

    engine: str | None
    config: str
    weights: str
    device: str
    expected: str
    scale: int = 1
    repeats: int = 3
    fresh: bool = False


def load_engine(path: str) -> Any:
    """Return an engine.py module by path, without ``sys.modules``, as evaluators load it."""
    spec = importlib.util.spec_from_file_location("generated_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_trial(asked: Trial) -> dict[str, Any]:
    """Return the maximum error, median seconds and tokens by case, and the seconds for
    creation.
    """
    config = json.loads(Path(asked.config).read_text("utf-8"))
    device = torch.device(asked.device)
    settings = read_settings(config, device)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    make = _maker(asked, config, settings, device)
    begun = time.perf_counter()
    engine = make()
    found: dict[str, Any] = {"create_s": time.perf_counter() - begun, "cases": {}}
    expected = {} if asked.engine is None else torch.load(asked.expected, weights_only=True)
    for name, calls in cases(asked.scale).items():
        trace = Trace(calls, settings.vocab_size, asked.device)
        begun = time.perf_counter()
        logits = [each.cpu() for each in trace.run(engine)]
        seconds = [] if asked.repeats else [time.perf_counter() - begun]
        if asked.engine is None:
            expected[name] = logits
        for _ in range(asked.repeats):
            engine.remove(trace.requests)
            if asked.fresh:
                del engine
                engine = make()
            seconds.append(trace.seconds(engine, wait))
        engine.remove(trace.requests)
        found["cases"][name] = {
            "error": _worst(logits, expected[name]),
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "tokens": trace.num_tokens,
            "decoded": trace.num_decoded,
        }
    if asked.engine is None:
        torch.save(expected, asked.expected)
    return found


def _maker(
    asked: Trial, config: dict[str, Any], settings: Settings, device: torch.device
) -> Callable[[], Any]:
    """Return a function that creates the engine or the reference."""
    if asked.engine is None:
        return partial(Reference, load_weights(asked.weights, settings), settings, device)
    module = load_engine(asked.engine)
    return partial(module.create_engine, config, asked.weights, asked.device)


def _worst(ours: list[Tensor], expected: list[Tensor]) -> float:
    return max(error_of(a, b) for a, b in zip(ours, expected, strict=True))


def command(asked: Trial) -> list[str]:
    """Return the interpreter arguments that run a trial in a child process."""
    return ["-m", __spec__.name, json.dumps(asdict(asked))]


if __name__ == "__main__":
    print(json.dumps(run_trial(Trial(**json.loads(sys.argv[1])))))
