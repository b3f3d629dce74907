"""Compiled directory loading. Imports no torch unless the target needs it."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tilewright.compiler.artifacts.folder import read_file
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.rank_programs import as_compiled, own_part
from tilewright.compiler.targets.image_encoder import AnyEncoder, AnySettings, Tower, encoder_of
from tilewright.compiler.targets.interface.base import BuiltProgram, CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from torch.fx import GraphModule

GRAPH = "graph.json"
VISION, SETTINGS = "vision", "encoder.json"
"""A program's directory with its vision tower, and the settings in it."""


class EncoderFile(msgspec.Struct, frozen=True):
    """A tower's settings, and the device memory for it in bytes."""

    settings: AnySettings
    num_bytes: int


def load_program(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress = silent
) -> Compiled:
    """Return the executable of a directory checked by `open_folder`. ``compute`` is the
    directory's.

    For several ranks, load the program of ``options.rank``.

    Raises:
        CheckpointError: The files were not written by the target.
        ConfigError, CompileError: The program does not support the options.
    """
    return load_part(own_part(folder, manifest, options), manifest, options, progress)


def load_part(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress
) -> Compiled:
    """Run `load_program` on the program's own directory."""
    options = as_compiled(manifest, options)
    check_options(options, manifest.model.max_positions)

    path = folder / GRAPH
    data = read_file(path)  # read early: the cache entry may be deleted later

    def graph() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path)

    def sketch() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path, is_fixed=True)

    program = BuiltProgram(folder, manifest.contract, graph, sketch)
    target = get_target(manifest.target)
    file = _encoder_file(folder)
    if file is not None:
        options = replace(options, tower_bytes=file.num_bytes)
    executable = target.load(program, options, progress)
    in_use = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC
    )  # `tilewright models` does not delete the program
    weakref.finalize(executable, os.close, in_use)
    executable.encoder = load_encoder(
        folder, target.tower_device(), is_fast=manifest.compute == "fast"
    )
    return Compiled(
        executable=executable,
        target=manifest.target,
        compute=manifest.compute,
        precision=manifest.precision,
        notes=manifest.notes,
        graph=graph,
    )


def _encoder_file(folder: Path) -> EncoderFile | None:
    path = folder / VISION / SETTINGS
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_file(path), type=EncoderFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged ({one_line(error)})") from None


def load_encoder(folder: Path, device: str = "cpu", *, is_fast: bool = False) -> AnyEncoder | None:
    """Return a program's image encoder. None: it has no tower. The first image reads the tower.

    Raises:
        CheckpointError: The settings cannot be read.
    """
    file = _encoder_file(folder)
    if file is None:
        return None
    graph_path = folder / VISION / GRAPH
    data = read_file(graph_path)

    def load() -> Tower:
        from tilewright.compiler.ir.serialise import read_graph
        from tilewright.compiler.targets.reference_tower import load_tower

        graph = read_graph(data, graph_path, is_fixed=True)
        return load_tower(graph, folder / VISION, device, is_fast=is_fast)

    return encoder_of(file.settings, load)
