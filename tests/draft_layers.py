"""Tiny draft layers, and a plain torch version of a draft layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tiny import FakeCheckpoint, precision_of
from tilewright.compiler.driver import lower_draft_layer
from tilewright.compiler.ops.delta_rule import chunked_delta_rule, gates, split_heads
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.models.architectures.table import architecture_of
from tilewright.models.sources import stored_shapes

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def tiny_layer(model: SimpleNamespace, *, seed: int = 1, std: float = 0.3) -> SimpleNamespace:
    """Return a random draft layer of a tiny model, as `load_draft_layer`."""
    changes = {"num_layers": 1, "linear_layers": (False,), "dense_layers": ()}
    config: Any = dataclasses.replace(model.config, **changes)
    make = architecture_of(config.model_type).draft_layer
    assert make is not None
    with torch.device("meta"):
        module: Any = make(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in stored_shapes(module).items():
        values = torch.randn(shape, generator=generator) * std
        tensors[name] = model.checkpoint.tensors[name] if name in SHARED else values
    checkpoint = FakeCheckpoint(tensors)
    return SimpleNamespace(name="layer", config=config, module=module, checkpoint=checkpoint)


def attach(
    executable: HostExecutable,
    model: SimpleNamespace,
    layer: SimpleNamespace,
    target: str,
    *,
    precision: PrecisionConfig | None = None,
) -> HostExecutable:
    """Compile a layer and attach it. Return the layer's executable."""
    limits = executable.capabilities
    options = CompileOptions(
        max_batch=limits.max_num_seqs,
        max_context=limits.max_context,
        compute="exact",
        num_threads=1,
    )
    precision = precision or precision_of()
    lowered = lower_draft_layer(model, layer, precision, target=target, options=options)
    how = lowered.graph_module, lowered.get_weight, options, silent
    made = get_target(target).compile(*how)
    assert isinstance(made, HostExecutable)
    executable.attach(made)
    return made


def plain_drafts(
    layer: SimpleNamespace, tokens: list[int], hidden: Tensor, count: int
) -> tuple[list[int], Tensor]:
    """Return drafts after ``tokens``, and the logits of the first draft.

    ``hidden`` is the model's final hidden states ``[T, hidden]`` of all tokens except the last,
    after the norm. Row t reads token t + 1 and state t.
    """
    tensors, config = layer.checkpoint.tensors, layer.config
    drafts: list[int] = []
    first = torch.empty(0)
    for _ in range(count):
        read = torch.tensor([*tokens, *drafts][1:])
        z = layer_states(tensors, config, read, hidden)
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        logits = z[-1] @ head.T
        first = logits if not drafts else first
        drafts.append(int(logits.argmax()))
        hidden = torch.cat((hidden, z[-1:]))
    return drafts, first


def layer_states(
    tensors: dict[str, Tensor],
    config: Any,
    tokens: Tensor,
    hidden: Tensor,
    *,
    prefix: str = "model.layers.0",
) -> Tensor:
    """Return a draft layer's final states ``[..., T, hidden]`` after its norm."""
    embedding = tensors["model.embed_tokens.weight"][tokens]
    both = [
        norm(embedding, tensors["mtp.pre_fc_norm_embedding.weight"], config.norm_eps),
        norm(hidden, tensors["mtp.pre_fc_norm_hidden.weight"], config.norm_eps),
    ]
    halves = tensors["mtp.fc_embedding.weight"], tensors["mtp.fc_hidden.weight"]
    x = torch.cat(both, dim=-1) @ torch.cat(halves, dim=1).T
    x = block(x, tensors, config, prefix=prefix)
    return norm(x, tensors["mtp.norm.weight"], config.norm_eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return a root mean square norm, times ``1 + weight``."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def block(x: Tensor, tensors: dict[str, Tensor], config: Any, *, prefix: str) -> Tensor:
    """Run a layer with gated attention on ``[..., T, hidden]``."""

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    eps, count, dim = config.norm_eps, config.num_heads, config.head_dim
    normed, length = norm(x, get("input_layernorm"), eps), x.shape[-2]
    query, gate = (normed @ get("self_attn.q_proj").T).unflatten(-1, (count, 2, dim)).unbind(-2)
    keys = (normed @ get("self_attn.k_proj").T).unflatten(-1, (-1, dim))
    values = (normed @ get("self_attn.v_proj").T).unflatten(-1, (-1, dim))
    query = _rotate(norm(query, get("self_attn.q_norm"), eps), config)
    keys = _rotate(norm(keys, get("self_attn.k_norm"), eps), config)
    repeats = count // keys.shape[-2]
    keys, values = (part.repeat_interleave(repeats, -2) for part in (keys, values))
    scores = torch.einsum("...thd,...shd->...hts", query, keys) * dim**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = torch.einsum("...hts,...shd->...thd", scores.softmax(-1), values) * gate.sigmoid()
    return _feed_forward(x + attended.flatten(-2) @ get("self_attn.o_proj").T, get, eps)


def linear_block(x: Tensor, tensors: dict[str, Tensor], config: Any, *, prefix: str) -> Tensor:
    """Run a layer with linear attention on ``[B, T, hidden]``, with gradients.

    The delta rule has sequences as heads. Its state begins with zeros.
    """

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    shape, eps, size = config.delta, config.norm_eps, x.shape[0]
    normed, heads = norm(x, get("input_layernorm"), eps), config.delta.num_value_heads
    qkv, z, a, b = (
        normed @ get(f"linear_attn.in_proj_{name}").T for name in ("qkv", "z", "a", "b")
    )
    weight = get("linear_attn.conv1d")
    padded = torch.nn.functional.pad(qkv.mT, (weight.shape[-1] - 1, 0))
    qkv = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, groups=len(weight)))
    rows = split_heads(qkv.mT.flatten(0, 1), shape.num_key_heads, shape.key_dim, heads)
    gated = gates(
        a.flatten(0, 1),
        b.flatten(0, 1),
        tensors[f"{prefix}.linear_attn.A_log"],
        tensors[f"{prefix}.linear_attn.dt_bias"],
    )
    by_token = [
        each.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2) for each in (*rows, *gated)
    ]
    state = x.new_zeros(size * heads, shape.key_dim, shape.value_dim)
    out = chunked_delta_rule(*by_token, state)[0].unflatten(1, (size, heads)).transpose(0, 1)
    out = norm(out, get("linear_attn.norm") - 1, eps)
    gate = torch.nn.functional.silu(z).unflatten(-1, (heads, -1))
    x = x + (gate * out).flatten(-2) @ get("linear_attn.out_proj").T
    return _feed_forward(x, get, eps)


def _feed_forward(x: Tensor, get: Callable[[str], Tensor], eps: float) -> Tensor:
    normed = norm(x, get("post_attention_layernorm"), eps)
    up = normed @ get("mlp.up_proj").T
    inner = torch.nn.functional.silu(normed @ get("mlp.gate_proj").T) * up
    return x + inner @ get("mlp.down_proj").T


def _rotate(x: Tensor, config: Any) -> Tensor:
    """Rotate the first channels in heads ``[..., T, heads, dim]``. Row t has position t."""
    pairs = config.rope.num_pairs(config.head_dim)
    powers = torch.arange(pairs) / pairs
    angles = torch.arange(x.shape[-3])[:, None] * config.rope.theta**-powers
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
