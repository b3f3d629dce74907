"""Which Tenstorrent boards run a model, in which configuration: memory, speed, accuracy.

Speed is predicted, accuracy is emulated. Prices are left to the user.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tilewright.compiler.devices import BOARDS, get_device
from tilewright.compiler.driver import (
    CompilableModel,
    compile_model,
    lower_model,
    resolve_precision,
)
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent import BoardTarget
from tilewright.compiler.targets.tenstorrent.perf.model import predict
from tilewright.compiler.targets.tenstorrent.program.memory_plan import run_memory
from tilewright.errors import CompileError, ConfigError, allowed
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.stats import wilson_interval
from tilewright.evaluate.tracing.settings import prefill_logits

_OF_ONE_CHIP = {"wormhole": "n150", "blackhole": "p150"}
COLUMNS = (
    *("board", "chips", "precision", "memory a chip (GB)", "decode, predicted (t/s/u)"),
    *("first token, predicted (ms)", "top-1, emulated (%)", "refused because"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requested sizes: concurrent users, positions per user, prompt tokens."""

    users: int = 1
    context: int = 2048
    prompt: int = 128


@dataclass(frozen=True, slots=True)
class BoardAccuracy:
    """Emulated top-1 and top-5 on a single chip, with the 95 % interval of top-1."""

    top1: float
    top5: float
    interval: tuple[float, float]
    positions: int
    layers: int
    all_layers: int

    @property
    def is_estimate(self) -> bool:
        """Return whether a shallow copy was emulated."""
        return self.layers < self.all_layers


@dataclass(frozen=True, slots=True)
class BoardCandidate:
    """A board with a configuration. Errors are shares. ``refused``: the reason, else empty."""

    board: str
    chips: int
    precision: str
    chip_bytes: int | None = None
    tsu: float | None = None
    tsu_error: float | None = None
    ttft_ms: float | None = None
    ttft_error: float | None = None
    accuracy: BoardAccuracy | None = None
    refused: str = ""


def compare_boards(
    model: CompilableModel,
    precisions: Sequence[PrecisionConfig],
    boards: Sequence[str],
    size: Workload,
    progress: Progress,
) -> list[BoardCandidate]:
    """Return a candidate for each board and configuration, fastest first, refused rows last.

    Raises:
        CompileError: if no board fits. The message is of the board that lacks the fewest bytes.
    """
    rows = []
    for precision in precisions:
        target = get_target(boards[0])
        resolved = resolve_precision(model, precision)
        graph, _ = lower_model(
            model, resolved, target.stages(), progress, block_axis=target.block_axis
        )
        rows += [_candidate(graph, board, precision.name, size) for board in boards]
    if all(candidate.refused for candidate in rows):
        nearest = min(rows, key=_missing_bytes)
        raise CompileError(f"{model.name}: {nearest.board}: {nearest.refused}")
    return sorted(rows, key=lambda candidate: -(candidate.tsu or 0.0))


def _missing_bytes(candidate: BoardCandidate) -> float:
    result = re.search(r"exceeded by (\d+) bytes", candidate.refused)
    return float(result[1]) if result else math.inf


def _candidate(graph: Any, board: str, precision: str, size: Workload) -> BoardCandidate:
    target, device = get_target(board), get_device(board)
    assert isinstance(target, BoardTarget)
    candidate = BoardCandidate(board, device.num_chips, precision)
    options = CompileOptions(max_batch=size.users, max_context=size.context)
    try:
        prefill, decode = target.programs(graph, options, length=size.prompt)
    except CompileError as error:
        return dataclasses.replace(candidate, refused=str(error))
    result = predict(prefill, decode, num_generated=max(1, size.context - size.prompt))
    return dataclasses.replace(
        candidate,
        chip_bytes=run_memory(prefill, decode).dram_bytes,
        tsu=result.decode_tsu,
        tsu_error=result.decode_error,
        ttft_ms=result.ttft_ms,
        ttft_error=result.ttft_error,
    )


def with_accuracy(
    rows: Sequence[BoardCandidate],
    model: CompilableModel,
    precisions: Mapping[str, PrecisionConfig],
    tokens: Sequence[int],
    layers: int,
    progress: Progress,
) -> list[BoardCandidate]:
    """Add emulated accuracy to the rows, for a copy with the first ``layers`` layers (0: all).

    A single chip is emulated once for each architecture and configuration.
    """
    copy = shallow_copy(model, layers)
    options = CompileOptions(max_context=len(tokens))
    of_reference = load_precision("reference")
    best = _best_five(copy, of_reference, "reference", tokens, options, progress)
    known: dict[tuple[str, str], BoardAccuracy] = {}
    result = []
    for candidate in rows:
        key = _OF_ONE_CHIP[get_device(candidate.board).architecture], candidate.precision
        if not candidate.refused and key not in known:
            precision = precisions[candidate.precision]
            got = _best_five(copy, precision, key[0], tokens, options, progress)[:, :1]
            right, count = int((got == best[:, :1]).sum()), len(tokens)
            top5 = int((got == best).any(dim=-1).sum()) / count
            counts = count, copy.config.num_layers, model.config.num_layers
            known[key] = BoardAccuracy(right / count, top5, wilson_interval(right, count), *counts)
        accuracy = None if candidate.refused else known[key]
        result.append(dataclasses.replace(candidate, accuracy=accuracy))
    return result


def _best_five(
    model: Any,
    precision: PrecisionConfig,
    target: str,
    tokens: Sequence[int],
    options: CompileOptions,
    progress: Progress,
) -> torch.Tensor:
    """Return the likeliest five tokens at each position, in order."""
    compiled = compile_model(model, precision, target=target, options=options, progress=progress)
    logits = prefill_logits(compiled.executable, list(tokens))
    compiled.executable.close()
    return logits.topk(5).indices


def shallow_copy(model: CompilableModel, layers: int) -> Any:
    """Return the model with its first ``layers`` layers; 0: all layers."""
    count = model.config.num_layers
    if not 0 < layers < count:
        return model
    changes: dict[str, Any] = {"num_layers": layers}
    for name in ("windows", "linear_layers"):
        if getattr(model.config, name, ()):
            changes[name] = getattr(model.config, name)[:layers]
    if dense := getattr(model.config, "dense_layers", ()):
        changes["dense_layers"] = tuple(item for item in dense if item < layers)
    config = dataclasses.replace(model.config, **changes)
    with torch.device("meta"):
        module = type(model.module)(config)
    return SimpleNamespace(
        name=model.name, config=config, module=module, checkpoint=model.checkpoint
    )


def read_boards(text: str | None) -> tuple[str, ...]:
    """Read a list of board names separated by commas. None: all boards.

    Raises:
        ConfigError: for an unknown name.
    """
    if text is None:
        return BOARDS
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        if name not in BOARDS:
            raise ConfigError(f"--boards: unknown board {name!r}; {allowed(BOARDS, name)}")
    return names


def markdown_of(rows: Sequence[BoardCandidate]) -> str:
    """Return the rows as Markdown."""
    cells = []
    for candidate in rows:
        memory = "" if candidate.chip_bytes is None else f"{candidate.chip_bytes / 1e9:.2f}"
        speeds = (
            _value(candidate.tsu, candidate.tsu_error, 1),
            _value(candidate.ttft_ms, candidate.ttft_error, 0),
        )
        cells.append(
            (
                *(candidate.board, str(candidate.chips), candidate.precision, memory, *speeds),
                *(_accuracy(candidate.accuracy), candidate.refused.partition(";")[0]),
            )
        )
    return Table.of(COLUMNS, cells).markdown().rstrip("\n")


def _value(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return ""
    bar = "" if error is None else f" ± {value * error:,.{digits}f}"
    return f"{value:,.{digits}f}{bar}"


def _accuracy(result: BoardAccuracy | None) -> str:
    if result is None:
        return ""
    suffix = f", {result.layers} of {result.all_layers} layers" if result.is_estimate else ""
    low, high = (f"{100 * bound:.1f}" for bound in result.interval)
    return f"{100 * result.top1:.1f} ({low}-{high}, {result.positions} positions{suffix})"
