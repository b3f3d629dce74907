"""Draft models for speculative decoding: opened, compared with the target model, compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.compiler.targets.interface.base import Executable, Progress
from tilewright.errors import ConfigError
from tilewright.loading.source import ModelHandle
from tilewright.options.resolve import ResolvedConfig, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewright.compiler.targets.interface.compiled import Compiled

_MAX_SEQS = 8
"""Maximum requests with drafts at a time. Drafts pay for few requests."""


def open_draft_model(
    source: ModelHandle,
    resolved: ResolvedConfig,
    progress: Progress,
    *,
    load: Callable[[ResolvedConfig], ModelHandle],
    compile: Callable[[ModelHandle, ResolvedConfig], Compiled],
) -> Executable | None:
    """Return the executable of the draft model in a configuration. None: there is no draft model.

    Compile it before the target model, whose pages take the rest of the memory.

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
