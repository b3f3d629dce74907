"""``python -m bench bench-engine``: a generated engine and eager torch, in one run.

Figures are medians over repeats of fixed traces. A failed part does not stop the other parts.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.measure import HIDDEN_LIKE, errors_of, measure
from tilewright.compiler.targets.cuda.engine_generator.cases import Trace, cases
from tilewright.compiler.targets.cuda.engine_generator.parts.engine import Engine, read_device
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import (
    compare,
    random_weights,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    EngineError,
    Settings,
    read_settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.torch_steps import TorchExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights
from tilewright.compiler.targets.cuda.engine_generator.trial import load_engine
from tilewright.errors import ConfigError, one_line
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.json_lines import check_writable

PARTS = ("eager", "operations", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    engine: str | None = option("engine.py to measure", "engine", nargs="?")
    config: str | None = option("a model_config.json (default: 12 layers of 768, heads of 192)")
    device: str = option("cuda or cpu", default="cuda")
    output: str | None = option("JSON file, written after every part")
    parts: tuple[str, ...] = option("measured parts after the engine", default=PARTS, choices=PARTS)
    repeats: int = option("of every case", default=5, type=integer(1, 1000))
    scale: int = option("divide prompt and answer lengths", default=1, type=integer(1, 16))
    operations: int = option("random calls to compare for each seed", default=300, type=integer(1))
    seeds: int = option("seeds of weights to compare", default=3, type=integer(1))
    engines: int = option("engines to create for the memory", default=10, type=integer(1))


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-engine`` and return the exit code.

    Raises:
        ConfigError: for a missing or malformed engine, configuration or argument.
    """
    words = "Measure a generated engine and eager torch."
    given = parse(_Arguments, argv, prog="python -m bench bench-engine", description=words)
    if given.output:
        check_writable(Path(given.output))
    if given.engine is None:
        raise ConfigError("no engine; allowed: python -m bench bench-engine engine.py")
    config = _read_config(given.config) if given.config else HIDDEN_LIKE
    settings, module = _read_settings(config, given.device), _open_engine(given.engine)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(random_weights(settings, 0), Path(folder) / "model.pt")
        return _Measured(given, config, folder, settings, module).run()


def _write(output: str | None, found: dict[str, Any]) -> None:
    if output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def _read_config(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: no JSON object")
    return found


def _read_settings(config: dict[str, Any], device: str) -> Settings:
    try:
        place = read_device(device)
        settings = read_settings(config, place)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"--device {device}; GPUs that torch finds here: {count}; allowed: one, or cpu"
        )
    return settings


def _open_engine(path: str) -> Any:
    """The module of an engine.py.

    Raises:
        ConfigError: for what is none.
    """
    try:
        module = load_engine(path)
    except Exception as error:  # whatever a file does that is no engine
        raise ConfigError(f"{path}: {one_line(error)}; allowed: a generated engine.py") from None
    if not hasattr(module, "FAMILY"):
        raise ConfigError(f"{path}: no model's FAMILY; allowed: a generated engine.py")
    if hasattr(module, "HybridSettings"):
        raise ConfigError(
            f"{path}: of a mixture of experts; allowed: of Llama's form "
            "(python engine.py --self-test compares a mixture's logits)"
        )
    return module


class _Measured:
    """The parts, each of which may fail without the others."""

    def __init__(
        self,
        given: _Arguments,
        config: dict[str, Any],
        folder: str,
        settings: Settings,
        module: Any,
    ) -> None:
        self.given, self.config, self.folder, self.settings = given, config, folder, settings
        self.device = torch.device(given.device)
        self.found: dict[str, Any] = {"config": config, "torch": torch.__version__}
        if self.device.type == "cuda":
            self.found["device"] = torch.cuda.get_device_name(self.device)
        self.module = module
        self.tensors = load_weights(folder, settings)
        self.reference = Reference(self.tensors, settings, self.device)

    def run(self) -> int:
        for name in ("ours", *self.given.parts):
            begun = time.perf_counter()
            try:
                self.found[name] = getattr(self, f"_{name}")()
            except Exception as error:  # the other parts are still worth their time
                self.found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            self.found[f"{name}_s"] = round(time.perf_counter() - begun, 1)
            _write(self.given.output, self.found)
            print(f"{name}: {json.dumps(self.found[name])}", flush=True)
        return int("failed" in self.found["ours"])

    def _make(self) -> Any:
        return self.module.create_engine(self.config, self.folder, self.given.device)

    def _ours(self) -> dict[str, Any]:
        begun = time.perf_counter()
        engine = self._make()
        created = time.perf_counter() - begun
        begun = time.perf_counter()
        del engine
        engine = self._make()
        again = time.perf_counter() - begun
        return {"create_s": created, "create_again_s": again, "cases": self._cases(engine)}

    def _eager(self) -> dict[str, Any]:
        """The cases in eager torch with a cache, and once by the reference as it stands, which is
        slow.
        """
        cached = Engine(TorchExecutor(self.tensors, self.settings, self.device), self.settings)
        plain = self._cases(self.reference, repeats=1)
        return {"with a cache": self._cases(cached), "reference": plain}

    def _cases(self, engine: Any, repeats: int | None = None) -> dict[str, Any]:
        count = repeats or self.given.repeats
        return measure(engine, self.reference, scale=self.given.scale, repeats=count)

    def _operations(self) -> dict[str, Any]:
        """Every case and random calls, compared; for each seed of weights."""
        in_cases, in_calls = list[float](), list[float]()
        for seed in range(self.given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                torch.save(random_weights(self.settings, seed), Path(folder) / "model.pt")
                engine = self.module.create_engine(self.config, folder, self.given.device)
                reference = Reference(
                    load_weights(folder, self.settings), self.settings, self.device
                )
                errors = errors_of(engine, reference, scale=self.given.scale, seed=seed)
                in_cases.append(max(errors.values()))
                count = self.given.operations
                found = compare(engine, reference, self.settings, seed=seed, operations=count)
                in_calls.append(found[0])
                del engine, reference
        return {"calls": self.given.operations, "worst": in_calls, "worst_of_cases": in_cases}

    def _memory(self) -> dict[str, Any]:
        """Bytes allocated after `remove` of all, and after each engine is gone."""
        trace = Trace(cases(self.given.scale)["mixed"], self.settings.vocab_size, self.given.device)
        self._make().remove([])
        used = [_allocated()]
        removed = []
        for _ in range(self.given.engines):
            engine = self._make()
            before = _allocated()
            trace.run(engine)
            engine.remove(trace.requests)
            removed.append(_allocated() - before)
            del engine
            used.append(_allocated())
        return {"after_remove": removed, "after_del": [each - used[0] for each in used[1:]]}


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
