"""Triton kernels for mixers. N: sequences, K and V: channels per key and value in linear attention,
C: experts per row, P: row-expert pairs. The module above explains the other letters.
"""

from __future__ import annotations

from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import (
    begin,
    jit,
    silu_times,
    tl,
)


@jit
def norm_heads_kernel(
    out, x, q_norm, k_norm, x_width, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (t, h): copy head h in q, k and v, with an RMSNorm for q and k."""
    begin(CHAINED)
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, E)
    value = tl.load(x + row * x_width + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    if head < H + G:
        of_q = tl.load(q_norm + d, mask=d < D, other=0.0)
        of_k = tl.load(k_norm + d, mask=d < D, other=0.0)
        scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
        value = value * scale * tl.where(head < H, of_q, of_k)
    here = out + (row * (H + 2 * G) + head) * D + d
    tl.store(here, value.to(out.dtype.element_ty), mask=d < D)


@jit
def gate_kernel(
    out, x, gates, width, gates_stride, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Program (t, i): multiply a column block in row t by its gates' sigmoid."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gates_stride + at, mask=at < width, other=0.0).to(tl.float32)
    result = (value / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * width + at, result, mask=at < width)


@jit
def convolve_token_kernel(
    out, x, weight, windows, slots, positions, width, x_width, slot_size, layer_offset,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, i): convolve a channel block in row b's token with its slot's window.

    The window moves by a token, except for padding.
    """
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    real = inside & (tl.load(positions + row) >= 0)
    window = windows + tl.load(slots + row) * slot_size + layer_offset + channel * (TAPS - 1)
    weights = weight + channel * TAPS
    own = tl.load(x + row * x_width + channel, mask=inside, other=0.0).to(tl.float32)
    total = own * tl.load(weights + TAPS - 1, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS - 1):
        seen = tl.load(window + tap, mask=inside, other=0.0)
        total += seen * tl.load(weights + tap, mask=inside, other=0.0)
        if tap > 0:
            tl.store(window + tap - 1, seen, mask=real)
    tl.store(window + TAPS - 2, own, mask=real)
    tl.store(out + row * width + channel, total / (1.0 + tl.exp(-total)), mask=inside)


@jit
def delta_kernel(
    out, mixed, x, a_log, dt_bias, norm, memories, slots, firsts, counts, x_width, slot_size,
    layer_offset, eps, length_eps, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, FRESH: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (n, h): head h of sequence n, token by token, on its memory ``[K, V]``.

    ``FRESH``: prompts with an empty memory, ``counts [N]`` rows from ``firsts [N]``. Otherwise row
    n only, if its position in ``counts`` is not negative.
    """
    begin(CHAINED)
    sequence, head = tl.program_id(0), tl.program_id(1)
    count, slot = tl.load(counts + sequence), tl.load(slots + sequence)
    if FRESH:
        first = tl.load(firsts + sequence)
    else:
        first, count = sequence.to(tl.int64), tl.where(count >= 0, 1, 0)
    i, j = tl.arange(0, KEYS), tl.arange(0, VALUES)
    inside = (i < K)[:, None] & (j < V)[None, :] & (count > 0)
    here = memories + slot * slot_size + layer_offset + head * (K * V)
    here += i[:, None] * V + j[None, :]
    memory = tl.zeros([KEYS, VALUES], tl.float32)
    if not FRESH:
        memory = tl.load(here, mask=inside, other=0.0)
    group = head // (H // G)
    rate, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    factors = tl.load(norm + j, mask=j < V, other=0.0)
    for row in range(first, first + count):
        qkv = mixed + row * (2 * G * K + H * V)
        q = tl.load(qkv + group * K + i, mask=i < K, other=0.0)
        k = tl.load(qkv + (G + group) * K + i, mask=i < K, other=0.0)
        v = tl.load(qkv + 2 * G * K + head * V + j, mask=j < V, other=0.0)
        q *= tl.rsqrt(tl.sum(q * q, 0) + length_eps) * (1.0 / K**0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + length_eps)
        rest = x + row * x_width + 2 * G * K + H * V
        a = tl.load(rest + H * V + head).to(tl.float32) + bias
        b = tl.load(rest + H * V + H + head).to(tl.float32)
        # log(1 + exp(a)) equals a in all bits above 20
        grown = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        memory *= tl.exp(-rate * grown)
        wrong = (v - tl.sum(memory * k[:, None], 0)) / (1.0 + tl.exp(-b))
        memory += k[:, None] * wrong[None, :]
        read = tl.sum(memory * q[:, None], 0)
        z = tl.load(rest + head * V + j, mask=j < V, other=0.0).to(tl.float32)
        result = read * tl.rsqrt(tl.sum(read * read, 0) / V + eps) * factors
        result *= z / (1.0 + tl.exp(-z))
        tl.store(out + (row * H + head) * V + j, result.to(out.dtype.element_ty), mask=j < V)
    tl.store(here, memory, mask=inside)


@jit
def route_kernel(
    shares, chosen, logits, positions, num_experts, stride, C: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program t: row t's ``C`` best experts with shares (sum 1), or -1 for padding."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    known = expert < num_experts
    found = tl.load(logits + row * stride + expert, mask=known, other=-1.0e30).to(tl.float32)
    left = tl.where(known, tl.exp(found - tl.max(found, 0)), -1.0)
    best_shares, best = tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    for index in range(C):
        place = tl.argmax(left, 0)
        best_shares = tl.where(choice == index, tl.max(left, 0), best_shares)
        best = tl.where(choice == index, tl.minimum(place, num_experts - 1), best)
        left = tl.where(expert == place, -1.0, left)
    if positions is not None:
        best = tl.where(tl.load(positions + row) >= 0, best, -1)
    here = row * C + choice
    tl.store(shares + here, best_shares / tl.sum(best_shares, 0), mask=choice < C)
    tl.store(chosen + here, best, mask=choice < C)


@jit
def order_kernel(
    order, starts, chosen, num_pairs, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Program e: write the pairs of expert e to ``order`` from ``starts[e]`` on.

    The program after the last expert writes the end.
    """
    begin(CHAINED)
    expert = tl.program_id(0)
    start = tl.zeros([], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + pair, mask=pair < num_pairs, other=-1)
        start += tl.sum(((found >= 0) & (found < expert)).to(tl.int32), 0)
    tl.store(starts + expert, start)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(chosen + pair, mask=pair < num_pairs, other=-1)
        ours = (found == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(ours, 0) - 1, pair, mask=ours != 0)
        start += tl.sum(ours, 0)


@jit
def expert_product_kernel(
    out, x, weight, chosen, order, starts, num_outputs, WIDTH: tl.constexpr, C: tl.constexpr,
    OWN: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr, ALONE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, g): ``OUTPUTS`` columns of ``out [P, outputs]``.

    ``ALONE``: for pair g. Else for all pairs of expert g, ``PAIRS`` per iteration. ``OWN``: ``x``
    has a row per pair, else per token.
    """
    begin(CHAINED)
    group = tl.program_id(1)
    dtype = out.dtype.element_ty
    if ALONE:
        expert = tl.load(chosen + group)
        start, stop = group, tl.where(expert >= 0, group + 1, group)
    else:
        expert = group
        start, stop = tl.load(starts + group), tl.load(starts + group + 1)
    output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    to_ups = num_outputs.to(tl.int64) * WIDTH
    here_w = weight + expert.to(tl.int64) * to_ups * (2 if SWIGLU else 1)
    here_w += output.to(tl.int64)[:, None] * WIDTH + column[None, :]
    for first in range(start, stop, PAIRS):
        place = first + tl.arange(0, PAIRS)
        pair = place if ALONE else tl.load(order + place, mask=place < stop, other=0)
        row = (pair if OWN else pair // C).to(tl.int64)
        here_x = x + row[:, None] * WIDTH + column[None, :]
        sums = tl.zeros([OUTPUTS, COLUMNS if ALONE else PAIRS], tl.float32)
        ups = sums
        for at in range(0, WIDTH, COLUMNS):
            inside = at + column < WIDTH
            wanted = (output < num_outputs)[:, None] & inside[None, :]
            tile = tl.load(here_w + at, mask=wanted, other=0.0)
            given = (place < stop)[:, None] & inside[None, :]
            values = tl.load(here_x + at, mask=given, other=0.0)
            sums = pairs_multiplied(sums, tile, values, ALONE)
            if SWIGLU:
                up_tile = tl.load(here_w + to_ups + at, mask=wanted, other=0.0)
                ups = pairs_multiplied(ups, up_tile, values, ALONE)
        result = tl.sum(sums, 1)[:, None] if ALONE else sums
        if SWIGLU:
            result = silu_times(result, tl.sum(ups, 1)[:, None] if ALONE else ups, dtype)
        here = out + pair.to(tl.int64)[None, :] * num_outputs + output[:, None]
        kept = (output < num_outputs)[:, None] & (place < stop)[None, :]
        tl.store(here, result.to(dtype), mask=kept)


@jit
def pairs_multiplied(sums, tile, values, ALONE: tl.constexpr):
    """Add ``tile [O, columns]`` times ``values [P, columns]`` to ``sums [O, P]``.

    For a single pair, ``sums [O, columns]`` has unsummed products.
    """
    if ALONE:
        sums += tile.to(tl.float32) * values.to(tl.float32)
    else:
        sums = tl.dot(tile, tl.trans(values), sums)
    return sums


@jit
def expert_sum_kernel(
    out, products, shares, chosen, shared, logits, width, num_experts, stride, C: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (t, i): add row t's weighted expert outputs and its gated ``shared`` output.

    Covers a column block in ``out``.
    """
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(logits + row * stride + num_experts).to(tl.float32)
    total = tl.load(shared + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    total = total / (1.0 + tl.exp(-gate))
    for choice in range(C):
        pair = row * C + choice
        has = tl.load(chosen + pair) >= 0
        y = tl.load(products + pair * width + at, mask=(at < width) & has, other=0.0)
        total += tl.load(shares + pair) * y.to(tl.float32)
    before = tl.load(out + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (before + total).to(out.dtype.element_ty), mask=at < width)
