"""``tilewright compile --emit engine --config FILE``: select the fastest of several engines."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tilewright.errors import CompileError, ConfigError, TilewrightError, one_line
from tilewright.options.arguments import option, parse
from tilewright.utils.child_process import PYTHON, Child

if TYPE_CHECKING:
    from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices, Plan
    from tilewright.evaluate.measure.engine_check import EngineCheck

SECONDS_VARIABLE = "TILEWRIGHT_GENERATE_S"
_SECONDS = {"cuda": 150.0, "cpu": 45.0}
_LARGE = 20_000_000
_SHORTER, _SHORTEST = 4, 8
"""Divisors of prompt lengths on a CPU, the second for models above ``_LARGE`` weights."""

_LEAST = 150.0
"""Minimum seconds for the reference, and for candidates up to the first correct candidate."""

_REPEATS = {"cuda": 5, "cpu": 1}
"""Runs of every case per candidate. The slow reference runs at most once."""

_DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _GenerateEngineArgs:
    emit: str = option("engine: a single Python file", default="engine", choices=("engine",))
    config: str = option("model configuration file", default="target/model_config.json")
    weights: str = option("directory of the weights", default="target/weights")
    output: str = option(
        "directory for engine.py and results.log", "-o", "--output", default="workspace"
    )
    device: str = option(
        "device for checks and timings (default: cuda if a GPU exists)",
        default="auto",
        choices=_DEVICES,
    )
    seconds: float | None = option(
        f"time limit, after which the best engine is written (default: {SECONDS_VARIABLE}, else "
        f"{_SECONDS['cuda']:.0f} s on a GPU and {_SECONDS['cpu']:.0f} s on a CPU)",
        type=float,
    )


def has_options(argv: Sequence[str]) -> bool:
    """Return whether a command line names a configuration file or a weight directory.

    Other command lines of ``tilewright compile`` name a model.
    """
    return any(word.partition("=")[0] in ("--config", "--weights") for word in argv)


def main(argv: list[str]) -> int:
    """Run ``tilewright compile --emit engine`` for a configuration file. Return the exit code."""
    begun = time.monotonic()
    given = parse(
        _GenerateEngineArgs,
        argv,
        prog="tilewright compile --emit engine",
        description="Write the fastest engine.py for a model on this machine.",
    )
    import torch

    has_gpu = torch.cuda.is_available()
    device = ("cuda" if has_gpu else "cpu") if given.device == "auto" else given.device
    if device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda, but torch finds no GPU; allowed here: auto, cpu")
    folder = Path(given.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "results.log").open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    with log, tempfile.TemporaryDirectory(prefix="tilewright-engine-") as scratch:
        search = _EngineSearch(given, device, Path(scratch), begun + _seconds(given, device), log)
        try:
            search.run(folder / "engine.py")
        except TilewrightError as error:
            search.log_line(f"stopped: {error}")  # an evaluator shows the log only
            raise
        except KeyboardInterrupt:
            search.log_line("stopped: interrupted")
            raise
    return 0


def _seconds(given: _GenerateEngineArgs, device: str) -> float:
    text = os.environ.get(SECONDS_VARIABLE)
    name, said = "--seconds", str(given.seconds)
    seconds = given.seconds
    if seconds is None and text:
        name, said = SECONDS_VARIABLE, repr(text)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
    seconds = _SECONDS[device] if seconds is None else seconds
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} {said}; allowed: a number of seconds above 0")
    return seconds


@dataclass(frozen=True, slots=True)
class _EngineCandidate:
    name: str
    plan: Plan
    choices: Choices


@dataclass(slots=True)
class _EngineSearch:
    """Tries candidates in turn, each in a new process, until the deadline."""

    given: _GenerateEngineArgs
    device: str
    scratch: Path
    deadline: float
    log: TextIO
    scale: int = 1
    num_layers: int = 0
    best: _EngineCandidate | None = None
    baseline: dict[str, Any] = field(default_factory=dict)

    def run(self, place: Path) -> None:
        """Write the fastest correct engine to ``place``.

        Raises:
            CompileError: if no candidate is correct.
        """
        from tilewright.utils.files import replace_file

        self._say(f"{_machine(self.device)}; {self.given.config}, {self.given.weights}")
        plans = self._plans()
        found = self._try(self._engine_check(None), least=_LEAST)
        if isinstance(found, str):
            raise CompileError(f"the reference does not run: {found}")
        self.baseline = found["cases"]
        self._say("reference, eager: " + _times(self.baseline))
        best_speed = 0.0
        for candidate in self._candidates(plans):
            text = self._text(candidate)
            speed = self._measure(candidate, text)
            if speed > best_speed:
                self.best, best_speed = candidate, speed
                replace_file(place, text.encode())
            if time.monotonic() > self.deadline:
                self._say("the time is up")
                break
        if self.best is None:
            raise CompileError(
                f"no candidate was correct; {place.with_name('results.log')} says why"
            )
        self._say(f"kept: {self.best.name}, {best_speed:.2f} times the reference; {place}")

    def _plans(self) -> dict[str, Plan]:
        """Return the plan of the model for each list of fusions."""
        from tilewright.compiler.driver import lower_model, resolve_precision
        from tilewright.compiler.precision import load_precision
        from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
        from tilewright.compiler.targets.cuda.lowering import lower_to_program
        from tilewright.compiler.targets.interface.compiled import silent
        from tilewright.compiler.targets.table import get_target
        from tilewright.loading.engine_config import model_of

        settings = self._settings()
        model = model_of(settings)
        resolved = resolve_precision(model, load_precision("reference"))
        found = {}
        for name, without in (("norms inside products", ""), ("norms apart", "fuse_norm_linear")):
            stages = [
                replace(stage, passes=tuple(p for p in stage.passes if p.name != without))
                for stage in get_target("cuda").stages()
            ]
            graph, _ = lower_model(model, resolved, stages, silent)
            found[name] = engine_plan(lower_to_program(graph))
        self.num_layers = settings.num_layers
        return found

    def _settings(self) -> Any:
        """Read the model's settings, and check its weights."""
        import torch

        from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
        from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights

        try:
            config = json.loads(Path(self.given.config).read_text("utf-8"))
            settings = read_settings(config, torch.device(self.device))
        except OSError as error:
            raise ConfigError(f"{self.given.config}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigError(f"{self.given.config}: {one_line(error, 400)}") from None
        try:
            tensors = load_weights(self.given.weights, settings)
        except OSError as error:
            raise ConfigError(f"{self.given.weights}: cannot be read ({error.strerror})") from None
        except ValueError as error:  # the message names the file
            raise ConfigError(one_line(error, 400)) from None
        if self.device == "cpu":
            is_large = sum(each.numel() for each in tensors.values()) > _LARGE
            self.scale = _SHORTEST if is_large else _SHORTER
        return settings

    def _candidates(self, plans: dict[str, Plan]) -> Iterator[_EngineCandidate]:
        """Yield both plans. On a GPU, also yield single changes to the best candidate."""
        from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices

        for name, plan in plans.items():
            yield _EngineCandidate(name, plan, Choices())
        changes: Sequence[dict[str, Any]] = ()
        if self.device == "cuda":
            changes = (
                {"products": "cuda"},
                {"columns": 256},
                {"parts": 8},
                {"columns": 1024},
                {"whole": 1},
                {"keys": 32},
                {"queries": 128},
                {"chained": False},
            )
        for change in changes:
            if (so_far := self.best) is not None:
                said = ", ".join(f"{key} {value}" for key, value in change.items())
                name = f"{so_far.name}, {said}"
                yield _EngineCandidate(name, so_far.plan, replace(so_far.choices, **change))

    def _text(self, candidate: _EngineCandidate) -> str:
        from tilewright.compiler.targets.cuda.engine_generator.write import engine_text

        title = f"the model of {Path(self.given.config).name}, {candidate.name}"
        return engine_text(
            candidate.plan, candidate.choices, title=title, num_layers=self.num_layers
        )

    def _measure(self, candidate: _EngineCandidate, text: str) -> float:
        """Return the speed relative to the reference, 0 if a case is wrong.

        The speed is the geometric mean over the cases.
        """
        path = self.scratch / "engine.py"
        path.write_text(text, encoding="utf-8")
        found = self._try(self._engine_check(str(path)), least=0.0 if self.best else _LEAST)
        if isinstance(found, str):
            self._say(f"{candidate.name}: failed: {found}")
            return 0.0
        worst = max(each["error"] for each in found["cases"].values())
        if not worst <= 1:
            self._say(f"{candidate.name}: wrong: {worst:.2f} times the tolerance")
            return 0.0
        ratios = [
            self.baseline[name]["median_s"] / each["median_s"]
            for name, each in found["cases"].items()
        ]
        speed = math.exp(sum(math.log(each) for each in ratios) / len(ratios))
        said = f"error {worst:.3f} of the tolerance, made in {found['create_s']:.1f} s, "
        self._say(
            f"{candidate.name}: {speed:.2f} times the reference, {said}{_times(found['cases'])}"
        )
        return speed

    def _engine_check(self, engine: str | None) -> EngineCheck:
        from tilewright.evaluate.measure.engine_check import EngineCheck

        return EngineCheck(
            engine=engine,
            config=self.given.config,
            weights=self.given.weights,
            device=self.device,
            expected=str(self.scratch / "expected.pt"),
            scale=self.scale,
            repeats=_REPEATS[self.device] if engine is not None else int(self.device == "cuda"),
        )

    def _try(self, engine_check: EngineCheck, least: float = 0.0) -> dict[str, Any] | str:
        """Return a child process's measurements, or its failure's reason."""
        from tilewright.evaluate.measure.engine_check import command

        left = max(least, self.deadline - time.monotonic())
        quiet = {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads leave a busy machine's cores
        given = [*PYTHON, *command(engine_check)]
        with Child(given, timeout_s=left, environment=quiet, what="a trial") as child:
            ended = child.wait()
            assert ended is not None
            if ended.is_timed_out:
                return f"stopped after {ended.seconds:.0f} s"
            if ended.code:
                return f"{ended.how}: {ended.last}"
            found: dict[str, Any] = json.loads(child.output())
            return found

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self.log_line(line)

    def log_line(self, line: str) -> None:
        """Write a line to the log only."""
        print(time.strftime("%H:%M:%S"), line, file=self.log, flush=True)


def _times(found: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {each['median_s'] * 1e3:.2f} ms, {each['tokens'] / each['median_s']:.0f} t/s"
        for name, each in found.items()
    )


def _machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"
