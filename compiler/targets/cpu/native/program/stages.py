"""What is done to a graph before the native kernels' plan of it is made."""

from __future__ import annotations

from tilewright.compiler.passes.fuse_all_reduce_add import fuse_all_reduce_add
from tilewright.compiler.passes.fuse_delta_norm import fuse_delta_norm
from tilewright.compiler.passes.fuse_expert_sum import fuse_expert_sum
from tilewright.compiler.passes.fuse_linear_residual import fuse_linear_residual
from tilewright.compiler.passes.fuse_linear_swiglu import fuse_linear_swiglu
from tilewright.compiler.passes.fuse_norm_linear import fuse_norm_linear
from tilewright.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tilewright.compiler.passes.fuse_swiglu_packed import fuse_swiglu_packed
from tilewright.compiler.passes.gather_before_norm import gather_before_norm
from tilewright.compiler.passes.merge_delta_gates import merge_delta_gates
from tilewright.compiler.passes.merge_expert_linears import merge_expert_linears
from tilewright.compiler.passes.merge_parallel_linears import merge_parallel_linears
from tilewright.compiler.targets.interface.base import Stage
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, fuse, lower

STAGES: tuple[Stage, ...] = (
    MATCH,
    PRECISION,
    fuse(
        merge_parallel_linears,
        merge_delta_gates,
        fuse_swiglu_packed,
        fuse_linear_swiglu,
        fuse_all_reduce_add,
        fuse_linear_residual,
        merge_expert_linears,
        fuse_expert_sum,
    ),
    lower(fuse_delta_norm, fuse_rope_attention, gather_before_norm, fuse_norm_linear),
)
