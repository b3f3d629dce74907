"""Child process for the comparison between an engine.py and the reference in every case, with
times.

``python -m tilewright.evaluate.measure.engine_check '{...}'`` writes one line of JSON; see
`EngineCheck`.
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
from tilewright.evaluate.measure.engine_calls import EngineTrace, cases


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """Parameters for a check.

    Attributes:
        engine: The engine's path. None: time the reference and write its logits to ``expected``.
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


def run_check(engine_check: EngineCheck) -> dict[str, Any]:
    """Return the maximum error, median seconds and tokens by case, and the seconds for
    creation.
    """
    config = json.loads(Path(engine_check.config).read_text("utf-8"))
    device = torch.device(engine_check.device)
    settings = read_settings(config, device)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    make = _maker(engine_check, config, settings, device)
    begun = time.perf_counter()
    engine = make()
    found: dict[str, Any] = {"create_s": time.perf_counter() - begun, "cases": {}}
    expected = (
        {} if engine_check.engine is None else torch.load(engine_check.expected, weights_only=True)
    )
    for name, calls in cases(engine_check.scale).items():
        trace = EngineTrace(calls, settings.vocab_size, engine_check.device)
        begun = time.perf_counter()
        logits = [each.cpu() for each in trace.run(engine)]
        seconds = [] if engine_check.repeats else [time.perf_counter() - begun]
        if engine_check.engine is None:
            expected[name] = logits
        for _ in range(engine_check.repeats):
            engine.remove(trace.requests)
            if engine_check.fresh:
                del engine
                engine = make()
            seconds.append(trace.seconds(engine, wait))
        engine.remove(trace.requests)
        found["cases"][name] = {
            "error": _worst(logits, expected[name]),
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "tokens": trace.num_tokens,
        }
    if engine_check.engine is None:
        torch.save(expected, engine_check.expected)
    return found


def _maker(
    engine_check: EngineCheck, config: dict[str, Any], settings: Settings, device: torch.device
) -> Callable[[], Any]:
    """Return a function that creates the engine or the reference."""
    if engine_check.engine is None:
        return partial(Reference, load_weights(engine_check.weights, settings), settings, device)
    module = load_engine(engine_check.engine)
    return partial(module.create_engine, config, engine_check.weights, engine_check.device)


def _worst(ours: list[Tensor], expected: list[Tensor]) -> float:
    return max(error_of(a, b) for a, b in zip(ours, expected, strict=True))


def command(engine_check: EngineCheck) -> list[str]:
    """Return the interpreter arguments that run a check in a child process."""
    return ["-m", __spec__.name, json.dumps(asdict(engine_check))]


if __name__ == "__main__":
    print(json.dumps(run_check(EngineCheck(**json.loads(sys.argv[1])))))
