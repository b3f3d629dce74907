"""What runs steps with kernels of the CUDA target; the file has the bases that its choices name."""

from __future__ import annotations

from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_cuda import HybridCudaExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.native_attend import NativeAttention
from tilewright.compiler.targets.cuda.engine_generator.parts.native_delta import NativeDelta
from tilewright.compiler.targets.cuda.engine_generator.parts.native_experts import NativeExperts


class NativeExecutor(NativeAttention, NativeExperts, NativeDelta, HybridCudaExecutor):
    """Steps on a GPU."""
