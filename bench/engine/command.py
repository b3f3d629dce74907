"""``bench bench-engine``: a generated engine beside eager torch and torch.compile, in one run.

Every figure is a median over repeats on fixed traces; what is slower than a limit is left out.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine import beside
from bench.engine.compiled import CASES, MODES, Asked, command
from bench.engine.config import HIDDEN_LIKE
from bench.engine.measure import errors_of, measure
from bench.in_turn import with_checkout
from tilewright.compiler.devices import check_gpu
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
from tilewright.models.shapes import FORM, parse_shape_name
from tilewright.options.arguments import integer, option, parse, real
from tilewright.utils.child_process import PYTHON, Child
from tilewright.utils.json_lines import check_writable

PARTS = ("eager", "compiled", "operations", "memory")
_BESIDE = "beside the CUDA target"
_NOT_BEGUN = "not begun: the case before it was not ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    engine: str | None = option("the engine.py that is measured", "engine", nargs="?")
    config: str | None = option("a model_config.json (default: 12 layers of 768, heads of 192)")
    device: str = option("cuda or cpu", default="cuda")
    output: str | None = option("a JSON file that every part is written to when it is done")
    parts: tuple[str, ...] = option("what is measured besides ours", default=PARTS, choices=PARTS)
    repeats: int = option("of every case", default=5, type=integer(1, 1000))
    scale: int = option("prompts and answers are shorter by this", default=1, type=integer(1, 16))
    operations: int = option(
        "random calls that are compared for each seed", default=300, type=integer(1)
    )
    seeds: int = option(
        "of weights, each of which is compared on every case", default=3, type=integer(1)
    )
    engines: int = option(
        "that are made one after another for the memory", default=10, type=integer(1)
    )
    mode: str = option(
        "of torch.compile, which is named with its figures", default=MODES[0], choices=MODES
    )
    beside_target: str | None = option(
        "measure decoding beside the CUDA target with the same random weights, and nothing else; "
        "ENGINE is what --emit engine writes of the shape, which is its default",
        group=_BESIDE,
        metavar="shape:NAME",
    )
    users: tuple[int, ...] = option(
        "that are answered at once", default=(1, 32), group=_BESIDE, type=integer(1, 1024)
    )
    prompt_length: int = option(
        "of every user's prompt, in tokens", default=1024, group=_BESIDE, type=integer(1, 1 << 20)
    )
    tokens: int = option(
        "that each user is answered",
        default=100,
        group=_BESIDE,
        type=integer(beside.FEWEST_TOKENS, 1 << 20),
    )
    rounds: int = option(
        "of the target and the file in turn", default=2, group=_BESIDE, type=integer(1, 100)
    )
    compiled_seconds: float = option(
        "that all cases of torch.compile have together; what is not done by then is said",
        default=150.0,
        type=real(0, 86400, above=True),
    )


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-engine`` with the arguments behind it; returns the exit code.

    Raises:
        ConfigError: where no engine is named, or an argument, the configuration or the engine's
            file cannot be read.
    """
    given = parse(
        _Arguments, argv, prog="python -m bench bench-engine", description="An engine beside torch."
    )
    if given.output:
        check_writable(Path(given.output))
    if given.beside_target is not None:
        return _beside_target(given, given.beside_target)
    if given.engine is None:
        raise ConfigError("no engine; allowed: python -m bench bench-engine engine.py")
    config = _read_config(given.config) if given.config else HIDDEN_LIKE
    settings, module = _read_settings(config, given.device), _open_engine(given.engine)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(random_weights(settings, 0), Path(folder) / "model.pt")
        return _Measured(given, config, folder, settings, module).run()


def _beside_target(given: _Arguments, named: str) -> int:
    """Measure a shape's file and the target in turn."""
    shape, device = parse_shape_name(named), given.device
    if shape is None:
        raise ConfigError(f"--beside-target {named!r}; allowed: {FORM}")
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"--device {device!r}; allowed beside a target: cuda, cpu")
    if device == "cuda":
        check_gpu()
    with tempfile.TemporaryDirectory() as folder:
        file = beside.Side(
            engine=given.engine or str(beside.write_engine(shape.name, Path(folder))),
            shape=shape.name,
            device=device,
            users=given.users,
            prompt_length=given.prompt_length,
            tokens=given.tokens,
            repeats=given.repeats,
        )
        sides = {beside.TARGET: replace(file, engine=None), beside.FILE: file}
        beside.compare(sides, rounds=given.rounds, keep=partial(_write, given.output))
    return 0


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
            f"{path}: of a mixture of experts; allowed: of Llama's form, or any with "
            "--beside-target (python engine.py --self-test compares a mixture's logits)"
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

    def _compiled(self) -> dict[str, Any]:
        """Case by case in one child, which is stopped when the time is up; those that compile least
        come first, and what was measured by then is kept.
        """
        config = Path(self.folder) / "model_config.json"
        config.write_text(json.dumps(self.config), "utf-8")
        found: dict[str, Any] = {"mode": self.given.mode}
        self.found["compiled"] = found
        asked = Asked(
            config=str(config),
            weights=self.folder,
            device=self.given.device,
            mode=self.given.mode,
            scale=self.given.scale,
            repeats=self.given.repeats,
        )
        for case, each in _in_child(asked, self.given.compiled_seconds):
            found[case] = each
            _write(self.given.output, self.found)
        return found

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


def _in_child(asked: Asked, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case and what a child measured of it, or why it did not."""
    given, missing = [*PYTHON, *command(asked)], [*CASES]
    with Child(
        given, timeout_s=seconds, environment=with_checkout(), has_pipes=True, what="the cases"
    ) as child:
        while line := child.read_line():
            case, found = json.loads(line)
            missing.remove(case)
            yield case, found
        ended = child.wait()
    assert ended is not None
    why = f"{ended.how}: {ended.last}"[:2000]
    if ended.is_timed_out:
        why = f"not compiled and measured in {seconds:.1f} s; last said: {ended.last or 'nothing'}"
    for case in missing:
        yield case, {"failed": why}
        why = _NOT_BEGUN


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
