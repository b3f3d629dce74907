"""Compilation into a directory or through the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tilewright.compiler.artifacts.cache import CacheUnusableError, ProgramCache, program_key
from tilewright.compiler.artifacts.folder import make_folder, seal_folder, write_file
from tilewright.compiler.artifacts.loading import GRAPH, SETTINGS, VISION, EncoderFile, load_part
from tilewright.compiler.artifacts.manifest import Manifest, ModelFacts
from tilewright.compiler.artifacts.paths import part_of
from tilewright.compiler.artifacts.rank_programs import group_facts
from tilewright.compiler.driver import (
    CompilableModel,
    compile_model,
    encoder_settings,
    lower_model,
    lower_tower,
    resolve_precision,
    takes_images,
    text_model,
    tower_bytes,
    weight_source,
)
from tilewright.compiler.ir.serialise import graph_json
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary, ResolvedPrecision
from tilewright.compiler.targets.interface.base import CompileOptions, Progress, Target
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.errors import CheckpointError, one_line
from tilewright.utils.environment import environment


def write_program(
    model: CompilableModel,
    precision: PrecisionConfig,
    folder: Path,
    *,
    target: str = "cpu",
    compute: str = "fast",
    max_context: int | None = None,
    progress: Progress = silent,
    dump_dir: Path | None = None,
    parallel: ParallelConfig = SINGLE_RANK,
    rank: int = 0,
    serves: CompileOptions | None = None,
) -> Manifest:
    """Compile into ``folder``. Raise as `compile_model`.

    The program serves any batch. Contexts are limited by the model, or by ``max_context`` if the
    model has several programs. For several ranks, compile the program of ``rank``. Before reading
    weights, check this machine's memory for the options in ``serves``.

    Return the manifest. The caller adds further files, then `seal_folder` writes the completed
    manifest.
    """
    longest = model.config.max_positions
    context = longest if max_context is None else model.config.program_context(max_context)
    options = CompileOptions(max_context=context, compute=compute, parallel=parallel, rank=rank)
    check_options(options, longest)
    backend = get_target(target)
    resolved, settled = resolve_precision(model, precision), backend.settled(options)
    requested: dict[str, Any] = {"dump_dir": dump_dir, "parallel": settled, "rank": rank}
    requested["block_axis"] = backend.block_axis
    text = text_model(model, backend, settled)
    graph_module, ctx = lower_model(text, resolved, backend.stages(), progress, **requested)
    if serves is not None:
        backend.check_room(graph_module, serves)
    backend.build(graph_module, weight_source(text, context, settled), folder, options, progress)
    write_file(folder / GRAPH, graph_json(graph_module))
    write_encoder(model, resolved, folder, target=backend, parallel=parallel)
    surroundings = environment()
    return Manifest(
        model=_facts_of(model, context),
        precision=resolved.summary(precision.name),
        target=target,
        compute=compute,
        contract=backend.contract(graph_module, options),
        notes=tuple(ctx.notes),
        versions=surroundings.versions,
        commit=surroundings.commit,
        created=surroundings.timestamp,
    )


def write_encoder(
    model: CompilableModel,
    precision: ResolvedPrecision,
    folder: Path,
    *,
    target: Target,
    parallel: ParallelConfig,
) -> None:
    """Write the model's vision tower to ``folder``, if `compile_encoder` returns an encoder."""
    from tilewright.compiler.targets.reference_tower import build_tower

    if not takes_images(model, target, parallel):
        return
    lowered = lower_tower(model, precision)
    assert lowered is not None
    make_folder(folder / VISION)
    build_tower(*lowered, folder / VISION)
    write_file(folder / VISION / GRAPH, graph_json(lowered[0]))
    file = EncoderFile(encoder_settings(model, precision), tower_bytes(model))
    write_file(folder / VISION / SETTINGS, msgspec.json.encode(file))


def _facts_of(model: CompilableModel, context: int) -> ModelFacts:
    return ModelFacts(
        model.name,
        model.checkpoint.content_hash(),
        model.config.num_layers,
        context,
        "checkpoint" if model.checkpoint.files else "random",
        *getattr(model.checkpoint, "origin", ("", "")),
    )


def write_ranks(
    model: CompilableModel,
    precision: PrecisionConfig,
    folder: Path,
    *,
    parallel: ParallelConfig,
    target: str = "cpu",
    compute: str = "fast",
    progress: Progress = silent,
    dump_dir: Path | None = None,
) -> Manifest:
    """Run `write_program` for every rank in a group, with a subdirectory per rank.

    Return a manifest for the whole group.
    """
    found: list[Manifest] = []
    for rank in range(parallel.tensor):
        part = part_of(folder, rank)
        make_folder(part)
        found.append(
            write_program(
                model,
                precision,
                part,
                target=target,
                compute=compute,
                progress=progress,
                dump_dir=None if dump_dir is None else part_of(dump_dir, rank),
                parallel=parallel,
                rank=rank,
            )
        )
    options = CompileOptions(compute=compute, parallel=parallel)
    return replace(found[0], group=group_facts(get_target(target).settled(options)))


def compile_cached(
    model: CompilableModel,
    precision: PrecisionConfig,
    cache: ProgramCache,
    *,
    target: str = "cpu",
    options: CompileOptions | None = None,
    progress: Progress = silent,
    on_cached: Callable[[str, PrecisionSummary], None] | None = None,
) -> Compiled:
    """Run `compile_model` through a cache. Raise as `compile_model`.

    Each rank has its own entry. Random weights have no file and are never cached. If the cache is
    unusable, compile without it and add a note. ``on_cached`` is called with the key and summary of
    a cached program.
    """
    options = options or CompileOptions()
    check_options(options, model.config.max_positions)
    if not model.checkpoint.files:
        return compile_model(model, precision, target=target, options=options, progress=progress)
    get_target(target)
    summary = resolve_precision(model, precision).summary(precision.name)
    key = functools.partial(_key, model, summary.id, cache, target=target, options=options)
    wanted = key()

    def build(folder: Path) -> None:
        manifest = _write_served(model, precision, folder, target, options, progress)
        if key() != wanted:
            raise CheckpointError(f"{model.checkpoint.path}: changed while it was compiled")
        seal_folder(folder, manifest, cache.memory)

    try:
        with cache.entry(wanted, build, wait=lambda: progress("waiting", 0, 1)) as found:
            compiled = load_part(*found, options, progress)
    except CacheUnusableError as error:
        compiled = compile_model(
            model, precision, target=target, options=options, progress=progress
        )
        return replace(compiled, notes=(str(error), *compiled.notes))
    if on_cached is not None:
        on_cached(wanted, summary)
    # An equal configuration with another name may have built the same program.
    return replace(compiled, precision=summary)


def _write_served(
    model: CompilableModel,
    precision: PrecisionConfig,
    folder: Path,
    target: str,
    options: CompileOptions,
    progress: Progress,
) -> Manifest:
    """Run `write_program` for options that are used immediately."""
    requested: Any = {name: getattr(options, name) for name in ("compute", "parallel", "rank")}
    return write_program(
        model,
        precision,
        folder,
        target=target,
        max_context=options.max_context,
        progress=progress,
        serves=options,
        **requested,
    )


def _key(
    model: CompilableModel,
    precision_id: str,
    cache: ProgramCache,
    *,
    target: str,
    options: CompileOptions,
) -> str:
    checkpoint, context = model.checkpoint, model.config.program_context(options.max_context)
    serves_all = context == model.config.max_positions
    choices = precision_id if serves_all else f"{precision_id}/{context}"
    if options.parallel.tensor > 1:
        settled = get_target(target).settled(options)
        parallel = settled.tensor, settled.expert, settled.shares, settled.wire
        choices = f"{choices}/{parallel}/{options.rank}"
    try:
        return program_key(
            checkpoint.files,
            target=target,
            compute=options.compute,
            precision_id=choices,
            memory=cache.memory,
        )
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CheckpointError(f"{checkpoint.path}: cannot be read ({reason})") from None
