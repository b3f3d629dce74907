"""Settings restored in turn on a target: KV, activation, fidelity, weights.

A setting is restored in the whole model, in an unusual layer, and in a layer with an unusual head.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mode

import torch
from torch import Tensor

from tilewright.compiler.driver import CompilableModel, compile_model, resolve_precision
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.precision.fragment import Fragment, read_rule
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, Progress
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    OpenSlot,
    PrefillChunk,
    Slot,
    StateUpdate,
    Step,
)
from tilewright.compiler.targets.tenstorrent.executable import EmulatedExecutable
from tilewright.errors import ConfigError
from tilewright.evaluate.tracing.layer_trace import ALL, TraceRow, largest_error
from tilewright.evaluate.tracing.logits import observe
from tilewright.runtime.memory.pages import pages_of

_NEARLY_ALL = 1.1
_UNUSUAL_HEAD = 4.0
"""Minimum error of an unusual head's cached values, relative to the median head of its layer."""
_TINY = 1e-12
_WEIGHTS = ("ff1_3", "ff2", "wqkv", "wo", "lm_head")
_RESTORED: dict[str, tuple[str, dict[str, str]]] = {
    "weights": ("bf16", dict.fromkeys(_WEIGHTS, "bf16")),
    "kv_cache": ("bf16", {"kv_cache": "bf16", "v_cache": "bf16"}),
    "v_cache": ("bf16", {"v_cache": "bf16"}),
    "activation": ("bf16", {"activation": "bf16"}),
    "fidelity": (
        "hifi4",
        dict.fromkeys(("li_ff1_3", "li_ff2", "li_qkv_prefill", "li_o_prefill"), "hifi4"),
    ),
}


def restored(
    precision: PrecisionConfig, settings: dict[str, str], selector: str = "*"
) -> PrecisionConfig:
    """Return a configuration with overriding settings for a selector's layers."""
    formats = {key: value for key, value in settings.items() if not key.startswith("li_")}
    fidelities = {key: value for key, value in settings.items() if key.startswith("li_")}
    rule = read_rule(selector, {"precision": formats, "fidelity": fidelities}, where="trace")
    fragment = Fragment(source="trace", rules=(rule,))
    return dataclasses.replace(precision, fragments=(*precision.fragments, fragment))


def restored_settings(
    model: CompilableModel,
    precision: PrecisionConfig,
    tokens_ST: Tensor,
    target: str,
    original: CompilableModel,
    progress: Progress,
) -> tuple[TraceRow, ...]:
    """Return a row for each setting, largest gain first, on a single prefill.

    Raises:
        CompileError: if the target does not support the model.
    """
    truth = observe(original, "reference", tokens_ST[:1])
    wanted = (truth.hidden @ truth.head.T).log_softmax(-1)

    def score(chosen: PrecisionConfig, subject: CompilableModel) -> _Score:
        options = CompileOptions(max_context=tokens_ST.shape[1])
        compiled = compile_model(subject, chosen, target=target, options=options, progress=progress)
        return _score(compiled.executable, tokens_ST[0].tolist(), wanted)

    base = score(precision, model)
    rows, exceptions = [], [(layer, name, name) for layer, name in unusual_layers(model, precision)]
    for name, (_, settings) in _RESTORED.items():
        subject = original if name == "weights" else model
        try:
            result = score(restored(precision, settings), subject)
        except ConfigError:
            continue  # a model without the group
        rows.append(_compared(ALL, name, name, base, result))
        if name == "kv_cache" and (found := unusual_head(base.heads, result.heads)):
            layer, head = found
            exceptions.append((layer, name, f"{name}, head {head}"))
    for layer, name, label in exceptions:
        result = score(restored(precision, _RESTORED[name][1], str(layer)), model)
        rows.append(_compared(f"layer {layer}", label, name, base, result))
    return tuple(sorted(rows, key=_rank, reverse=True))


@dataclass(frozen=True, slots=True)
class _Score:
    """Accuracy of a run, and its cached values ``[heads, positions, head_dim]`` on boards."""

    kl: float
    right: int
    largest: float
    heads: Mapping[str, Tensor]


def _score(executable: Executable, tokens: list[int], wanted: Tensor) -> _Score:
    logits = prefill_logits(executable, tokens).log_softmax(-1)
    heads: Mapping[str, Tensor] = {}
    if isinstance(executable, EmulatedExecutable):
        heads = executable.cached_heads(Slot(0), len(tokens))
    executable.close()
    kl = (wanted.exp() * (wanted - logits)).sum(-1).mean()
    right = int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    return _Score(float(kl), right, largest_error(logits, wanted), heads)


def _compared(layer: str, label: str, setting: str, base: _Score, result: _Score) -> TraceRow:
    value, _ = _RESTORED[setting]
    gain, flips = base.kl - result.kl, result.right - base.right
    return TraceRow(layer, label, value, kl_gain=gain, flips=flips, largest=result.largest)


def unusual_head(
    cached: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> tuple[int, int] | None:
    """Return layer and index of the head with the most unusual error in cached values.

    None: no head has more than four times the error of its layer's median head.
    """
    worst, found = _UNUSUAL_HEAD, None
    for name, values in cached.items():
        errors = (values - exact[name]).norm(dim=(1, 2)) / exact[name].norm(dim=(1, 2))
        ratio = float(errors.max()) / max(float(errors.median()), _TINY)
        layer = re.search(r"\d+", name)
        if ratio > worst and layer is not None:
            worst, found = ratio, (int(layer[0]), int(errors.argmax()))
    return found


def _rank(row: TraceRow) -> float:
    """Rank a layer before the whole model if the layer has nearly all of the gain."""
    return (row.kl_gain or 0.0) * (1.0 if row.place == ALL else _NEARLY_ALL)


def unusual_layers(
    model: CompilableModel, precision: PrecisionConfig
) -> tuple[tuple[int, str], ...]:
    """Return the layers whose KV format or fidelity is unusual, with the setting."""
    resolved = resolve_precision(model, precision)
    layers = range(model.config.num_layers)
    exceptions = []
    for name in ("kv_cache", "v_cache", "fidelity"):
        values: list[tuple[str, ...]] = []
        for layer in layers:
            if name != "fidelity":
                values.append((resolved.format(name, layer=layer),))
            else:
                groups = _RESTORED[name][1]
                ops = (group.removesuffix("_prefill") for group in groups)
                values.append(tuple(resolved.fidelity(op, "prefill", layer=layer) for op in ops))
        usual = mode(values)
        exceptions += [(layer, name) for layer in layers if values[layer] != usual]
    return tuple(exceptions)


def prefill_logits(executable: Executable, tokens: list[int]) -> Tensor:
    """Return a prefill's logits ``[T, vocabulary]``."""
    executable.reset()
    slot, size = Slot(0), executable.capabilities.page_size
    edits: list[StateUpdate] = [OpenSlot(slot, SamplingParams())]
    if size:
        edits.append(AssignPages(slot, 0, tuple(range(pages_of(len(tokens), size)))))
    chunk = PrefillChunk(slot, 0, tuple(tokens), echoes=True)
    output = executable.step(Step(prompts=(chunk,), edits=tuple(edits), want_logits=True))
    return torch.cat([part.logits() for part in output.parts if part.logits is not None])
