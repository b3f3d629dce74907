"""What a command runs: a model from its checkpoint or of random weights, or a compiled folder."""

from __future__ import annotations

import functools
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
from tilewright.compiler.artifacts.start import (
    MAX_BYTES,
    DamagedStartError,
    Start,
    StartProgram,
    config_key,
    load_started,
)
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, silent
from tilewright.compiler.targets.table import get_target
from tilewright.distributed import hello
from tilewright.errors import CheckpointError
from tilewright.loading.ranks import Job, compile_ranks
from tilewright.loading.start import find_start, keep_start
from tilewright.models import (
    FoundModel,
    LoadedModel,
    ShapeName,
    Weights,
    load_model,
    quantised_types,
)
from tilewright.models.tokenizer.load import load_mapped
from tilewright.models.tokenizer.saved import read_saved
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.options.arguments import ModelOptions

TOKENIZER = "tokenizer"
"""The folder inside a compiled one that holds its tokenizer's files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model as commands see it, from a checkpoint (``load``) or a compiled folder (``manifest``).

    ``load``: builds the model of the checkpoint, once. ``start``: its record in the start index.
    ``notes``: lines for the user.
    ``original``: the checkpoint whose fp32 values accuracy is compared with; None: its own.
    """

    name: str
    content_hash: str
    num_layers: int
    max_positions: int
    tokenizer: Tokenizer
    path: FoundModel
    weights: Weights
    load: Callable[[], LoadedModel] | None = None
    manifest: Manifest | None = None
    start: Start | None = None
    notes: tuple[str, ...] = ()
    original: Source | None = None

    @property
    def model(self) -> LoadedModel | None:
        """The model of the checkpoint, built when it is first asked for; None for a folder."""
        return None if self.load is None else self.load()

    def checkpoint_model(self) -> LoadedModel:
        """Build the model of the checkpoint, its weights loaded on demand.

        Raises:
            CheckpointError: for a compiled folder, which has none.
        """
        if self.load is None:
            raise CheckpointError(
                f"{self.path}: a compiled folder has no checkpoint, and there is no fp32 reference "
                "of its model in the cache; allowed: measure its accuracy once from the checkpoint"
            )
        return self.load()


def open_source(
    path: FoundModel, rank: int = 0, *, use_cache: bool = True, progress: Progress = silent
) -> Source:
    """Open a checkpoint, a shape or a compiled folder; no weights are read or made. A model of the
    start index is not built until it is asked for.

    Args:
        rank: whose program of a folder is looked at, where it has several.
        use_cache: whether the start index is asked.
        progress: is told where a model is built.

    Raises:
        CheckpointError: for anything that is neither, or damaged.
    """
    if not isinstance(path, ShapeName) and is_compiled(path):
        return _open_folder(path, rank)
    notes: tuple[str, ...] = ()
    if use_cache:
        try:
            start = find_start(path, max_bytes=MAX_BYTES)
            if start is not None:
                return _open_started(path, start)
        except (DamagedStartError, CheckpointError) as error:
            notes = (str(error),)
    progress("opening the model", 0, 1)
    return replace(source_of(load_model(path), path), notes=notes)


def _open_folder(path: Path, rank: int) -> Source:
    manifest = open_folder(path, digest_memory(), rank)
    facts = manifest.model
    return Source(
        name=facts.name,
        content_hash=facts.content_hash,
        num_layers=facts.num_layers,
        max_positions=facts.max_positions,
        tokenizer=read_saved(path / TOKENIZER),
        path=path,
        weights=facts.weights,
        manifest=manifest,
    )


def _open_started(path: FoundModel, start: Start) -> Source:
    facts = start.record.model
    tokenizer = load_mapped(start.tokenizer, Path(str(path)))

    @functools.cache
    def load() -> LoadedModel:
        model = load_model(path, tokenizer=tokenizer)
        if model.checkpoint.content_hash() != facts.content_hash:
            raise CheckpointError(f"{path}: changed while it was opened")
        return model

    return Source(
        name=facts.name,
        content_hash=facts.content_hash,
        num_layers=facts.num_layers,
        max_positions=facts.max_positions,
        tokenizer=tokenizer,
        path=path,
        weights=facts.weights,
        load=load,
        start=start,
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
        load=lambda: model,
    )


def precision_of(source: Source, precision: PrecisionConfig | None) -> PrecisionSummary:
    """The configuration on this model: the one asked for, or the one it was compiled with."""
    if source.manifest is not None:
        return source.manifest.precision
    assert precision is not None
    known = None if source.start is None else source.start.record.precision_of(precision)
    if known is not None:
        return known
    from tilewright.compiler.driver import resolve_precision

    return resolve_precision(source.checkpoint_model(), precision).summary(precision.name)


def precision_title(source: Source, precision: PrecisionSummary) -> str:
    """Return the name and the formats of a configuration on this model; see
    `PrecisionSummary.title`. The file of a compiled folder is not known.
    """
    if source.start is not None:
        return precision.title(source.start.record.stored_types)
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
    if source.load is not None:
        facts["parameters"] = str(num_parameters(source))
    return facts


def num_parameters(source: Source) -> int:
    """The number of parameters of a checkpoint's model."""
    if source.start is not None:
        return source.start.record.num_parameters
    return sum(each.numel() for each in source.checkpoint_model().module.parameters())


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
    else:
        # A compiled folder is opened and run without torch, which the mesh needs.
        from tilewright.compiler.mesh import split_heads

        heads, parallel = source.checkpoint_model().config, grouping.parallel
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
        compiled = _compile_checkpoint(source, choices, options, progress, use_cache=use_cache)
        compiled = replace(compiled, notes=(*choices.notes, *compiled.notes))
    compiled.executable.num_tokens = source.tokenizer.num_ids
    return compiled


def _compile_checkpoint(
    source: Source,
    choices: ModelOptions,
    options: CompileOptions,
    progress: Progress,
    *,
    use_cache: bool,
) -> Compiled:
    """The program of a checkpoint: of the start index, of the cache, or compiled."""
    precision = choices.precision
    assert precision is not None
    how: Any = {"target": choices.target, "options": options, "progress": progress}
    is_cached = use_cache and choices.dump_dir is None and get_target(choices.target).is_cached
    if is_cached and source.start is not None:
        started = load_started(source.start, precision, ProgramCache.default(), **how)
        if started is not None:
            return started
    from tilewright.compiler.artifacts.program import compile_cached
    from tilewright.compiler.driver import compile_model

    model = source.checkpoint_model()
    if not is_cached:
        return compile_model(model, precision, dump_dir=choices.dump_dir, **how)

    def keep(key: str, summary: PrecisionSummary) -> None:
        keep_start(
            source,
            precision,
            StartProgram(key, config_key(precision), summary),
            choices.target,
            options,
        )

    return compile_cached(model, precision, ProgramCache.default(), on_cached=keep, **how)
