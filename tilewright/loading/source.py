"""What a command runs: a model from its checkpoint or of random weights, or a compiled folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.folder import open_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.paths import digest_memory, is_compiled
from tilewright.compiler.artifacts.rank_programs import own_part
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.distributed import hello
from tilewright.errors import CheckpointError
from tilewright.loading.ranks import Job, compile_ranks
from tilewright.models import (
    FoundModel,
    LoadedModel,
    ShapeName,
    Weights,
    load_model,
    quantised_types,
)
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.options.arguments import ModelOptions

TOKENIZER = "tokenizer"
"""The folder inside a compiled one that holds its tokenizer's files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model as commands see it; exactly one of ``model`` and ``manifest`` is there."""

    name: str
    content_hash: str
    num_layers: int
    max_positions: int
    tokenizer: Tokenizer
    path: FoundModel
    weights: Weights
    model: LoadedModel | None = None
    manifest: Manifest | None = None

    def checkpoint_model(self) -> LoadedModel:
        """Build the model of the checkpoint, its weights loaded on demand.

        Raises:
            CheckpointError: for a compiled folder, which has none.
        """
        if self.model is None:
            raise CheckpointError(
                f"{self.path}: a compiled folder has no checkpoint, and there is no fp32 reference "
                "of its model in the cache; allowed: measure its accuracy once from the checkpoint"
            )
        return self.model


def open_source(path: FoundModel, rank: int = 0) -> Source:
    """Open a checkpoint, a shape or a compiled folder; no weights are read or made. ``rank``: whose
    program of a folder is looked at, where it has several.

    Raises:
        CheckpointError: for anything that is neither, or damaged.
    """
    if isinstance(path, ShapeName) or not is_compiled(path):
        return source_of(load_model(path), path)
    manifest = open_folder(path, digest_memory(), rank)
    facts = manifest.model
    return Source(
        name=facts.name,
        content_hash=facts.content_hash,
        num_layers=facts.num_layers,
        max_positions=facts.max_positions,
        tokenizer=load_tokenizer(TokenizerSource(path / TOKENIZER)),
        path=path,
        weights=facts.weights,
        manifest=manifest,
    )


def source_of(model: LoadedModel, path: FoundModel) -> Source:
    """Wrap a loaded model so that commands can compile and name it."""
    return Source(
        name=model.name,
        content_hash=model.checkpoint.content_hash(),
        num_layers=model.config.num_layers,
        max_positions=model.config.max_positions,
        tokenizer=model.tokenizer,
        path=path,
        weights=model.weights,
        model=model,
    )


def precision_of(source: Source, precision: PrecisionConfig | None) -> PrecisionSummary:
    """The configuration on this model: the one asked for, or the one it was compiled with."""
    if source.manifest is not None:
        return source.manifest.precision
    from tilewright.compiler.driver import resolve_precision

    assert source.model is not None and precision is not None
    return resolve_precision(source.model, precision).summary(precision.name)


def precision_title(source: Source, precision: PrecisionSummary) -> str:
    """Return the name and the formats of a configuration on this model; see
    `PrecisionSummary.title`. The file of a compiled folder is not known.
    """
    is_folder = not isinstance(source.path, ShapeName) and is_compiled(source.path)
    return precision.title(() if is_folder else quantised_types(source.path))


def served_facts(source: Source, compiled: Compiled, *, arithmetic: str) -> dict[str, str]:
    """What is served of a compiled model, by name: what its answers depend on."""
    facts = {
        "name": source.name,
        "target": compiled.target,
        "precision": compiled.precision.heading,
        "configuration": precision_title(source, compiled.precision),
        "precision_rule": next((n for n in compiled.notes if n.startswith("precision auto")), ""),
        "weights": source.weights,
        "content_hash": source.content_hash,
        "device": compiled.executable.device_name,
        "arithmetic": arithmetic,
    }
    if source.model is not None:
        facts["parameters"] = str(sum(each.numel() for each in source.model.module.parameters()))
    return facts


def settle_backend(choices: ModelOptions, progress: Progress) -> ModelOptions:
    """The choices with what runs the target cpu, where that was left open; a note says which, and
    why. The native library is built now where it was not.

    Raises:
        ConfigError: for ranks of what was chosen, if it has none.
    """
    if not choices.is_auto:
        return choices
    from tilewright.compiler.targets.cpu.backend import choose_backend

    target, why = choose_backend(progress)
    precision, notes = choices.precision, choices.notes
    if target == CPU_BACKENDS["onnxruntime"] and choices.on_onnxruntime is not None:
        precision = choices.on_onnxruntime.precision
        notes = (choices.on_onnxruntime.reason,)
    settled = replace(
        choices, target=target, is_auto=False, precision=precision, notes=(*notes, why)
    )
    settled.check_ranks()
    return settled


def compile_source(
    source: Source,
    choices: ModelOptions,
    options: CompileOptions,
    progress: Progress,
    *,
    use_cache: bool,
    ends_process: bool = False,
) -> Compiled:
    """Make a model executable: from its folder, through the cache, or compiled anew. It chooses
    no id that has no token. What runs the target cpu is chosen here if it was left open. Its notes
    are those of the choices, of the passes, and of how it is held once its ranks have met.

    Dumps are of passes that run, so with them nothing is taken from the cache.

    Args:
        ends_process: whether this process ends by itself, with the error's line and exit code,
            where a rank has gone and a kernel or a library does not return.

    Raises:
        CompileError, CheckpointError, ConfigError: where the parts do not fit together.
    """
    choices = settle_backend(choices, progress)
    if choices.grouping.is_alone:
        compiled = compile_alone(source, choices, options, progress, use_cache=use_cache)
    else:
        compiled = _compile_ranks(
            source, choices, options, progress, use_cache=use_cache, ends_process=ends_process
        )
    return replace(compiled, notes=(*compiled.notes, *compiled.executable.notes))


def _compile_ranks(
    source: Source,
    choices: ModelOptions,
    options: CompileOptions,
    progress: Progress,
    *,
    use_cache: bool,
    ends_process: bool,
) -> Compiled:
    """The executable of all ranks, led by this process."""
    grouping = choices.grouping
    options = replace(options, parallel=grouping.parallel)
    # what every rank would refuse is refused before any of them is started
    if source.manifest is not None:
        assert isinstance(source.path, Path), "a shape has no manifest"
        own_part(source.path, source.manifest, options)
        choices = replace(choices, target=source.manifest.target)
    elif source.model is not None:
        # A compiled folder is opened and run without torch, which the mesh needs.
        from tilewright.compiler.mesh import split_heads

        heads, parallel = source.model.config, grouping.parallel
        split_heads(heads.num_heads, heads.num_kv_heads, parallel.tensor, parallel.policy)
    job = Job(str(source.path), choices.target, choices.precision, options, use_cache)

    def run(own: CompileOptions, check: Callable[[], None]) -> Compiled:
        def report(what: str, done: int, total: int) -> None:
            check()
            progress(what, done, total)

        return compile_alone(source, choices, own, report, use_cache=use_cache)

    facts = facts_of(source, choices)
    return compile_ranks(job, grouping, facts, run, ends_process=ends_process)


def facts_of(source: Source, choices: ModelOptions) -> dict[str, str]:
    """What ranks must have in common of a model and what was chosen for it."""
    facts = {
        hello.CHECKPOINT: source.content_hash,
        hello.PRECISION: precision_of(source, choices.precision).id,
    }
    if source.manifest is not None:  # copies of a folder on several machines
        files = sorted(source.manifest.files.items())
        facts[hello.FOLDER] = hashlib.sha256(repr(files).encode()).hexdigest()
    return facts


def compile_alone(
    source: Source,
    choices: ModelOptions,
    options: CompileOptions,
    progress: Progress,
    *,
    use_cache: bool,
) -> Compiled:
    """This process's own program: of the whole model, or of its rank's part."""
    if source.manifest is not None:
        assert isinstance(source.path, Path), "a shape has no manifest"
        compiled = load_program(source.path, source.manifest, options, progress)
    else:
        from tilewright.compiler.artifacts.program import compile_cached
        from tilewright.compiler.driver import compile_model

        model, precision = source.checkpoint_model(), choices.precision
        assert precision is not None
        how: Any = {"target": choices.target, "options": options, "progress": progress}
        if use_cache and choices.dump_dir is None and get_target(choices.target).is_cached:
            compiled = compile_cached(model, precision, ProgramCache.default(), **how)
        else:
            compiled = compile_model(model, precision, dump_dir=choices.dump_dir, **how)
        compiled = replace(compiled, notes=(*choices.notes, *compiled.notes))
    compiled.executable.num_tokens = source.tokenizer.num_ids
    return compiled
