"""Draft models and draft layers for speculative decoding: checks and compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.compiler.artifacts.paths import is_compiled
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, Progress
from tilewright.distributed.grouping import Grouping
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import ConfigError
from tilewright.loading.source import ModelHandle
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.runtime.speculative.config import MTP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewright.compiler.targets.interface.compiled import Compiled

_OF_GROUPS = (
    *("tensor_parallel_size", "expert_parallel_size", "devices", "tensor_split", "comm_dtype"),
    *("collective_backend", "rank_timeout", "nnodes", "node_rank", "master_addr", "master_port"),
)
"""Options of a group of ranks."""
_RANK_TARGETS = (CPU_BACKENDS["native"], "cuda")
"""Targets with draft layers on the leader of several ranks."""
_LAYER_TARGETS = ("reference", *_RANK_TARGETS)
_MAX_SEQS = 8
"""Maximum requests with drafts at a time. Drafts pay for few requests."""


def has_draft_layer(resolved: ResolvedConfig) -> bool:
    """Return whether the draft layer makes drafts."""
    speculative = resolved.config.speculative
    return speculative is not None and speculative.method == MTP


def with_draft_layer(
    source: ModelHandle, resolved: ResolvedConfig, options: CompileOptions, progress: Progress
) -> CompileOptions:
    """Return options with the model's draft layer, if the target runs draft layers.

    Call this before the compilation. The program cache excludes the layer. With several ranks, the
    leader has the whole layer: the model's final hidden states are equal on all ranks.

    Raises:
        ConfigError: for several ranks of a target without draft layers there, or a compiled
            directory.
        CheckpointError: for a file without a draft layer.
        CompileError: for a layer without kernels.
    """
    where = "speculative_config: method mtp"
    if not resolved.grouping.is_alone and resolved.target not in _RANK_TARGETS:
        raise ConfigError(
            f"{where} with several ranks; allowed: a single rank, or target cuda, or cpu with "
            "native kernels"
        )
    if source.manifest is not None:
        raise ConfigError(f"{where} with a compiled folder; allowed: a checkpoint")
    if not resolved.grouping.leads:
        return options
    from tilewright.compiler.driver import lower_draft_layer
    from tilewright.models import load_draft_layer

    model = source.checkpoint_model()
    layer = load_draft_layer(model)
    if resolved.target not in _LAYER_TARGETS:
        return options
    assert resolved.precision is not None
    how: Any = {"target": resolved.target, "options": options}
    return replace(options, draft_layer=lower_draft_layer(model, layer, resolved.precision, **how))


def attach_draft_layer(compiled: Compiled, options: CompileOptions, progress: Progress) -> None:
    """Compile the draft layer in ``options`` for a host executable.

    Executables on GPUs load the layer with the model.
    """
    from tilewright.compiler.targets.host.executable import HostExecutable
    from tilewright.compiler.targets.ranks.sharded import ShardedExecutable
    from tilewright.compiler.targets.table import get_target

    layer, executable = options.draft_layer, compiled.executable
    whole = executable
    if isinstance(executable, ShardedExecutable):
        executable = executable.own
    if layer is None or not isinstance(executable, HostExecutable):
        return
    progress("preparing the draft layer", 0, 1)
    target = get_target(compiled.target)
    options = replace(options, draft_layer=None)
    made = target.compile(layer.graph_module, layer.get_weight, options, progress)
    assert isinstance(made, HostExecutable)
    executable.attach(made)
    whole.capabilities = executable.capabilities


def open_draft_model(
    source: ModelHandle,
    resolved: ResolvedConfig,
    progress: Progress,
    *,
    load: Callable[[ResolvedConfig], ModelHandle],
    compile: Callable[[ModelHandle, ResolvedConfig], Compiled],
) -> Executable | None:
    """Return the executable of the configured draft model. None: no draft model.

    Call this before the compilation of the target model: pages take the remaining memory. With
    several ranks, the leader alone has the draft model, on its device.

    Raises:
        ConfigError: for a precision of a compiled directory, other tokens than the target
            model's, or state that cannot be truncated.
        TilewrightError: for a model that is not found or not read.
    """
    speculative = resolved.config.speculative
    if speculative is None or speculative.model is None or not resolved.grouping.leads:
        return None
    where = "speculative_config: draft model"
    if speculative.precision is not None and is_compiled(speculative.model):
        raise ConfigError(
            f"{where} {speculative.model}: draft_precision with a compiled folder; allowed: a "
            "checkpoint, or no draft_precision"
        )
    seqs = min(_MAX_SEQS, resolved.config.num_seqs(resolved.target)[0])
    changes: dict[str, Any] = {
        **dict.fromkeys(_OF_GROUPS),
        "model": speculative.model,
        "precision": speculative.precision,
        "speculative_config": None,
        "max_num_seqs": seqs,
        "gpu_memory_utilization": None,
    }
    config = replace(resolved.config, **changes)
    devices = resolved.grouping.parallel.devices[:1]
    chosen = resolve(config, runs=False)
    chosen = replace(chosen, grouping=Grouping(ParallelConfig(devices=devices)))
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
