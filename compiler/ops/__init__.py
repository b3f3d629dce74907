"""The op set of Tilewright: small, semantic, each op with an eager reference, a fake and a cost."""

from tilewright.compiler.ops.attention import (
    RopeAttentionArguments,
    attention,
    attention_step,
    rope_attention_step,
)
from tilewright.compiler.ops.collectives import (
    COLLECTIVES,
    all_gather,
    all_reduce,
    all_reduce_add,
    all_to_all,
    reduce_scatter,
)
from tilewright.compiler.ops.delta_rule import (
    causal_conv1d,
    causal_conv1d_step,
    gated_delta_rule,
    gated_delta_rule_step,
)
from tilewright.compiler.ops.dense import (
    add_rms_norm,
    clamped_swiglu,
    embedding,
    gelu,
    linear,
    rms_norm,
    rope,
    sigmoid_gate,
    swiglu,
    swiglu_packed,
)
from tilewright.compiler.ops.fused import (
    DeltaNormArguments,
    FusedArguments,
    FusedExpertArguments,
    delta_rule_norm_step,
    fused_expert_linear,
    fused_linear,
)
from tilewright.compiler.ops.image_attention import (
    cross_attention,
    mask_text_rows,
    tile_attention,
)
from tilewright.compiler.ops.library import OPERATORS, Cost, Operator
from tilewright.compiler.ops.moe import expert_linear, experts, local_experts, router
from tilewright.compiler.ops.rounding import round_q80
from tilewright.compiler.ops.sample import sample
from tilewright.compiler.ops.tiles import (
    add_gated,
    add_position_rows,
    add_tile_rows,
    join_columns,
    pad_rows,
    prepend_row,
    tile_features,
)
from tilewright.compiler.ops.vision import (
    add_rows,
    full_attention,
    interpolate_rows,
    layer_norm,
    merge_rows,
    pool_blocks,
    project_rows,
)

__all__ = [
    "COLLECTIVES",
    "OPERATORS",
    "Cost",
    "DeltaNormArguments",
    "FusedArguments",
    "FusedExpertArguments",
    "Operator",
    "RopeAttentionArguments",
    "add_gated",
    "add_position_rows",
    "add_rms_norm",
    "add_rows",
    "add_tile_rows",
    "all_gather",
    "all_reduce",
    "all_reduce_add",
    "all_to_all",
    "attention",
    "attention_step",
    "causal_conv1d",
    "causal_conv1d_step",
    "clamped_swiglu",
    "cross_attention",
    "delta_rule_norm_step",
    "embedding",
    "expert_linear",
    "experts",
    "full_attention",
    "fused_expert_linear",
    "fused_linear",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gelu",
    "interpolate_rows",
    "join_columns",
    "layer_norm",
    "linear",
    "local_experts",
    "mask_text_rows",
    "merge_rows",
    "pad_rows",
    "pool_blocks",
    "prepend_row",
    "project_rows",
    "reduce_scatter",
    "rms_norm",
    "rope",
    "rope_attention_step",
    "round_q80",
    "router",
    "sample",
    "sigmoid_gate",
    "swiglu",
    "swiglu_packed",
    "tile_attention",
    "tile_features",
]
