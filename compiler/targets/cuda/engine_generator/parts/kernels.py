"""Triton kernels. B: decode rows, T: prompt tokens, H: query heads, G: key/value heads, D: channels
per head, E: power of 2 above D.

Every kernel waits for earlier kernels before it accesses their outputs. Before the wait, a
``CHAINED`` kernel may read weights only.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch lack Triton, and launch no kernel
    triton, tl = None, SimpleNamespace(constexpr=None)

# A single kernel serves every fitting row count.
COUNTS = ["num_rows", "num_tokens", "num_pairs"]
jit = partial(triton.jit, do_not_specialize=COUNTS) if triton else lambda kernel: kernel


def power(size: int) -> int:
    """Return a kernel's block for ``size`` elements: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@jit
def begin(CHAINED: tl.constexpr):
    """Allow the next kernel to launch, and wait for the previous kernels."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def embed_kernel(
    out, tokens, table, vocab, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Program t: load token t's row in ``table``, zeros for an invalid token."""
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
    """Program t: RMSNorm for row t in float32, rounded, then multiplied by ``weight``."""
    at = tl.arange(0, BLOCK)
    dtype = out.dtype.element_ty
    factors = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    begin(CHAINED)
    here = tl.program_id(0).to(tl.int64) * width + at
    values = tl.load(x + here, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = (values * scale).to(dtype).to(tl.float32) * factors
    tl.store(out + here, normed.to(dtype), mask=at < width)


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up for float32 sums, rounded as in torch."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@jit
def swiglu_kernel(out, gate_up, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (t, i): SwiGLU for a column block in row t. Gates precede ups."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = gate_up + row * 2 * width + at
    gate = tl.load(here, mask=at < width, other=0.0)
    up = tl.load(here + width, mask=at < width, other=0.0)
    tl.store(out + row * width + at, silu_times(gate, up, out.dtype.element_ty), mask=at < width)


@jit
def norm_scales(
    values, here_x, is_row, column, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return the RMSNorm factor per row. ``values [P, B, C]``: its first columns."""
    squares = tl.sum(tl.sum(values.to(tl.float32) * values.to(tl.float32), 2), 0)
    for first in range(COLUMNS, WIDTH, COLUMNS):
        wanted = is_row[None, :, None] & (first + column < WIDTH)[:, None, :]
        others = tl.load(here_x + first, mask=wanted, other=0.0).to(tl.float32)
        squares += tl.sum(tl.sum(others * others, 2), 0)
    return tl.rsqrt(squares / WIDTH + eps)


@jit
def multiplied(
    sums, values, tile, factors, scale, dtype: tl.constexpr, NORM: tl.constexpr, ONE: tl.constexpr
):  # fmt: skip
    """Add ``tile [P, O, C]`` times ``values [P, B, C]`` to ``sums [P, O, B]``.

    For ``ONE`` row, ``sums [P, O, C]`` has unsummed products. The values' RMSNorm comes first:
    ``scale [B]`` per row, ``factors [P, C]``.
    """
    if NORM:
        normed = (values.to(tl.float32) * scale[None, :, None]).to(dtype).to(tl.float32)
        values = (normed * factors.to(tl.float32)[:, None, :]).to(dtype)
    if ONE:
        sums += tile.to(tl.float32) * values.to(tl.float32)
    else:
        sums = tl.dot(tile, tl.permute(values, (0, 2, 1)), sums)
    return sums


@jit
def joined(sums, ONE: tl.constexpr):
    """Return the sums over all parts, ``[O, B]``."""
    return tl.sum(tl.sum(sums, 2), 0)[:, None] if ONE else tl.sum(sums, 0)


@jit
def put(here, values, kept, ADDED: tl.constexpr):
    """Store values, or add them."""
    if ADDED:
        before = tl.load(here, mask=kept, other=0.0).to(tl.float32)
        values = (before + values.to(tl.float32)).to(values.dtype)
    tl.store(here, values, mask=kept)


@jit
def product_kernel(
    out, x, weight, norm, num_rows, num_outputs, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: ``OUTPUTS`` columns of ``out [B, outputs] = x [B, width] weight^T``.

    A program takes all rows, up to ``ROWS``, and reads each weight once. The first read precedes
    the wait, and reads overlap with multiplies. Warps split the columns into ``PARTS``, not the
    outputs.
    """
    dtype = out.dtype.element_ty
    EACH: tl.constexpr = COLUMNS // PARTS
    ONE: tl.constexpr = ROWS == 1
    row = tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, PARTS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    here_x = x + row[None, :, None] * WIDTH + column[:, None, :]
    here_w = weight + output[None, :, None] * WIDTH + column[:, None, :]
    to_ups = num_outputs.to(tl.int64) * WIDTH
    wanted = is_output[None, :, None] & (column < WIDTH)[:, None, :]
    tile = tl.load(here_w, mask=wanted, other=0.0)
    up_tile = tl.load(here_w + to_ups, mask=wanted, other=0.0) if SWIGLU else tile
    factors = tl.load(norm + column, mask=column < WIDTH, other=0.0) if NORM else column
    begin(CHAINED)
    wanted = is_row[None, :, None] & (column < WIDTH)[:, None, :]
    values = tl.load(here_x, mask=wanted, other=0.0)
    scale = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        scale = norm_scales(values, here_x, is_row, column, eps, WIDTH, COLUMNS)
    sums = tl.zeros([PARTS, OUTPUTS, EACH if ONE else ROWS], tl.float32)
    ups = sums
    for first in tl.range(COLUMNS, WIDTH, COLUMNS, num_stages=1):
        inside = first + column < WIDTH
        wanted = is_output[None, :, None] & inside[:, None, :]
        next_tile = tl.load(here_w + first, mask=wanted, other=0.0)
        next_up = tl.load(here_w + to_ups + first, mask=wanted, other=0.0) if SWIGLU else next_tile
        next_factors = tl.load(norm + first + column, mask=inside, other=0.0) if NORM else factors
        wanted = is_row[None, :, None] & inside[:, None, :]
        next_values = tl.load(here_x + first, mask=wanted, other=0.0)
        sums = multiplied(sums, values, tile, factors, scale, dtype, NORM, ONE)
        if SWIGLU:
            ups = multiplied(ups, values, up_tile, factors, scale, dtype, NORM, ONE)
        tile, up_tile, factors, values = next_tile, next_up, next_factors, next_values
    result = joined(multiplied(sums, values, tile, factors, scale, dtype, NORM, ONE), ONE)
    if SWIGLU:
        ups = multiplied(ups, values, up_tile, factors, scale, dtype, NORM, ONE)
        result = silu_times(result, joined(ups, ONE), dtype)
    here_out = out + row[None, :] * num_outputs + output[:, None]
    put(here_out, result.to(dtype), is_output[:, None] & is_row[None, :], RESIDUAL)


@jit
def turned_heads(
    x, inside, turns, D: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Return heads ``[N, E]`` from ``x [N, 1]``, rotated by cosines and sines at ``turns``.

    ``inside`` masks heads. ``turns`` is per head or common.
    """
    d = tl.arange(0, E)[None, :]
    real = inside & (d < D)
    own = tl.load(x + d, mask=real, other=0.0).to(tl.float32)
    if INTERLEAVED:
        pair = tl.arange(0, E // 2)[None, :]
        cos = tl.load(turns + pair, mask=pair < D // 2, other=0.0).to(tl.float32)
        sin = tl.load(turns + D // 2 + pair, mask=pair < D // 2, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(own, (own.shape[0], E // 2, 2)))
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        return tl.reshape(turned, (own.shape[0], E)).to(x.dtype.element_ty)
    is_second = d >= D // 2
    pair = tl.where(is_second, d - D // 2, d)
    partner = tl.where(is_second, d - D // 2, d + D // 2)
    other = tl.load(x + partner, mask=real, other=0.0).to(tl.float32)
    cos = tl.load(turns + pair, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(turns + D // 2 + pair, mask=d < D, other=0.0).to(tl.float32)
    return (own * cos + tl.where(is_second, other, -other) * sin).to(x.dtype.element_ty)


@jit
def remember_kernel(
    turned, qkv, cache, places, starts, turns, num_rows, layer_offset, TOKENS: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h): head h in a token block.

    Rotate q and k into ``turned [T, H + G, D]``. Store k and v at the tokens' places in their
    pages, except for places of -1.
    """
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, d = tl.program_id(1), tl.arange(0, E)[None, :]
    is_row = row < num_rows
    position = tl.where(is_row, row - tl.load(starts + row, mask=is_row, other=0), 0)
    place = tl.load(places + row, mask=is_row, other=-1)
    real = is_row[:, None] & (d < D)
    x = qkv + ((row * (H + 2 * G) + head) * D)[:, None]
    if head < H + G:
        own_turns = turns + (position * D)[:, None]
        value = turned_heads(x, is_row[:, None], own_turns, D, E, INTERLEAVED)
        tl.store(turned + ((row * (H + G) + head) * D)[:, None] + d, value, mask=real)
    else:
        value = tl.load(x + d, mask=real, other=0.0)
    if head >= H:  # keys of a layer's page precede its values, by head and position
        here = cache + (layer_offset + place + (head - H) * PAGE * D)[:, None] + d
        tl.store(here, value, mask=real & (place != -1)[:, None])


@jit
def attend_prompt_kernel(
    out, turned, qkv, starts, num_tokens, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, h): causal attention for a token block and head h within its own prompts.

    The last block has the most work and starts first.
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
        key_index = key.to(tl.int64)[:, None]
        real = (key < stop)[:, None] & (d < D)[None, :]
        here_k = (H + G) * D * key_index + (H + group) * D + d[None, :]
        k = tl.load(turned + here_k, mask=real, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] <= row[:, None]) & (key[None, :] >= start[:, None])
        scores = tl.where(seen, scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        fade = tl.exp(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        here_v = (H + 2 * G) * D * key_index + (H + G + group) * D + d[None, :]
        v = tl.load(qkv + here_v, mask=real, other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None])
        peak = new_peak
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + H * D * wide + head * D + d[None, :], result, mask=inside)


@jit
def page_of(pages, position, stop, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Return the page address for a position below ``stop``, per key for several pages."""
    position += tl.arange(0, KEYS) if KEYS > PAGE else 0
    return tl.load(pages + position // PAGE, mask=position < stop, other=0)


@jit
def remembered(
    layer, page, first, stop, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return a head's keys, values ``[KEYS, E]`` from ``first`` in ``page``, zero from ``stop``."""
    at, d = tl.arange(0, KEYS)[:, None], tl.arange(0, E)[None, :]
    aligned = page // 16 * 16  # always true; tells the compiler to use wide loads
    aligned = aligned[:, None] - at // PAGE * PAGE * D if KEYS > PAGE else aligned
    here = layer + aligned + (first % PAGE) * D + at * D + d
    real = (first + at < stop) & (d < D)
    keys = tl.load(here, mask=real, other=0.0)
    return keys, tl.load(here + G * PAGE * D, mask=real, other=0.0)


@jit
def attended(peak, total, sums, q, k, v, num_keys, scale, KEYS: tl.constexpr):
    """Update the running softmax for ``q [R, E]`` with ``num_keys`` keys and values."""
    seen = (tl.arange(0, KEYS) < num_keys)[None, :]
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1.0e30)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - new_peak[:, None]), 0.0)
    fade = tl.exp(peak - new_peak)
    sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None])
    return new_peak, total * fade + tl.sum(weights, 1), sums


@jit
def leave_part(here, peak, total, sums, is_head, E: tl.constexpr):
    """Store a running softmax for `join_parts_kernel`: sums, peak and total of each head."""
    tl.store(here + tl.arange(0, E)[None, :], sums, mask=is_head)
    tl.store(here + E, peak[:, None], mask=is_head)
    tl.store(here + E + 1, total[:, None], mask=is_head)


@jit
def attend_token_kernel(
    out, parts, qkv, cache, table, slots, positions, turns, layer_offset, table_width, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, g, s): part s of row b's attention in the ``R`` or fewer heads of group g.

    Part 0 includes the token, and stores its k and v. A negative position is padding. Reads of
    earlier steps' keys precede the wait.
    """
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    known = tl.load(positions + row)
    position, real = tl.maximum(known, 0), tl.where(known >= 0, D, 0)
    pages = table + tl.load(slots + row) * table_width
    layer = cache + layer_offset + group * PAGE * D
    each = tl.cdiv(tl.cdiv(position, KEYS), SPLITS) * KEYS
    begins, stop = split * each, tl.minimum((split + 1) * each, position)
    page = page_of(pages, begins, stop, KEYS, PAGE)
    k, v = remembered(layer, page, begins, stop, G, D, E, KEYS, PAGE)
    page = page_of(pages, begins + KEYS, stop, KEYS, PAGE)
    begin(CHAINED)
    d, head, one = tl.arange(0, E)[None, :], tl.arange(0, R)[:, None], tl.arange(0, 1)[:, None]
    is_head = head < H // G
    qkv += row.to(tl.int64) * (H + 2 * G) * D
    own_turns = turns + position * D
    q_heads, k_head = qkv + (group * (H // G) + head) * D, qkv + (H + group + one) * D
    q = turned_heads(q_heads, is_head, own_turns, D, E, INTERLEAVED)
    own_k = turned_heads(k_head, one == 0, own_turns, D, E, INTERLEAVED)
    own_v = tl.load(k_head + G * D + d, mask=d < D, other=0.0)
    if split == 0:
        here = layer + tl.load(pages + position // PAGE) + (position % PAGE) * D + d
        tl.store(here, own_k, mask=d < real)
        tl.store(here + G * PAGE * D, own_v, mask=d < real)
    is_own = tl.where(split == 0, 1.0, 0.0)
    score = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
    peak, total = tl.where(split == 0, score, -1.0e30), tl.zeros([R], tl.float32) + is_own
    sums = tl.zeros([R, E], tl.float32) + own_v.to(tl.float32) * is_own
    for first in tl.range(begins + KEYS, stop, KEYS, num_stages=1):
        next_k, next_v = remembered(layer, page, first, stop, G, D, E, KEYS, PAGE)
        page = page_of(pages, first + KEYS, stop, KEYS, PAGE)
        peak, total, sums = attended(peak, total, sums, q, k, v, KEYS, scale, KEYS)
        begins, k, v = first, next_k, next_v
    peak, total, sums = attended(peak, total, sums, q, k, v, stop - begins, scale, KEYS)
    index = row.to(tl.int64) * H + group * (H // G) + head
    if SPLITS == 1:
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + index * D + d, result, mask=is_head & (d < D))
    else:
        leave_part(parts + (index * SPLITS + split) * (E + 2), peak, total, sums, is_head, E)


@jit
def join_parts_kernel(
    out, parts, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, h): join the parts of `attend_token_kernel` for a head."""
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
