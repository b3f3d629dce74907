"""Triton kernels. B rows of a decode step, T tokens of prompts, H query heads, G key/value heads, D
channels of a head, E the power of two above D.

Every kernel waits for those ahead of it before it touches what they write; until then, where they
are ``CHAINED``, it may only read weights.
"""

from __future__ import annotations

from functools import partial

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it, and no kernel is launched there
    triton = tl = None

# one kernel for all numbers of rows that fit it
jit = partial(triton.jit, do_not_specialize=["num_rows"]) if triton else lambda kernel: kernel


@jit
def begin(CHAINED: tl.constexpr):
    """The kernel behind may be placed beside this one; what is ahead has ended after this."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def embed_kernel(
    out, tokens, table, vocab, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Program t: the row of ``table`` for token t; zeros for what is no token."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    known = tl.where((token >= 0) & (token < vocab), width, 0)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(table + token * width + at, mask=at < known, other=0.0)
        tl.store(out + row * width + at, values, mask=at < width)


@jit
def norm_kernel(
    out, x, weight, width, eps, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Program t: RMSNorm of row t in float32, rounded, then times ``weight``."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        total += values * values
    scale = tl.rsqrt(tl.sum(total, 0) / width + eps)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        factors = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
        normed = (values * scale).to(dtype).to(tl.float32) * factors
        tl.store(out + row * width + at, normed.to(dtype), mask=at < width)


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, rounded where torch rounds."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@jit
def swiglu_kernel(out, gate_up, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (t, i): a block of columns of row t, whose gates lie before its ups."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = gate_up + row * 2 * width + at
    gate = tl.load(here, mask=at < width, other=0.0)
    up = tl.load(here + width, mask=at < width, other=0.0)
    tl.store(out + row * width + at, silu_times(gate, up, out.dtype.element_ty), mask=at < width)


@jit
def norm_scales(here, is_row, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What RMSNorm multiplies each row by; ``here``: the rows' first ``COLUMNS`` columns."""
    squares = tl.zeros([ROWS], tl.float32)
    for first in range(0, width, COLUMNS):
        inside = is_row[:, None] & (first + tl.arange(0, COLUMNS) < width)[None, :]
        values = tl.load(here + first, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, 1)
    return tl.rsqrt(squares / width + eps)


@jit
def product_kernel(
    out, x, weight, norm, num_rows, num_outputs, width, eps, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, CHAINED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program i: ``OUTPUTS`` columns of ``out [B, outputs] = x [B, width] weight^T`` for all rows,
    at most ``ROWS``; each weight is read once.
    """
    begin(CHAINED)
    dtype = out.dtype.element_ty
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    here_x = x + row[:, None] * width + column[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    scale = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        scale = norm_scales(here_x, is_row, width, eps, ROWS, COLUMNS)
    here_w = weight + output[:, None] * width + column[None, :]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        inside = (first + column < width)[None, :]
        values = tl.load(here_x + first, mask=is_row[:, None] & inside, other=0.0)
        if NORM:
            factors = tl.load(norm + first + column, mask=first + column < width, other=0.0)
            normed = (values.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32)
            values = (normed * factors.to(tl.float32)[None, :]).to(dtype)
        tile = tl.load(here_w + first, mask=is_output[:, None] & inside, other=0.0)
        sums = tl.dot(values, tl.trans(tile), sums)
        if SWIGLU:
            up_tile = tl.load(
                here_w + num_outputs.to(tl.int64) * width + first,
                mask=is_output[:, None] & inside,
                other=0.0,
            )
            ups = tl.dot(values, tl.trans(up_tile), ups)
    here_out = out + row[:, None] * num_outputs + output[None, :]
    kept = is_row[:, None] & is_output[None, :]
    if SWIGLU:
        result = silu_times(sums, ups, dtype)
    else:
        result = sums.to(dtype)
    if RESIDUAL:
        before = tl.load(here_out, mask=kept, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(dtype)
    tl.store(here_out, result, mask=kept)


@jit
def turned_head(
    x, turns, D: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The head ``[E]`` at ``x``, rotated by a position's cosines and sines at ``turns``."""
    d = tl.arange(0, E)
    if INTERLEAVED:
        is_second = d % 2 == 1
        pair, partner = d // 2, tl.where(is_second, d - 1, d + 1)
    else:
        is_second = d >= D // 2
        pair = tl.where(is_second, d - D // 2, d)
        partner = tl.where(is_second, d - D // 2, d + D // 2)
    own = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=d < D, other=0.0).to(tl.float32)
    cos = tl.load(turns + pair, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(turns + D // 2 + pair, mask=d < D, other=0.0).to(tl.float32)
    return (own * cos + tl.where(is_second, other, -other) * sin).to(x.dtype.element_ty)


@jit
def remember_kernel(
    turned, qkv, cache, places, starts, turns, layer_offset, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (t, h): head h of token t. q and k are rotated into ``turned [T, H + G, D]``; k and v
    go to the token's place in its page, unless that is -1.
    """
    begin(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, E)
    position = row - tl.load(starts + row)
    place = tl.load(places + row)
    kept = tl.where(place != -1, D, 0)
    x = qkv + (row * (H + 2 * G) + head) * D
    if head < H + G:
        value = turned_head(x, turns + position * D, D, E, INTERLEAVED)
        tl.store(turned + (row * (H + G) + head) * D + d, value, mask=d < D)
    else:
        value = tl.load(x + d, mask=d < D, other=0.0)
    if head >= H:  # keys of a layer's page lie before its values, a head's positions together
        here = cache + layer_offset + place + (head - H) * PAGE * D + d
        tl.store(here, value, mask=d < kept)


@jit
def attend_prompt_kernel(
    out, turned, qkv, starts, num_tokens, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h): a block of tokens of head h, each on those from the start of its own prompt
    to itself. The last block, which has most to do, is begun first.
    """
    begin(CHAINED)
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    row, d = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, E)
    start = tl.load(starts + row, mask=row < num_tokens, other=num_tokens).to(tl.int32)
    wide = row.to(tl.int64)[:, None]
    inside = (row < num_tokens)[:, None] & (d < D)[None, :]
    here = (H + G) * D * wide + head * D + d[None, :]
    q = tl.load(turned + here, mask=inside, other=0.0)
    peak = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, E], tl.float32)
    stop = tl.minimum((block + 1) * QUERIES, num_tokens)
    for first in range(tl.min(start, 0) // KEYS * KEYS, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        wide_key = key.to(tl.int64)[:, None]
        real = (key < stop)[:, None] & (d < D)[None, :]
        here_k = (H + G) * D * wide_key + (H + group) * D + d[None, :]
        k = tl.load(turned + here_k, mask=real, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] <= row[:, None]) & (key[None, :] >= start[:, None])
        scores = tl.where(seen, scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        fade = tl.exp(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        here_v = (H + 2 * G) * D * wide_key + (H + G + group) * D + d[None, :]
        v = tl.load(qkv + here_v, mask=real, other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None])
        peak = new_peak
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + H * D * wide + head * D + d[None, :], result, mask=inside)


@jit
def attend_pages(
    peak, total, sums, q, layer, pages, first_block, stop_block, position, scale, G: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The running softmax of ``q [E]``, with blocks of ``KEYS`` cached positions added: those of a
    layer and head, before ``position``.
    """
    d, at = tl.arange(0, E), tl.arange(0, KEYS)
    for block in range(first_block, stop_block):
        first = block * KEYS
        page = tl.multiple_of(tl.load(pages + first // PAGE), 16)
        seen = first + at < position
        inside = seen[:, None] & (d < D)[None, :]
        here = layer + page + (first % PAGE) * D + at[:, None] * D + d[None, :]
        k = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(q[None, :] * k, 1) * scale, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp(scores - new_peak)
        fade = tl.exp(peak - new_peak)
        v = tl.load(here + G * PAGE * D, mask=inside, other=0.0).to(tl.float32)
        total = total * fade + tl.sum(weights, 0)
        sums = sums * fade + tl.sum(weights[:, None] * v, 0)
        peak = new_peak
    return peak, total, sums


@jit
def attend_token_kernel(
    out, parts, qkv, cache, table, seats, positions, turns, layer_offset, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, h, s): part s of what row b's token attends to in head h; the token itself is of
    part 0, which also remembers its k and v. A negative position is a row of padding.
    """
    begin(CHAINED)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, d = head // (H // G), tl.arange(0, E)
    position = tl.load(positions + row)
    real = tl.where(position >= 0, D, 0)
    position = tl.maximum(position, 0)
    pages = table + tl.load(seats + row) * table_width
    heads = qkv + row.to(tl.int64) * (H + 2 * G) * D
    own_turns = turns + position * D
    q = turned_head(heads + head * D, own_turns, D, E, INTERLEAVED).to(tl.float32)
    peak = tl.full([1], -1.0e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([E], tl.float32)
    layer = cache + layer_offset + group * PAGE * D
    if split == 0:
        k = turned_head(heads + (H + group) * D, own_turns, D, E, INTERLEAVED)
        v = tl.load(heads + (H + G + group) * D + d, mask=d < D, other=0.0)
        if head % (H // G) == 0:
            page = tl.load(pages + position // PAGE)
            here = layer + page + (position % PAGE) * D + d
            tl.store(here, k, mask=d < real)
            tl.store(here + G * PAGE * D, v, mask=d < real)
        peak = tl.zeros([1], tl.float32) + tl.sum(q * k.to(tl.float32), 0) * scale
        total += 1.0
        sums = v.to(tl.float32)
    num_blocks = tl.cdiv(position, KEYS)
    each = tl.cdiv(num_blocks, SPLITS)
    first, stop = split * each, tl.minimum((split + 1) * each, num_blocks)
    peak, total, sums = attend_pages(
        peak, total, sums, q, layer, pages, first, stop, position, scale, G, D, E, KEYS, PAGE
    )
    if SPLITS == 1:
        here = out + (row.to(tl.int64) * H + head) * D + d
        tl.store(here, (sums / total).to(out.dtype.element_ty), mask=d < D)
    else:
        here = parts + ((row * H + head) * SPLITS + split) * (E + 2)
        tl.store(here + d, sums)
        one = tl.arange(0, 1)
        tl.store(here + E + one, peak)
        tl.store(here + E + 1 + one, total)


@jit
def join_parts_kernel(
    out, parts, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, h): the parts that `attend_token_kernel` left become one head's result."""
    begin(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    d, split = tl.arange(0, E), tl.arange(0, SPLITS)
    here = parts + ((row * H + head) * SPLITS + split) * (E + 2)
    peaks, totals = tl.load(here + E), tl.load(here + E + 1)
    fades = tl.exp(peaks - tl.max(peaks, 0))
    sums = tl.load(here[:, None] + d[None, :])
    result = tl.sum(sums * fades[:, None], 0) / tl.sum(totals * fades, 0)
    here_out = out + (row.to(tl.int64) * H + head) * D + d
    tl.store(here_out, result.to(out.dtype.element_ty), mask=d < D)
