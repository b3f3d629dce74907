"""Compilation of a loaded model to an executable, in the data flow's order."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.formats import stored_together
from tilewright.compiler.ir.recipe import DecodesOnDevice, StoresBlocks
from tilewright.compiler.passes.dumps import dump_folder
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import PrecisionConfig, ResolvedPrecision
from tilewright.compiler.targets.image_encoder import (
    AnyEncoder,
    AnySettings,
    EncoderSettings,
    SquareEncoderSettings,
    encoder_of,
)
from tilewright.compiler.targets.interface.base import (
    CompileOptions,
    LoweredLayer,
    Progress,
    Stage,
    Target,
)
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.pipeline import RANK, with_ranks
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tile_encoder import (
    CROSS_CACHE_BYTES,
    IMAGE_CACHE_BYTES,
    TileEncoderSettings,
)
from tilewright.compiler.tracer import grouped_modules, trace
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.images.squares import SquareSettings


class CompilableModel(Protocol):
    """The compiler's view of a model from `tilewright.models.load_model`."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> Any: ...
    @property
    def config(self) -> Any: ...
    @property
    def checkpoint(self) -> Any: ...


def compile_model(
    model: CompilableModel,
    precision: PrecisionConfig,
    *,
    target: str = "cpu",
    options: CompileOptions | None = None,
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> Compiled:
    """Trace, rewrite, lower and build ``model`` for a target.

    For a group of ranks (``options.parallel``), compile the program and weights for
    ``options.rank``. Its executable then connects to the other ranks with `Executable.join`.
    Nothing is stored: use `artifacts` for this. ``dump_dir`` receives the graph after every pass.

    Args:
        model: Result of `load_model`.
        precision: Result of `load_precision`.
        target: ``cpu-native``, ``cpu`` (ONNX Runtime), ``cuda``, a board (``n150``, ``n300``,
            ``t3k``, ``tg``), ``reference`` or ``null``.
        options: Batch, context and arithmetic. None: the defaults of `CompileOptions`.
        progress: Called with ``(step, done, total)``.
        dump_dir: Directory for graph dumps. None: no dumps.

    Raises:
        CompileError: Model, precision and target do not fit together.
        CheckpointError: A tensor is missing or has the wrong shape.
    """
    options, report = options or CompileOptions(), progress or silent
    check_options(options, model.config.max_positions)
    backend, resolved = get_target(target), resolve_precision(model, precision)
    parallel, rank = backend.settled(options), options.rank
    how: Any = {"dump_dir": dump_dir, "parallel": parallel, "rank": rank}
    text = text_model(model, backend, parallel)
    graph_module, ctx = lower_model(
        text, resolved, backend.stages(), report, block_axis=backend.block_axis, **how
    )
    encoder = compile_encoder(model, resolved, backend, parallel, is_fast=options.compute == "fast")
    if encoder is not None:
        options = replace(options, tower_bytes=tower_bytes(model))
    backend.check_room(graph_module, options)
    source = weight_source(text, options.max_context, parallel)
    executable = backend.compile(graph_module, source, options, report)
    executable.encoder = encoder
    return Compiled(
        executable=executable,
        target=target,
        compute=options.compute,
        precision=resolved.summary(precision.name),
        notes=tuple(ctx.notes),
        graph=lambda: graph_module,
        places=tuple(ctx.places),
    )


def lower_draft_layer(
    model: CompilableModel,
    layer: CompilableModel,
    precision: PrecisionConfig,
    *,
    target: str,
    options: CompileOptions,
    progress: Progress = silent,
) -> LoweredLayer:
    """Lower a model's draft layer with the model's precision and options.

    Args:
        model: Result of `load_model`.
        layer: Result of `load_draft_layer`.
        precision: The model's precision. The groups ``draft_*`` are the layer's.
        target: ``reference``, ``cpu-native`` or ``cuda``.
        options: The model's options.
        progress: Called with ``(step, done, total)``.

    Raises:
        CompileError, CheckpointError: As `compile_model`.
    """
    backend, resolved = get_target(target), resolve_precision(model, precision)
    how: Any = {"block_axis": backend.block_axis}
    graph_module, _ = lower_model(layer, resolved, backend.stages(), progress, **how)
    return LoweredLayer(graph_module, weight_source(layer, options.max_context))


def compile_virtual(
    model: CompilableModel,
    precision: PrecisionConfig,
    *,
    target: str = "reference",
    options: CompileOptions,
) -> Compiled:
    """Compile all ranks of ``options.parallel`` in this process, as the oracle for separate
    processes.

    Arguments are as in `compile_model`. The target must support virtual ranks.
    """
    check_options(options, model.config.max_positions)
    backend, resolved = get_target(target), resolve_precision(model, precision)
    parallel = backend.settled(options)
    found = _lower_ranks(model, resolved, backend.stages(), parallel)
    source = weight_source(model, options.max_context, parallel)
    graphs = [graph_module for graph_module, _ in found]
    return Compiled(
        executable=backend.compile_ranks(graphs, source, options, silent),
        target=target,
        compute=options.compute,
        precision=resolved.summary(precision.name),
        notes=tuple(found[0][1].notes),
        graph=lambda: graphs[0],
        places=tuple(found[0][1].places),
    )


def resolve_precision(model: CompilableModel, precision: PrecisionConfig) -> ResolvedPrecision:
    """Apply the configuration to this model. Each rule must match a module.

    Raises:
        ConfigError: A layer does not exist, or a rule has no effect.
    """
    vision: Any = getattr(model, "vision", None)
    has_cross_layers = vision is not None and vision.text_module is not None
    modules = grouped_modules(vision.text_module if has_cross_layers else model.module)
    if vision is not None:
        modules += grouped_modules(vision.module)
    return precision.resolve(model.config.num_layers, model.name, modules=modules)


@dataclass(frozen=True, slots=True)
class _Part:
    """A vision tower or a text model as a model of its own, with the model's checkpoint."""

    name: str
    module: Any
    config: Any
    checkpoint: Any


def tower_of(model: CompilableModel) -> _Part | None:
    """Return the model's vision tower as a model, or None."""
    vision = getattr(model, "vision", None)
    if vision is None:
        return None
    return _Part(model.name, vision.module, vision.config, model.checkpoint)


def text_model(
    model: CompilableModel, backend: Target, parallel: ParallelConfig
) -> CompilableModel:
    """Return the model of text to compile, with its cross-attention layers if they can run."""
    vision: Any = getattr(model, "vision", None)
    if vision is None or vision.text_module is None or not takes_images(model, backend, parallel):
        return model
    return _Part(model.name, vision.text_module, model.config, model.checkpoint)


def takes_images(model: CompilableModel, backend: Target, parallel: ParallelConfig) -> bool:
    """Return whether the model's tower can run on a target."""
    vision: Any = getattr(model, "vision", None)
    if vision is None or not backend.has_images:
        return False
    if parallel.tensor > 1 and not backend.has_images_on_ranks:
        return False
    if vision.text_module is not None:
        return backend.has_cross_layers
    return backend.has_bidirectional_images or not _is_square(vision)


def _is_square(vision: Any) -> bool:
    """Return whether all images have the same size, and attention in both directions."""
    return isinstance(vision.processor, SquareSettings)


_MAX_CACHED_IMAGES = 32
"""Images for which memory is reserved, unless their maximum bytes are less."""


def tower_bytes(model: CompilableModel) -> int:
    """Return the device memory for a tower in fp32, its largest image's values, and the images
    in the cache.
    """
    vision: Any = model.vision  # type: ignore[attr-defined]
    config, processor = vision.config, vision.processor
    num_values = sum(tensor.numel() for tensor in vision.module.parameters())
    if vision.text_module is None:
        is_square = _is_square(vision)
        rows = config.num_patches if is_square else processor.max_pixels // config.patch_size**2
        tokens = config.tokens_per_side**2 if is_square else rows // config.merge_size**2
        cached = min(IMAGE_CACHE_BYTES, 4 * _MAX_CACHED_IMAGES * tokens * config.output_size)
        return int(4 * (num_values + 3 * rows * config.intermediate_size) + cached)
    keys, width = config.max_tiles * config.num_padded_rows, cross_width(model)
    values = keys * (3 * config.intermediate_size + config.feature_size + 2 * width)
    cached = min(CROSS_CACHE_BYTES, 4 * _MAX_CACHED_IMAGES * keys * width)
    return 4 * (num_values + values) + cached


def cross_width(model: CompilableModel) -> int:
    """Return the columns of cross-attention keys and values, over all layers."""
    text: Any = model.config
    return int(2 * text.num_kv_heads * text.head_dim * len(text.cross_layers))


def lower_tower(
    model: CompilableModel, precision: ResolvedPrecision
) -> tuple[GraphModule, ModelWeights] | None:
    """Return the graph of the vision tower and its weights. None: the model has no tower."""
    from tilewright.compiler.targets.reference_tower import ENCODER_STAGES, STAGES

    tower = tower_of(model)
    if tower is None:
        return None
    vision: Any = model.vision  # type: ignore[attr-defined]
    is_linear = vision.text_module is None and not _is_square(vision)
    stages = STAGES if is_linear else ENCODER_STAGES
    graph_module, _ = lower_model(tower, precision, stages, silent)
    return graph_module, weight_source(tower)


def encoder_settings(model: CompilableModel, precision: ResolvedPrecision) -> AnySettings:
    """Return the settings of the model's vision tower. It must have one."""
    vision: Any = model.vision  # type: ignore[attr-defined]
    config = vision.config
    if _is_square(vision):
        return SquareEncoderSettings(processor=vision.processor)
    if vision.text_module is not None:
        cache_format = precision.format("cross_kv_cache")
        return TileEncoderSettings(
            processor=vision.processor, cross_width=cross_width(model), cache_format=cache_format
        )
    return EncoderSettings(
        processor=vision.processor,
        num_frames=config.num_frames,
        grid_side=config.grid_side,
        num_pairs=config.hidden_size // config.num_heads // 2,
        rotary_axes=config.rotary_axes,
    )


def compile_encoder(
    model: CompilableModel,
    precision: ResolvedPrecision,
    backend: Target,
    parallel: ParallelConfig,
    *,
    is_fast: bool,
) -> AnyEncoder | None:
    """Return the model's image encoder. Its weights are read with the first image.

    ``is_fast``: A GPU may use bfloat16.
    None: the model has no tower, or the target takes no images. Each rank has the whole tower.
    """
    from tilewright.compiler.targets.reference_tower import compile_tower

    if not takes_images(model, backend, parallel):
        return None
    lowered = lower_tower(model, precision)
    assert lowered is not None
    device = backend.tower_device()
    settings = encoder_settings(model, precision)
    return encoder_of(settings, lambda: compile_tower(*lowered, device, is_fast=is_fast))


_MAX_TRACED = 32
_TRACED: dict[Any, GraphModule] = {}


def trace_model(model: CompilableModel) -> GraphModule:
    """Return a copy of the model's graph for the caller to modify.

    Models with equal class, configuration and parameter shapes are traced once per process. A model
    with a ``forward`` on an instance is always traced.
    """
    module = model.module
    if any("forward" in vars(each) for each in module.modules()):
        return trace(module)
    shapes = tuple((k, p.shape) for k, p in module.named_parameters(remove_duplicate=False))
    key = type(module), model.config, shapes
    if key not in _TRACED:
        while len(_TRACED) >= _MAX_TRACED:
            del _TRACED[next(iter(_TRACED))]
        _TRACED[key] = trace(module)
    return copy.deepcopy(_TRACED[key])


def lower_model(
    model: CompilableModel,
    precision: ResolvedPrecision,
    stages: Sequence[Stage],
    report: Progress,
    *,
    dump_dir: Path | None = None,
    parallel: ParallelConfig = SINGLE_RANK,
    rank: int = 0,
    block_axis: str = "",
) -> tuple[GraphModule, PassContext]:
    """Trace the model and run a target's stages. A verification follows each stage.

    With several ranks in ``parallel``, return the program for ``rank``: its own weights and heads,
    and collectives for values on other ranks. `weight_source` with the same ``parallel`` reads only
    these weights. Every rank runs this function::

        parallel = backend.settled(options)
        lowered = lower_model(model, resolved, backend.stages(), report, parallel=parallel, rank=r)
        weights = weight_source(model, options.max_context, parallel)
        executable = backend.compile(lowered[0], weights, options, report)

    ``block_axis`` is `Target.block_axis`. ``dump_dir``, or else the directory in
    ``TILEWRIGHT_DUMP``, receives the graph after every pass.

    Raises:
        CompileError: The model cannot be sharded over these ranks.
    """
    report("trace", 0, 1)
    graph_module = trace_model(model)
    ctx = PassContext(
        precision,
        dump_dir=dump_folder(dump_dir),
        stored_type=model.checkpoint.stored_type,
        calibrated=getattr(model.checkpoint, "calibrated", None),
        target_axis=block_axis,
        parallel=parallel,
        rank=rank,
    )
    ctx.notes.extend(getattr(model.checkpoint, "notes", ()))
    stages = stages if parallel.tensor == 1 else with_ranks(stages)
    for index, stage in enumerate(stages):
        report(stage.name, index, len(stages))
        run_passes(graph_module, stage.passes, ctx, verify=stage.verify)
    return graph_module, ctx


def _lower_ranks(
    model: CompilableModel,
    precision: ResolvedPrecision,
    stages: Sequence[Stage],
    parallel: ParallelConfig,
) -> list[tuple[GraphModule, PassContext]]:
    """Run `lower_model` for every rank. Stages before the slicing by rank run once."""
    stages = with_ranks(stages)
    end = stages.index(RANK)
    graph_module, stored_type = trace_model(model), model.checkpoint.stored_type
    calibrated = getattr(model.checkpoint, "calibrated", None)
    ctx = PassContext(precision, stored_type=stored_type, calibrated=calibrated, parallel=parallel)
    found = []
    for stage in stages[:end]:
        run_passes(graph_module, stage.passes, ctx, verify=stage.verify)
    for rank in range(parallel.tensor):
        own = replace(ctx, rank=rank, notes=[*ctx.notes], reports=[*ctx.reports])
        part = copy.deepcopy(graph_module)
        for stage in stages[end:]:
            run_passes(part, stage.passes, own, verify=stage.verify)
        found.append((part, own))
    return found


def constants_of(model: CompilableModel, max_context: int | None = None) -> dict[str, Tensor]:
    """Return the values of the model's buffers by name. Checkpoints do not contain them.

    They cover sequences up to ``max_context`` positions. None is the model's limit.
    """
    constants: dict[str, Tensor] = model.module.constants(max_context)
    return constants


def weight_source(
    model: CompilableModel, max_context: int | None = None, parallel: ParallelConfig = SINGLE_RANK
) -> ModelWeights:
    """Return a source for the model's tensors by name. ``max_context`` is as in `constants_of`.

    For several ranks, the source reads only a rank's slice.
    """
    kind = ModelWeights if parallel.tensor == 1 else RankWeights
    return kind(model, constants_of(model, max_context))


class ModelWeights:
    """A lazy source for a model's tensors: constants first, then the checkpoint.

    A tensor with rows for several parameters stays in memory until the next such tensor is read.
    """

    def __init__(self, model: CompilableModel, constants: Mapping[str, Tensor]) -> None:
        self._checkpoint, self._constants = model.checkpoint, constants
        parts = (source for parts in model.module.sources().values() for source in parts)
        self._shared = {source.tensor for source in parts if source.rows}
        self._kept: dict[str, Tensor] = {}

    def on(self, device: torch.device) -> Self:
        """Return the source with tensors on a device, if the checkpoint can decode there."""
        if not isinstance(self._checkpoint, DecodesOnDevice):
            return self
        source = copy.copy(self)
        source._checkpoint, source._kept = self._checkpoint.on(device), {}
        return source

    def __call__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        is_constant = name in self._constants
        tensor = self._constants[name] if is_constant else self._checkpoint.get(name)
        assert isinstance(tensor, Tensor)
        if name in self._shared:
            self._kept = {name: tensor}
        return tensor

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``[first, last)``, counted over all axes except the last. Read only the
        matrices of these rows, except from a cached tensor.
        """
        if name in self._constants or name in self._shared:
            return self(name).flatten(0, -2)[first:last].clone()
        outer, rows = self._outer(name, first, last)
        tensor = self._checkpoint.get(name, outer)
        assert isinstance(tensor, Tensor)
        return tensor.flatten(0, -2)[rows]

    def stored(self, name: str, first: int, last: int) -> Tensor:
        """Return file bytes for rows ``[first, last)`` in a block format, uint8 ``[rows, bytes]``.

        Rows are counted over all axes except the last.
        """
        outer, rows = self._outer(name, first, last)
        if isinstance(self._checkpoint, StoresBlocks):
            _, blocks = self._checkpoint.stored_blocks(name, outer)
        else:
            blocks = torch.from_numpy(self._checkpoint.stored(name, outer)[1])
        inner = math.prod(self._checkpoint.names[name].shape[1:-1])
        return blocks.reshape((outer.stop - outer.start) * inner, -1)[rows]

    def _outer(self, name: str, first: int, last: int) -> tuple[slice, slice]:
        """Return the first axis' range with rows ``[first, last)``, and the rows inside it."""
        inner = math.prod(self._checkpoint.names[name].shape[1:-1])
        outer = slice(first // inner, -(-last // inner))
        begin = outer.start * inner
        return outer, slice(first - begin, last - begin)


class RankWeights(ModelWeights):
    """A lazy source with slices of tensors for ranks.

    It implements `tilewright.compiler.ir.recipe.ReadsParts`.
    """

    def part(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> Tensor:
        wide = slice(None) if columns is None else slice(*columns)
        if name in self._constants:
            whole = self(name)
            whole = whole if rows is None else whole.flatten(0, -2)[slice(*rows)]
            return whole[..., wide].clone()
        if rows is None:
            return self._get(name, None, columns)
        shape = self._checkpoint.names[name].shape
        inner = math.prod(shape[1:-1])
        if inner == 1 or len(shape) == 1:
            found = self._get(name, slice(*rows), columns)
            return found.flatten(0, -2) if len(shape) > 2 else found
        parts = []
        for first, last, outer in _by_outer(*rows, inner):
            taken = self._get(name, (outer, slice(first, last)), columns)
            parts.append(taken.flatten(0, -2))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _get(self, name: str, rows: Any, columns: tuple[int, int] | None) -> Tensor:
        if columns is None and not isinstance(rows, tuple):
            found = self._checkpoint.get(name, rows)
        else:
            wide = None if columns is None else slice(*columns)
            found = self._checkpoint.get(name, rows, wide)
        assert isinstance(found, Tensor)
        return found


def _by_outer(first: int, last: int, inner: int) -> Iterator[tuple[int, int, slice]]:
    """Split rows counted over two axes into the second axis's ranges, with slices of the first."""
    while first < last:
        outer, begin = divmod(first, inner)
        whole = (last - first) // inner if begin == 0 else 0
        if whole:
            yield 0, inner, slice(outer, outer + whole)
            first += whole * inner
        else:
            end = min(inner, begin + last - first)
            yield begin, end, slice(outer, outer + 1)
            first += end - begin


def stored_formats(model: CompilableModel) -> dict[str, str]:
    """Return each parameter's stored format by name.

    See `tilewright.compiler.formats.stored_together`.
    """
    sources, checkpoint = model.module.sources(), model.checkpoint
    found = {}
    for name, _ in model.module.named_parameters():
        parts = sources.get(name)
        tensors = [name] if parts is None else [part.tensor for part in parts]
        found[name] = stored_together(map(checkpoint.stored_type, tensors))
    return found
