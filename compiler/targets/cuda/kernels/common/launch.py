"""How Triton kernels are launched: chained by programmatic dependent launch on a GPU, one by one in
Triton's interpreter, which the same sources run under on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""What scores are multiplied by, so that softmax takes powers of 2."""


@triton.jit
def wait_for_inputs(CHAINED: tl.constexpr):
    """What earlier kernels wrote may be read, and what they read may be overwritten, after this."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(CHAINED: tl.constexpr):
    """The next kernel's blocks may be placed beside ours, up to their own `wait_for_inputs`."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


def chained(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel that takes ``CHAINED`` and runs on this tensor's device."""
    if tensor.is_cuda:
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


def block_of(size: int, *, least: int = 16) -> int:
    """The power of two that a Triton block over ``size`` elements has."""
    return max(least, triton.next_power_of_2(size))


@functools.cache
def num_processors(device: torch.device) -> int:
    """A GPU's multiprocessors; 1 for a CPU, where the interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
