"""Functions for this file's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import (
    CudaExecutor,
    HybridCudaExecutor,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import (
    HYBRID_CONFIG,
    SMALL_CONFIG,
    HybridReference,
    Reference,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    Settings,
    read_hybrid_settings,
    read_settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Executor
from tilewright.compiler.targets.cuda.engine_generator.parts.torch_steps import (
    HybridTorchExecutor,
    TorchExecutor,
)


@dataclass(frozen=True)
class Family:
    """Functions that read, run and check models of a family. ``small_config`` is for checks."""

    read_settings: Callable[[Mapping[str, Any], torch.device], Settings]
    on_cpu: Callable[..., Executor]
    on_gpu: Callable[..., Executor]
    reference: Callable[..., Reference]
    small_config: Mapping[str, Any]


LLAMA = Family(read_settings, TorchExecutor, CudaExecutor, Reference, SMALL_CONFIG)
HYBRID = Family(
    read_hybrid_settings, HybridTorchExecutor, HybridCudaExecutor, HybridReference, HYBRID_CONFIG
)
FAMILY = replace(LLAMA)
