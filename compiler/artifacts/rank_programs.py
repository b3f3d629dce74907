"""Selection of a rank's program in a directory compiled for several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilewright.compiler.artifacts.digests import sources_digest
from tilewright.compiler.artifacts.manifest import GroupFacts, Manifest
from tilewright.compiler.artifacts.paths import part_of
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError, CompileError, ConfigError

_SHOWN = 12


def group_facts(settled: ParallelConfig) -> GroupFacts:
    """Return the manifest record for a group of ranks."""
    assert settled.wire is not None
    return GroupFacts(
        settled.tensor, settled.expert, settled.shares, settled.wire, sources_digest()
    )


def own_part(folder: Path, manifest: Manifest, options: CompileOptions) -> Path:
    """Return the program directory for these options: the whole directory or a rank's subdirectory.

    Raises:
        CompileError: The number of ranks differs.
        ConfigError: The sharding options differ.
        CheckpointError: Other source code made the directory.
    """
    group, parallel = manifest.group, options.parallel
    if group is None:
        if parallel.tensor > 1:
            raise CompileError(
                f"{folder}: a program of one device for {parallel.tensor} ranks; allowed: the "
                "checkpoint, or a folder compiled with --tensor-parallel-size"
            )
        return folder
    if parallel.tensor != group.tensor:
        raise CompileError(
            f"{folder}: programs of {group.tensor} ranks for {parallel.tensor}; allowed: "
            f"--tensor-parallel-size {group.tensor}"
        )
    for name, requested, compiled in (
        ("expert-parallel", parallel.expert, group.expert),
        ("shares", parallel.shares or None, group.shares),
        ("wire", parallel.wire, group.wire),
    ):
        if requested is not None and requested != compiled:
            raise ConfigError(
                f"--{name} {_shown(requested)} with {folder}, which was compiled with "
                f"{_shown(compiled) or 'none'}; allowed: without --{name}"
            )
    if group.sources != (own := sources_digest()):
        raise CheckpointError(
            f"{folder}: compiled for ranks by sources {group.sources[:_SHOWN]}, which are "
            f"{own[:_SHOWN]} here; compile again"
        )
    return part_of(folder, options.rank)


def as_compiled(manifest: Manifest, options: CompileOptions) -> CompileOptions:
    """Return the options with the directory's compute option and sharding."""
    options = replace(options, compute=manifest.compute)
    group = manifest.group
    if group is None:
        return options
    shared = {"expert": group.expert, "shares": group.shares}  # the link format is in the program
    return replace(options, parallel=replace(options.parallel, **shared))  # type: ignore[arg-type]


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
