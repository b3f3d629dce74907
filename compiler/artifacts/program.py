"""Compiling into a folder or through the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.cache import CacheUnusableError, ProgramCache, program_key
from tilewright.compiler.artifacts.folder import make_folder, seal_folder, write_file
from tilewright.compiler.artifacts.loading import GRAPH, load_part
from tilewright.compiler.artifacts.manifest import Manifest, ModelFacts
from tilewright.compiler.artifacts.paths import part_of
from tilewright.compiler.artifacts.rank_programs import group_facts
from tilewright.compiler.driver import (
    CompilableModel,
    compile_model,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.ir.serialise import graph_json
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import ALONE, Parallel
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
    parallel: Parallel = ALONE,
    rank: int = 0,
    serves: CompileOptions | None = None,
) -> Manifest:
    """Compile into ``folder``, for any batch and any context of the model, or any that is served by
    the same program as ``max_context`` where the model has several; of ranks, one's part. What
    ``serves`` asks for is to fit this machine: that is looked at before weights are read.

    Returns the manifest; `seal_folder` completes and writes it, when the caller has added what
    else belongs into the folder. Raises as `compile_model`.
    """
    longest = model.config.max_positions
    context = longest if max_context is None else model.config.program_context(max_context)
    options = CompileOptions(max_context=context, compute=compute, parallel=parallel, rank=rank)
    check_options(options, longest)
    backend = get_target(target)
    resolved, settled = resolve_precision(model, precision), backend.settled(options)
    asked: dict[str, Any] = {"dump_dir": dump_dir, "parallel": settled, "rank": rank}
    asked["block_axis"] = backend.block_axis
    graph_module, ctx = lower_model(model, resolved, backend.stages(), progress, **asked)
    if serves is not None:
        backend.check_room(graph_module, serves)
    backend.build(graph_module, weight_source(model, context, settled), folder, options, progress)
    write_file(folder / GRAPH, graph_json(graph_module))
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


def _facts_of(model: CompilableModel, context: int) -> ModelFacts:
    return ModelFacts(
        model.name,
        model.checkpoint.content_hash(),
        model.config.num_layers,
        context,
        "checkpoint" if model.checkpoint.files else "random",
    )


def write_ranks(
    model: CompilableModel,
    precision: PrecisionConfig,
    folder: Path,
    *,
    parallel: Parallel,
    target: str = "cpu",
    compute: str = "fast",
    progress: Progress = silent,
    dump_dir: Path | None = None,
) -> Manifest:
    """`write_program` for every rank of a group, each into its own part of ``folder``; the manifest
    is of all of them.
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
    """`compile_model`, through a cache; where that cannot be used, a note says so. ``on_cached``
    receives the key of a program that is in the cache.

    A rank's part is an entry of its own. Random weights, which no file stands for, are made anew
    each time and not kept. Raises as `compile_model`.
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
    # the same program may have been built under another name of the same configuration
    return replace(compiled, precision=summary)


def _write_served(
    model: CompilableModel,
    precision: PrecisionConfig,
    folder: Path,
    target: str,
    options: CompileOptions,
    progress: Progress,
) -> Manifest:
    """`write_program` for the options that are served at once."""
    asked: Any = {name: getattr(options, name) for name in ("compute", "parallel", "rank")}
    return write_program(
        model,
        precision,
        folder,
        target=target,
        max_context=options.max_context,
        progress=progress,
        serves=options,
        **asked,
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
        dealt = settled.tensor, settled.expert, settled.shares, settled.wire
        choices = f"{choices}/{dealt}/{options.rank}"
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
