"""Launches of Triton kernels: chained by programmatic dependent launch on a GPU.

Triton's interpreter runs the same sources on a CPU, without chains.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Factor of scores in base 2."""


@triton.jit
def wait_for_inputs(CHAINED: tl.constexpr):
    """Wait for all writes and reads of earlier kernels."""
    if CHAINED:  # noqa: SIM102 (constants)
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(CHAINED: tl.constexpr):
    """Let the next kernel start. Both run until its `wait_for_inputs`."""
    if CHAINED:  # noqa: SIM102 (constants)
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_launch_dependents()


def chained(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel with ``CHAINED`` on a tensor's device.

    ``CHAINED`` is false in the interpreter only. GPUs before compute capability 9.0 have no chains.
    """
    if tensor.is_cuda:
        return {"CHAINED": True, "launch_pdl": capability_of(tensor.device) >= (9, 0)}
    return {"CHAINED": False}


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


def has_large_tiles(tensor: torch.Tensor) -> bool:
    """Return whether a block can have 163 KiB of shared memory. Some GPUs have 99 KiB."""
    if not tensor.is_cuda:
        return True
    capability = capability_of(tensor.device)
    return capability in ((8, 0), (8, 7)) or (9, 0) <= capability < (12, 0)


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks over ``size`` elements. Triton's function takes 2 us a call."""
    return -(-size // block)


def block_of(size: int, *, minimum: int = 16) -> int:
    """Return the power of two for a Triton block over ``size`` elements."""
    return max(minimum, 1 << (size - 1).bit_length())


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return a GPU's multiprocessors. 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
