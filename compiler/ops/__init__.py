"""The op set of Tilewright: small, semantic, each op with an eager reference, a fake and a cost."""

from compiler.ops.attention import attention, attention_step, rope_attention_step
from compiler.ops.dense import (
    add_rms_norm,
    embedding,
    linear,
    rms_norm,
    rope,
    swiglu,
    swiglu_packed,
)
from compiler.ops.library import OPERATORS, Cost, Operator
from compiler.ops.sample import SamplingBatch, sample, uniform

__all__ = [
    "OPERATORS",
    "Cost",
    "Operator",
    "SamplingBatch",
    "add_rms_norm",
    "attention",
    "attention_step",
    "embedding",
    "linear",
    "rms_norm",
    "rope",
    "rope_attention_step",
    "sample",
    "swiglu",
    "swiglu_packed",
    "uniform",
]
