"""Kernels of `SOURCES` on a device: compiled by NVRTC once in a process, and launched."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_products import (
    Sizes,
    _nvrtc,
    launch,
    load_kernels,
    machine_code,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.native_source import SOURCES


def takes_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `SOURCES` can run on a device, on such values."""
    if device.type != "cuda" or dtype != torch.bfloat16 or _nvrtc() is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def native_launch(
    kernel: tuple[str, str, str],
    arguments: ctypes.Structure,
    *,
    blocks: Sizes,
    threads: int,
    shared: int = 0,
    cluster: Sizes = (1, 1, 1),
    chained: bool,
) -> None:
    """Run a kernel: its source, the line that makes it, its name; ``cluster``: blocks that are
    placed together.
    """
    function = _native(*kernel, torch.cuda.current_device())
    how: dict[str, Any] = {"shared": shared, "cluster": cluster, "chained": chained}
    launch(function, arguments, blocks, threads, **how)


@functools.cache
def _native(source: str, made: str, name: str, device: int) -> Any:
    """A kernel, loaded on a device."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = native_code(source, made, f"sm_{major}{minor}a")
    return load_kernels(binary, [name], device)[name]


@functools.cache
def native_code(source: str, made: str, architecture: str) -> bytes:
    """Machine code of a source with a line that makes one of its kernels."""
    headers = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
    options = "-DGENERATED", f"-arch={architecture}"
    return machine_code(source, f"{SOURCES[source]}{made}\n", headers, *options)
