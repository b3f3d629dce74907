"""The two calls of the library: open a model, compile it. `LLM` and the commands use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilewright.compiler.artifacts.paths import is_compiled
from tilewright.compiler.artifacts.start import MAX_BYTES, DamagedStartError
from tilewright.compiler.targets.interface.base import Executable, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, silent
from tilewright.errors import CheckpointError
from tilewright.loading.program import begin_kernels, compile_program
from tilewright.loading.source import ModelHandle, open_compiled, open_started, source_of
from tilewright.loading.start import find_start
from tilewright.models import FoundModel, find_model_or_shape, load_model
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve


def load(
    path: FoundModel | str | None = None,
    *,
    rank: int = 0,
    use_cache: bool = True,
    progress: Progress = silent,
    config: ResolvedConfig | None = None,
) -> ModelHandle:
    """Open a checkpoint, a shape or a compiled directory. Weights are read later.

    A model of the start index is built when its weights are needed.

    Args:
        path: a path, a name on the Hugging Face hub, or ``shape:NAME``. None: the default model.
        rank: Number of the program in a compiled directory of several ranks.
        use_cache: Whether to read the start index.
        progress: Receives ``(what, done, total)`` if a model is built.
        config: The later configuration of `compile`. Its missing CPU kernels are built meanwhile.

    Raises:
        CheckpointError: for a path without a model, or a damaged model.
    """
    if isinstance(path, str) and is_compiled(path):
        path = Path(path).expanduser()
    named = find_model_or_shape(path) if path is None or isinstance(path, str) else path
    if isinstance(named, Path) and is_compiled(named):
        return open_compiled(named, rank)
    notes: tuple[str, ...] = ()
    if use_cache:
        try:
            start = find_start(named, max_bytes=MAX_BYTES)
            if start is not None:
                return open_started(named, start)
        except (DamagedStartError, CheckpointError) as error:
            notes = (str(error),)
    if config is not None:
        begin_kernels(config)
    progress("opening the model", 0, 1)
    return replace(source_of(load_model(named), named), notes=notes)


def open_draft_model(
    source: ModelHandle, resolved: ResolvedConfig, *, progress: Progress = silent
) -> Executable | None:
    """Return the executable of a configured draft model. Call this before `compile`.

    Raises:
        TilewrightError: see `loading.draft.open_draft_model`.
    """
    if resolved.config.speculative_config is None:
        return None
    from tilewright.loading import draft

    use_cache = resolved.config.use_cache
    return draft.open_draft_model(
        source,
        resolved,
        progress,
        load=lambda own: load(own.path, config=own, use_cache=use_cache, progress=progress),
        compile=lambda model, own: compile(model, own, progress=progress),
    )


def compile(
    model: ModelHandle | str | Path,
    config: EngineConfig | ResolvedConfig | None = None,
    *,
    progress: Progress = silent,
    ends_process: bool = False,
) -> Compiled:
    """Return a model's executable, from its directory, the cache or the compiler.

    Args:
        model: an opened model, or a path for `load`.
        config: the configuration. Its ``model`` is ignored. None: the default configuration.
        progress: Receives ``(what, done, total)``.
        ends_process: See `compile_program`.

    Raises:
        TilewrightError: for parts that do not fit together or do not fit this machine.
    """
    if not isinstance(config, ResolvedConfig):
        named = model.path if isinstance(model, ModelHandle) else model
        config = resolve(replace(config or EngineConfig(), model=str(named)))
    source = model if isinstance(model, ModelHandle) else load(config.path)
    options = config.config.compile_options(config.target, source.max_positions)
    return compile_program(source, config, options, progress, ends_process=ends_process)
