"""Attention over the cache: heads are sharded, rotated, written to their pages and read."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.mesh import HeadSplit
from tilewright.compiler.targets.tenstorrent.lower.context import (
    HEAD_NORM,
    SMALL,
    LoweringContext,
    whose,
)
from tilewright.compiler.targets.tenstorrent.program import placement
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    Cache,
    ComputeConfig,
    ConcatHeads,
    CreateHeads,
    RmsNorm,
    Rotate,
    TtAttention,
    TtValue,
    UpdateCache,
)
from tilewright.compiler.targets.tenstorrent.program.placements import (
    as_node,
    deal_heads,
    sharded_columns,
    state_of,
)
from tilewright.errors import CompileError


def lower_attention(ctx: LoweringContext, node: Node) -> None:
    """Emit the instructions from a merged query, key and value matmul to the heads' output.

    Raises:
        CompileError: There is no instruction for the arguments, or boards lack the cache format.
    """
    args = ops.RopeAttentionArguments.of(node.args)
    _check_arguments(node, args)
    qkv = ctx.value_of(args.q)
    split, head_dim = deal_heads(ctx.mesh, args)
    q, k, v = (
        ctx.value(
            node,
            qkv.rows,
            count * head_dim,
            qkv.format,
            sharded_columns(qkv.over, part),
            suffix=suffix,
        )
        for suffix, count, part in (
            ("q", split.num_heads, split.queries(head_dim)),
            ("k", split.num_kv_heads, split.keys(head_dim)),
            ("v", split.num_kv_heads, split.keys(head_dim)),
        )
    )
    sizes = (split.num_heads, split.num_kv_heads, head_dim)
    ctx.put(node, CreateHeads(q, *whose(node), qkv, k, v, *sizes))
    if args.q_norm is not None and args.k_norm is not None:
        q = _norm_heads(ctx, node, q, args.q_norm, "q_normed")
        k = _norm_heads(ctx, node, k, args.k_norm, "k_normed")
    q = _rotate(ctx, node, q, split.num_heads, "q_rotated")
    k = _rotate(ctx, node, k, split.num_kv_heads, "k_rotated")
    keys, values = _caches(ctx, args, split)
    for x, cache in ((k, keys), (v, values)):
        ctx.put(node, UpdateCache(x, *whose(node), x, cache, ctx.positions))
    attended = _attend(ctx, node, q, keys, values)
    out = ctx.like(node, attended, attended.format)
    ctx.put(node, ConcatHeads(out, *whose(node), attended, split.num_heads, head_dim))


def _check_arguments(node: Node, args: ops.RopeAttentionArguments) -> None:
    if args.soft_cap != 0.0:
        raise CompileError(
            f"{info(node).fqn}: a soft cap of scores: no instruction on Tenstorrent boards; "
            "allowed: --target reference, cpu or cuda"
        )


def _norm_heads(ctx: LoweringContext, node: Node, x: TtValue, weight: Any, suffix: str) -> TtValue:
    """Append a norm over each head, whose output is bfloat16."""
    eps = ops.RopeAttentionArguments.of(node.args).norm_eps
    vector = ctx.vector(info(as_node(weight)).fqn, weight)
    out = ctx.value(node, x.rows, x.columns, "bf16", x.placement, suffix=suffix)
    heads = x.columns // vector.columns
    norm = RmsNorm(out, *whose(node), x, vector, float(eps), vector.columns, HEAD_NORM, heads)
    ctx.put(node, norm)
    return out


def _attend(ctx: LoweringContext, node: Node, q: TtValue, keys: Cache, values: Cache) -> TtValue:
    args = ops.RopeAttentionArguments.of(node.args)
    compute = info(node).compute
    assert compute is not None
    out_format = ctx.format(node, "sdpa")
    sinks = None
    if args.sinks is not None:
        sinks = ctx.vector(info(as_node(args.sinks)).fqn, args.sinks)
    attended = ctx.value(node, q.rows, q.columns, out_format, q.placement, suffix="heads")
    attention = TtAttention(
        attended,
        *whose(node),
        q=q,
        keys=keys,
        values=values,
        positions=ctx.positions,
        num_heads=q.columns // keys.head_dim,
        num_kv_heads=keys.num_heads,
        head_dim=keys.head_dim,
        scale=float(args.scale),
        window=args.window,
        context=ctx.context,
        k_chunk=placement.key_chunk(ctx.context),
        compute=ComputeConfig(getattr(compute, ctx.phase)),
        sinks=sinks,
    )
    ctx.put(node, attention)
    return attended


def _rotate(ctx: LoweringContext, node: Node, x: TtValue, num_heads: int, suffix: str) -> TtValue:
    args = ops.RopeAttentionArguments.of(node.args)
    # The host makes tables of cosines and sines of them, which are bf16.
    frequencies = ctx.vector(info(as_node(args.inv_freq)).fqn, args.inv_freq, "fp32")
    format_ = ctx.format(node, "rope")
    out = ctx.value(node, x.rows, x.columns, format_, x.placement, suffix=suffix)
    rotate = Rotate(
        out,
        *whose(node),
        x=x,
        positions=ctx.positions,
        frequencies=frequencies,
        num_heads=num_heads,
        head_dim=x.columns // num_heads,
        interleaved=args.interleaved,
        compute=SMALL,
        factor=float(args.factor),
    )
    ctx.put(node, rotate)
    return out


def _caches(
    ctx: LoweringContext, args: ops.RopeAttentionArguments, split: HeadSplit
) -> tuple[Cache, Cache]:
    state = state_of(args)
    formats = state.format, state.value_format or state.format
    for format_ in formats:
        placement.check_cache_format(state.name, format_)
    page, head_dim = placement.PAGE, state.shape[-1]
    keys, values = (
        Cache(
            name=f"{state.name}.{kind}",
            state=state,
            kind=kind,
            num_heads=split.num_kv_heads,
            head_dim=head_dim,
            format=format_,
            num_pages=ctx.batch * -(-ctx.context // page),
            page=page,
            placement=ctx.place_of(args.kv_cache),
        )
        for kind, format_ in zip(("k", "v"), formats, strict=True)
    )
    return keys, values
