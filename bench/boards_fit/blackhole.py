"""Published speeds for Blackhole boards as samples for the time model, and their fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.boards_fit import fitting
from bench.boards_fit.programs import Programs, Work
from bench.boards_fit.report import error_bar, markdown, percents, summarize
from tilewright.compiler.devices import get_device
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.tenstorrent.perf.blackhole import (
    BLACKHOLE_START,
    SOFTWARE,
    TRACED,
    TRACED_SINCE,
    BlackholeConstants,
    blackhole_seconds,
    call_seconds,
    prompt_seconds,
)
from tilewright.models.shapes import SHAPES

ROWS = Path(__file__).with_name("blackhole_published.json")
STEP_NAMES = ("cache_bytes_per_s", "ring_factor", *SOFTWARE)
PROMPT_NAMES = (
    *("matmul_factor", "traced_prompt", "tt_prompt", "gemma_prompt"),
    *("host_collective", "prompt_call"),
)

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sized(base: Mapping[str, Any], *sizes: int, **more: Any) -> dict[str, Any]:
    return {**base, **dict(zip(_SIZES, sizes, strict=True)), **more}


_QWEN36 = {
    **_sized(_QWEN3, 5120, 17408, 64, 24, num_key_value_heads=4),
    **{"model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 48},
    "max_position_embeddings": 262144,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-8B-Instruct": SHAPES["llama-3.1-8b"],
    "Llama-3.3-70B-Instruct": SHAPES["llama-3.1-70b"],
    "Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64),
    "gemma-3-12b-it": _sized(_GEMMA3, 3840, 15360, 48, 16, num_key_value_heads=8, head_dim=256),
    "gemma-3-27b-it": _sized(_GEMMA3, 5376, 21504, 62, 32, num_key_value_heads=16, head_dim=128),
    "Qwen3-Coder-30B-A3B": SHAPES["qwen3-30b-a3b"],
    "Qwen3.6-27B": _QWEN36,
    "Qwen3.8-27B": _QWEN36,
}
"""Published models by name."""

DEVICES = {"p150x2": "p300", "p150x4": "qb2", "p300x2": "qb2", "p150x8": "loudbox"}


@dataclass(frozen=True, slots=True)
class BlackholeSample:
    """A published decode step or first token: ``seconds``, and work with its counts.

    ``software``: the generation for a step, the constant for operator starts for a prompt.
    ``generation``: the generation for both.
    """

    id: int
    model: str
    board: str
    batch: int
    context: int
    date: str
    software: str
    generation: str
    seconds: float
    is_decode: bool
    work: Work

    def predict(self, constants: BlackholeConstants) -> float:
        """Return the predicted seconds."""
        seconds_of = blackhole_seconds
        if not self.is_decode:
            seconds_of = partial(prompt_seconds, software=self.generation)
        starts = busy = 0.0
        for work, count in self.work:
            start, moved, computed = seconds_of(work, constants, self.software)
            starts += count * start
            busy += count * max(moved, computed)
        if self.is_decode or self.software == TRACED:
            return starts + busy
        return call_seconds(constants, self.software, self.batch) + max(starts, busy)

    def error(self, constants: BlackholeConstants) -> float:
        """Return predicted over published time, less 1."""
        return self.predict(constants) / self.seconds - 1

    @property
    def group(self) -> tuple[str, str]:
        """Sizes and board. Samples of a group are nearly equal and are left out together."""
        return repr(MODELS[self.model]), DEVICES.get(self.board, self.board)


def read_samples() -> list[BlackholeSample]:
    """Return the published rows: decode steps, then first tokens."""
    programs = Programs()
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    steps = [_sample(record, programs, is_decode=True) for record in rows]
    prompts = [record for record in rows if "first_token_ms" in record]
    return [*steps, *(_sample(record, programs, is_decode=False) for record in prompts)]


def _sample(record: Mapping[str, Any], programs: Programs, *, is_decode: bool) -> BlackholeSample:
    board = DEVICES.get(record["board"], record["board"])
    context = record["isl"] + (record.get("osl", 200) // 2 if is_decode else 0)
    work = programs.work(
        MODELS[record["model"]],
        load_precision(record["precision"]),
        model=record["model"],
        board=board,
        mesh=Mesh(record.get("chips", get_device(board).num_chips)),
        phase="decode" if is_decode else "prefill",
        batch=record["batch"] if is_decode else 1,
        length=1 if is_decode else record["isl"],
        context=context,
    )
    facts = {name: record[name] for name in ("id", "model", "board", "batch", "date")}
    software = record["software"]
    if not is_decode:
        software = _prompts(record)
    seconds = record["step_ms" if is_decode else "first_token_ms"] / 1e3
    return BlackholeSample(
        **facts,
        context=context,
        software=software,
        generation=record["software"],
        seconds=seconds,
        is_decode=is_decode,
        work=work,
    )


def _prompts(record: Mapping[str, Any]) -> str:
    """Return the constant for operator starts in a prompt: by date, then by generation."""
    if record["date"] < TRACED_SINCE:
        return "tt_prompt"
    return SOFTWARE[record["software"]].prompts


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample with its errors in fits without it, and without its group.

    ``group``: None if the fit without the group has no sample of its software.
    """

    sample: BlackholeSample
    error: float
    group: float | None


@dataclass(frozen=True, slots=True)
class BlackholeStudy:
    """Fitted constants and left-out errors."""

    constants: BlackholeConstants
    steps: tuple[LeftOut, ...]
    prompts: tuple[LeftOut, ...]

    def bars(self) -> tuple[float, float]:
        """Return the errors that nine of ten steps and prompts in left-out groups are within."""
        step, prompt = (error_bar(group_errors(left)) for left in (self.steps, self.prompts))
        return step, prompt


def group_errors(left_out: Sequence[LeftOut]) -> list[float]:
    """Return the errors of left-out groups."""
    return [item.group for item in left_out if item.group is not None]


def study_blackhole() -> BlackholeStudy:
    """Fit all rows, and fit again without each sample and without each group."""
    rows = read_samples()
    steps = [sample for sample in rows if sample.is_decode]
    prompts = [sample for sample in rows if not sample.is_decode]
    of_steps = fitting.fit(steps, STEP_NAMES, BLACKHOLE_START)
    return BlackholeStudy(
        fitting.fit(prompts, PROMPT_NAMES, of_steps),
        _left_out(steps, STEP_NAMES, BLACKHOLE_START),
        _left_out(prompts, PROMPT_NAMES, of_steps),
    )


def _left_out(
    samples: Sequence[BlackholeSample], names: Sequence[str], start: BlackholeConstants
) -> tuple[LeftOut, ...]:
    """Return the errors of all samples, except of a software's only sample."""
    single = fitting.held_out(samples, names, lambda sample: sample.id, start)
    group = fitting.held_out(samples, names, lambda sample: sample.group, start)
    counts = Counter(sample.software for sample in samples)
    groups: dict[str, set[tuple[str, str]]] = {}
    for sample in samples:
        groups.setdefault(sample.software, set()).add(sample.group)
    return tuple(
        LeftOut(sample, one, of_group if len(groups[sample.software]) > 1 else None)
        for sample, one, of_group in zip(samples, single, group, strict=True)
        if counts[sample.software] > 1
    )


def blackhole_report(study: BlackholeStudy) -> str:
    """Return Markdown tables with the errors and all rows."""
    lines, summary = [], []
    for what, left_out in (("decode step", study.steps), ("prompt", study.prompts)):
        summary.append(summarize(what, "sample", [item.error for item in left_out]))
        summary.append(summarize(what, "model and board", group_errors(left_out)))
        for item in left_out:
            sample = item.sample
            size = f"{sample.batch} x {sample.context:,}"
            seconds = sample.seconds, sample.predict(study.constants)
            of_group = "-" if item.group is None else percents(item.group)[0]
            errors = *percents(item.error), of_group
            details = (what, size, sample.date, sample.software)
            times = (f"{1e3 * each:.2f}" for each in seconds)
            lines.append((sample.model, sample.board, *details, *times, *errors))
    columns = ("model", "board", "", "users x positions", "date", "software", "published (ms)")
    errors = ("sample out (%)", "model and board out (%)")
    return "\n\n".join(
        [
            "### Blackhole",
            markdown(("figure", "left out", "rows", "median (%)", "worst (%)"), summary),
            markdown((*columns, "fitted (ms)", *errors), lines),
        ]
    )
