"""The plan and the choices of one engine; those of a file are put in this one's place."""

from __future__ import annotations

from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Attend,
    Choices,
    Embed,
    Gather,
    Linear,
    Plan,
)

PLAN = Plan(
    first=(Embed(out="x", table="embed_tokens.weight"),),
    layer=(
        Linear(
            out="qkv",
            x="x",
            weights=(
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
            ),
            norm="input_layernorm.weight",
        ),
        Attend(out="heads", qkv="qkv"),
        Linear(out="x", x="heads", weights=("self_attn.o_proj.weight",), residual=True),
        Linear(
            out="inner",
            x="x",
            weights=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            norm="post_attention_layernorm.weight",
            swiglu=True,
        ),
        Linear(out="x", x="inner", weights=("mlp.down_proj.weight",), residual=True),
    ),
    last=(
        Gather(out="last", x="x"),
        Linear(out="logits", x="last", weights=("lm_head.weight",), norm="norm.weight"),
    ),
)

CHOICES = Choices()
