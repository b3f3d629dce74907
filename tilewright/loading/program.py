"""Programs for opened models, from a directory, the cache or the compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.rank_programs import own_part
from tilewright.compiler.artifacts.start import StartProgram, config_key, load_started
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.precision import PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.distributed import handshake
from tilewright.loading import draft
from tilewright.loading.ranks import RankConfig, compile_ranks
from tilewright.loading.source import ModelHandle, precision_of
from tilewright.loading.start import keep_start
from tilewright.options.resolve import ResolvedConfig


def compile_program(
    source: ModelHandle,
    resolved: ResolvedConfig,
    options: CompileOptions,
    progress: Progress,
    *,
    ends_process: bool = False,
) -> Compiled:
    """Return a model's executable, on all its ranks.

    Its notes come from the configuration, the passes and the executable.

    Args:
        ends_process: Whether this process exits with the error's line and exit code if a rank is
            lost while a kernel or a library does not return.

    Raises:
        CompileError, CheckpointError, ConfigError: for conflicting parts.
    """
    resolved = settle_backend(resolved, progress)
    if draft.has_draft_layer(resolved):
        options = draft.with_draft_layer(source, resolved, options, progress)
    if resolved.grouping.is_alone:
        compiled = compile_alone(source, resolved, options, progress)
    else:
        compiled = _compile_ranks(source, resolved, options, progress, ends_process=ends_process)
    notes = (*compiled.notes, *compiled.executable.notes)
    try:
        draft.attach_draft_layer(compiled, options, progress)
    except BaseException:
        compiled.executable.close()  # also ends the other ranks
        raise
    return replace(compiled, notes=notes)


def settle_backend(resolved: ResolvedConfig, progress: Progress) -> ResolvedConfig:
    """Select the backend for target cpu if it is open. A note names it and the reason.

    The native library is built if necessary.

    Raises:
        ConfigError: for ranks with a backend that has none.
    """
    if not resolved.is_auto:
        return resolved
    from tilewright.compiler.targets.cpu.backend import choose_backend

    target, why = choose_backend(progress)
    precision, notes = resolved.precision, resolved.notes
    if target == CPU_BACKENDS["onnxruntime"] and resolved.on_onnxruntime is not None:
        precision = resolved.on_onnxruntime.precision
        notes = (resolved.on_onnxruntime.reason,)
    settled = replace(
        resolved, target=target, is_auto=False, precision=precision, notes=(*notes, why)
    )
    settled.check_ranks()
    return settled


def begin_kernels(resolved: ResolvedConfig) -> None:
    """Build this configuration's CPU kernels, if missing, while the caller reads a model."""
    if resolved.is_auto or resolved.target == CPU_BACKENDS["native"]:
        from tilewright.compiler.targets.cpu.native.library.build import begin_build

        begin_build()


def compile_alone(
    source: ModelHandle, resolved: ResolvedConfig, options: CompileOptions, progress: Progress
) -> Compiled:
    """Return this process's program, for the whole model or a rank's slice."""
    if source.manifest is not None:
        assert isinstance(source.path, Path), "a shape has no manifest"
        compiled = load_program(source.path, source.manifest, options, progress)
    else:
        compiled = _compile_checkpoint(source, resolved, options, progress)
        compiled = replace(compiled, notes=(*resolved.notes, *compiled.notes))
    compiled.executable.num_tokens = source.tokenizer.num_ids
    return compiled


def facts_of(source: ModelHandle, resolved: ResolvedConfig) -> dict[str, str]:
    """Return model and configuration facts for a comparison between ranks."""
    facts = {
        handshake.CHECKPOINT: source.content_hash,
        handshake.PRECISION: precision_of(source, resolved.precision).id,
    }
    if source.manifest is not None:  # copies of a directory on several machines
        files = sorted(source.manifest.files.items())
        facts[handshake.FOLDER] = hashlib.sha256(repr(files).encode()).hexdigest()
    return facts


def _compile_ranks(
    source: ModelHandle,
    resolved: ResolvedConfig,
    options: CompileOptions,
    progress: Progress,
    *,
    ends_process: bool,
) -> Compiled:
    """Return the executable for all ranks, led by this process."""
    grouping, target, layer = resolved.grouping, resolved.target, options.draft_layer
    options = replace(options, parallel=grouping.parallel, draft_layer=None)
    # what every rank would refuse is refused before any of them is started
    if source.manifest is not None:
        assert isinstance(source.path, Path), "a shape has no manifest"
        own_part(source.path, source.manifest, options)
        target = source.manifest.target
    else:
        # A compiled directory is opened and run without torch, which the mesh needs.
        from tilewright.compiler.mesh import split_heads

        heads, parallel = source.checkpoint_model().config, grouping.parallel
        split_heads(heads.num_heads, heads.num_kv_heads, parallel.tensor, parallel.policy)
    use_cache = resolved.config.use_cache
    job = RankConfig(str(source.path), target, resolved.precision, options, use_cache)

    def run(own: CompileOptions, check: Callable[[], None]) -> Compiled:
        def report(what: str, done: int, total: int) -> None:
            check()
            progress(what, done, total)

        return compile_alone(source, resolved, replace(own, draft_layer=layer), report)

    facts = facts_of(source, resolved)
    return compile_ranks(job, grouping, facts, run, ends_process=ends_process)


def _compile_checkpoint(
    source: ModelHandle, resolved: ResolvedConfig, options: CompileOptions, progress: Progress
) -> Compiled:
    """Return a checkpoint's program from the start index, the cache or the compiler."""
    precision, dump_dir = resolved.precision, resolved.dump_dir
    assert precision is not None
    how: Any = {"target": resolved.target, "options": options, "progress": progress}
    is_cached = resolved.config.use_cache and dump_dir is None
    is_cached = is_cached and get_target(resolved.target).is_cached
    if is_cached and source.start is not None:
        started = load_started(source.start, precision, ProgramCache.default(), **how)
        if started is not None:
            return started
    from tilewright.compiler.artifacts.program import compile_cached
    from tilewright.compiler.driver import compile_model

    model = source.checkpoint_model()
    if not is_cached:
        return compile_model(model, precision, dump_dir=dump_dir, **how)

    def keep(key: str, summary: PrecisionSummary) -> None:
        program = StartProgram(key, config_key(precision), summary)
        keep_start(source, precision, program, resolved.target, options)

    return compile_cached(model, precision, ProgramCache.default(), on_cached=keep, **how)
