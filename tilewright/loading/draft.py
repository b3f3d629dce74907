"""Draft models and draft layers for speculative decoding: checks and compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.compiler.targets.interface.base import CompileOptions, Executable, Progress
from tilewright.errors import ConfigError
from tilewright.loading.source import ModelHandle
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.runtime.speculative.config import MTP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewright.compiler.targets.interface.compiled import Compiled

_LAYER_TARGETS = ("reference", "cpu-native")
_MAX_SEQS = 8
"""Maximum requests with drafts at a time. Drafts pay for few requests."""


def has_draft_layer(resolved: ResolvedConfig) -> bool:
    """Return whether the draft layer makes drafts."""
    speculative = resolved.config.speculative
    return speculative is not None and speculative.method == MTP


def attach_draft_layer(
    source: ModelHandle,
    resolved: ResolvedConfig,
    compiled: Compiled,
    options: CompileOptions,
    progress: Progress,
) -> None:
    """Compile the draft layer of a model and give it to the model's executable.

    Targets without draft layers do nothing.

    The program cache excludes the layer, with its copies of embedding and head.

    Raises:
        ConfigError: for several ranks or a compiled directory.
        CheckpointError: for a file without a draft layer.
    """
    where = "speculative_config: method mtp"
    if not resolved.grouping.is_alone:
        raise ConfigError(f"{where} with several ranks; allowed: a single rank")
    if source.manifest is not None:
        raise ConfigError(f"{where} with a compiled folder; allowed: a checkpoint")
    from tilewright.compiler.driver import compile_draft_layer
    from tilewright.compiler.targets.host.executable import HostExecutable
    from tilewright.models import load_draft_layer

    model = source.checkpoint_model()
    layer, executable = load_draft_layer(model), compiled.executable
    if compiled.target not in _LAYER_TARGETS:
        return
    progress("preparing the draft layer", 0, 1)
    assert resolved.precision is not None and isinstance(executable, HostExecutable)
    how: Any = {"target": compiled.target, "options": options, "progress": progress}
    made = compile_draft_layer(model, layer, resolved.precision, **how)
    assert isinstance(made, HostExecutable)
    executable.attach(made)


def open_draft_model(
    source: ModelHandle,
    resolved: ResolvedConfig,
    progress: Progress,
    *,
    load: Callable[[ResolvedConfig], ModelHandle],
    compile: Callable[[ModelHandle, ResolvedConfig], Compiled],
) -> Executable | None:
    """Return the executable of the configured draft model. None: no draft model.

    Call this before the compilation of the target model: pages take the remaining memory.

    Raises:
        ConfigError: for several ranks, other tokens than the target model's, or state that cannot
            be truncated.
        TilewrightError: for a model that is not found or not read.
    """
    speculative = resolved.config.speculative
    if speculative is None or speculative.model is None:
        return None
    where = "speculative_config: draft model"
    if not resolved.grouping.is_alone:
        raise ConfigError(f"{where} with several ranks; allowed: a single rank")
    seqs = min(_MAX_SEQS, resolved.config.num_seqs(resolved.target)[0])
    config = replace(
        resolved.config,
        model=speculative.model,
        precision=None,
        speculative_config=None,
        max_num_seqs=seqs,
        gpu_memory_utilization=None,
    )
    chosen = resolve(config)
    draft = load(chosen)
    if draft.max_positions < (config.max_model_len or 0):
        chosen = chosen.changed(max_model_len=None)
    if draft.tokenizer.tokens_hash() != source.tokenizer.tokens_hash():
        raise ConfigError(
            f"{where} {speculative.model}: other tokens than those of {source.name}; allowed: a "
            "draft model with the same tokens"
        )
    progress("preparing the draft model", 0, 1)
    executable = compile(draft, chosen).executable
    if executable.capabilities.has_sequence_state:
        executable.close()
        raise ConfigError(
            f"{where} {speculative.model}: has linear attention; allowed: a model with attention "
            "only"
        )
    return executable
