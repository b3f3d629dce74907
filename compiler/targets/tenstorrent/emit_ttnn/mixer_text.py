"""Optional functions of an emitted ttnn file: partial rotations, experts and Gated DeltaNet.

``helpers`` selects the functions that a program calls. Excludes the calls.
"""

from __future__ import annotations

ROTATION = '''\
def rotate_first(x, cos, sin, *, is_decode_mode, compute_kernel_config):
    """Rotate the first channels of every head. The other channels stay."""
    memory, open_memory = x.memory_config(), L1 if is_decode_mode else DRAM
    x = ttnn.to_memory_config(x, open_memory)
    *rest, size = x.shape
    width = cos.padded_shape[-1]
    turned = ttnn.slice(x, (0, 0, 0, 0), (*rest, width))
    kept = ttnn.slice(x, (0, 0, 0, width), (*rest, size))
    if is_decode_mode:
        turned = ttnn.to_memory_config(turned, users(BATCH, width))
    turned = ttnn.experimental.rotary_embedding_hf(
        turned,
        cos,
        sin,
        is_decode_mode=is_decode_mode,
        compute_kernel_config=compute_kernel_config,
    )
    turned = ttnn.to_memory_config(turned, open_memory)
    joined = ttnn.concat([turned, kept], dim=-1, memory_config=open_memory)
    return ttnn.to_memory_config(joined, memory)
'''

SINKS = '''\
def sink_logits(sinks, scale: float, is_decode: bool):
    """Attention scales its sinks as scores."""
    made = ttnn.multiply(sinks, single(1.0 / scale))
    if not is_decode:
        return made
    heads = ttnn.reshape(made, (made.shape[1], 1))
    return ttnn.pad(heads, [(0, 0), (0, TILE - 1)], 0.0)
'''

CLAMP = '''\
def clamped_swiglu(gate, up, limit: float, alpha: float, *, dtype):
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped."""
    gate = ttnn.clamp(gate, max=limit)
    up = ttnn.add(ttnn.clamp(up, min=-limit, max=limit), 1.0)
    activated = ttnn.mul(gate, ttnn.sigmoid(ttnn.multiply(gate, alpha)))
    return ttnn.mul(activated, up, dtype=dtype)
'''

EXPERTS = '''\
@dataclass(frozen=True)
class Routing:
    """The experts of a step. A block has 32 tokens."""

    sparsity: ttnn.Tensor  # bfloat16 [1, blocks, 1, experts of a chip]: 0 skips
    weights: ttnn.Tensor  # bfloat16 [blocks, experts of a chip, 32, 1]


def routed(logits, top_k: int, num_rows: int, *, renormalize: bool, cluster_axis: int | None):
    """Select experts by ``logits [1, 1, tokens, experts]``. Equal logits keep their order."""
    num_tokens, num_experts = tuple(logits.shape)[-2:]
    values, experts = ttnn.topk(logits, top_k, dim=-1, largest=True, sorted=True, stable=True)
    if renormalize:
        chosen = ttnn.softmax(values, dim=-1)
    else:
        chosen = ttnn.gather(ttnn.softmax(logits, dim=-1), -1, experts)
    weights = ttnn.scatter(ttnn.zeros_like(logits), -1, experts, chosen)
    if cluster_axis is not None:  # a chip has whole experts
        weights = ttnn.to_layout(weights, ttnn.ROW_MAJOR_LAYOUT)
        weights = ttnn.mesh_partition(weights, 3, cluster_axis, memory_config=DRAM)
        weights = ttnn.to_layout(weights, ttnn.TILE_LAYOUT)
        num_experts = weights.shape[-1]
    blocks = num_tokens // TILE
    weights = ttnn.reshape(weights, (1, blocks, TILE, num_experts))
    used = ttnn.slice(weights, (0, 0, 0, 0), (1, blocks, min(num_rows, TILE), num_experts))
    largest = ttnn.max(used, dim=2, keepdim=True)
    sparsity = ttnn.to_layout(largest, ttnn.ROW_MAJOR_LAYOUT)
    return Routing(sparsity, ttnn.permute(weights, (1, 3, 2, 0)))


def expert_blocks(weight):
    """The blocks of an expert's matmul: all of K at once, columns over the cores."""
    k_tiles, n_tiles = (-(-size // TILE) for size in tuple(weight.shape)[-2:])
    item = -(-n_tiles // (GRID * GRID))
    return ttnn.MatmulMultiCoreReuseMultiCast1DProgramConfig(
        compute_with_storage_grid_size=(GRID, GRID),
        in0_block_w=k_tiles,
        out_subblock_h=1,
        out_subblock_w=divisor(item, 4),
        out_block_h=1,
        out_block_w=item,
        per_core_M=1,
        per_core_N=item,
        fuse_batch=False,
        fused_activation=None,
        mcast_in0=True,
    )


def expert_product(x, weight, routing: Routing, bias=None, **named):
    """Rows times the selected experts: ``[blocks, experts, 32, columns]``."""
    blocks, num_experts = tuple(routing.weights.shape)[:2]
    x = ttnn.reshape(x, (1, blocks, TILE, x.shape[-1]))
    made = ttnn.sparse_matmul(
        x,
        weight,
        sparsity=routing.sparsity,
        program_config=expert_blocks(weight),
        memory_config=DRAM,
        **named,
    )
    made = ttnn.reshape(made, (blocks, num_experts, TILE, weight.shape[-1]))
    return made if bias is None else ttnn.add(made, bias)


def combined_experts(x, weight, routing: Routing, bias=None, **named):
    """The weighted sum over the experts: ``[1, 1, tokens, columns]``."""
    blocks, num_experts = tuple(routing.weights.shape)[:2]
    made = ttnn.sparse_matmul(
        x,
        weight,
        sparsity=ttnn.reshape(routing.sparsity, (1, 1, blocks, num_experts)),
        is_input_a_sparse=True,
        is_input_b_sparse=False,
        program_config=expert_blocks(weight),
        memory_config=DRAM,
        **named,
    )
    made = made if bias is None else ttnn.add(made, bias)
    total = ttnn.sum(ttnn.mul(made, routing.weights), dim=1, keepdim=True)
    return ttnn.reshape(total, (1, 1, blocks * TILE, weight.shape[-1]))
'''

DELTA = '''\
def put_slot(state, values, slot: int, dim: int) -> None:
    """Replace a slot of a state."""
    shape = list(state.shape)
    parts = []
    for start, end in ((0, slot), (slot + 1, shape[dim])):
        if start < end:
            first, last = [0] * len(shape), list(shape)
            first[dim], last[dim] = start, end
            parts.append(ttnn.slice(state, first, last))
    parts.insert(1 if slot else 0, values)
    whole = parts[0] if len(parts) == 1 else ttnn.concat(parts, dim=dim, memory_config=DRAM)
    if whole.layout != ttnn.TILE_LAYOUT:
        whole = ttnn.to_layout(whole, ttnn.TILE_LAYOUT)
    ttnn.copy(whole, state)


def weighted_taps(parts, taps):
    """SiLU of the sum of rows times taps, in float32; the result is bfloat16."""
    total = None
    for rows, tap in zip(parts, taps):
        term = ttnn.mul(rows, tap, dtype=ttnn.float32)
        total = term if total is None else ttnn.add(total, term)
    return ttnn.typecast(ttnn.silu(total), ttnn.bfloat16)


def convolve_step(x, taps, window):
    """The next rows of all users. The window has a tensor for an earlier token."""
    out = weighted_taps([*window, x], taps)
    for older, newer in zip(window, [*window[1:], x]):
        ttnn.copy(newer, older)
    return out


def convolve_prompt(x, taps, window, step: PromptStep):
    """LENGTH rows of a user, after the rows in the user's window."""
    size = x.shape[-1]
    end = (1, 1, step.user + 1, size)
    before = [ttnn.slice(rows_of(item), (0, 0, step.user, 0), end) for item in window]
    if step.is_first:
        before = [ttnn.zeros_like(item) for item in before]
    joined = ttnn.concat([*before, rows_of(x)], dim=2, memory_config=DRAM)
    parts = [
        ttnn.to_layout(
            ttnn.slice(joined, (0, 0, tap, 0), (1, 1, tap + LENGTH, size)), ttnn.TILE_LAYOUT
        )
        for tap in range(len(taps))
    ]
    for tap, item in enumerate(window):
        at = step.count + tap
        rows = ttnn.slice(joined, (0, 0, at, 0), (1, 1, at + 1, size))
        put_rows(item, rows, step.user)
    return weighted_taps(parts, taps)


def rows_of(x):
    return ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT)


def put_rows(window, rows, user: int) -> None:
    """Replace the rows of a user in a window."""
    old, size = rows_of(window), rows.shape[-1]
    parts = [rows]
    if user:
        parts.insert(0, ttnn.slice(old, (0, 0, 0, 0), (1, 1, user, size)))
    if user + 1 < TILE:
        parts.append(ttnn.slice(old, (0, 0, user + 1, 0), (1, 1, TILE, size)))
    whole = ttnn.concat(parts, dim=2, memory_config=DRAM)
    ttnn.copy(ttnn.to_layout(whole, ttnn.TILE_LAYOUT), window)


def unit(x):
    """Vectors of length 1, in float32."""
    x = ttnn.typecast(x, ttnn.float32)
    squares = ttnn.sum(ttnn.square(x), dim=-1, keepdim=True)
    return ttnn.mul(x, ttnn.rsqrt(ttnn.add(squares, 1e-6)))


def delta_inputs(x, a, b, a_log, dt_bias, shape, key_heads: int, key_dim: int, value_heads: int):
    """Queries, keys, values, log decay and correction step; ``shape`` is (users, tokens)."""
    rows, width = shape[0] * shape[1], key_heads * key_dim
    size = x.shape[-1]

    def columns_from(first, last, heads):
        chosen = ttnn.slice(x, (0, 0, 0, first), (1, 1, rows, last))
        return ttnn.reshape(chosen, (*shape, heads, (last - first) // heads))

    q, k = (unit(columns_from(n * width, (n + 1) * width, key_heads)) for n in (0, 1))
    v = ttnn.typecast(columns_from(2 * width, size, value_heads), ttnn.float32)
    a, b, a_log, dt_bias = (ttnn.typecast(item, ttnn.float32) for item in (a, b, a_log, dt_bias))
    heads = (1, 1, rows, value_heads)
    a, b = (ttnn.slice(item, (0, 0, 0, 0), heads) for item in (a, b))
    vectors = [ttnn.slice(item, (0, 0, 0, 0), (1, 1, 1, value_heads)) for item in (a_log, dt_bias)]
    decay = ttnn.mul(ttnn.neg(ttnn.exp(vectors[0])), ttnn.softplus(ttnn.add(a, vectors[1])))
    return q, k, v, decay, ttnn.sigmoid(b)


def delta_step(x, a, b, a_log, dt_bias, memory, **heads):
    """The delta rule for the next rows of all users."""
    shape = (BATCH, 1)
    q, k, v, decay, beta = delta_inputs(x, a, b, a_log, dt_bias, shape, **heads)
    decay, beta = (ttnn.reshape(item, (*shape, item.shape[-1])) for item in (decay, beta))
    out, after = ttnn.transformer.fused_recurrent_gated_delta_rule(
        q, k, v, decay, beta, initial_state=memory, output_final_state=True
    )
    ttnn.copy(after, memory)
    return value_columns(out, BATCH)


def delta_prompt(x, a, b, a_log, dt_bias, memory, step: PromptStep, **heads):
    """The delta rule for LENGTH rows of a user. Rows after the prompt change no state."""
    shape = (1, LENGTH)
    q, k, v, decay, beta = delta_inputs(x, a, b, a_log, dt_bias, shape, **heads)
    decay, beta = (ttnn.mul(item, step.real) for item in (decay, beta))
    decay, beta = (ttnn.reshape(item, (*shape, item.shape[-1])) for item in (decay, beta))
    _, count, keys, values = memory.shape
    state = ttnn.slice(memory, (step.user, 0, 0, 0), (step.user + 1, count, keys, values))
    if step.is_first:
        state = ttnn.zeros_like(state)
    out, after = ttnn.transformer.chunk_gated_delta_rule(
        q, k, v, decay, beta, initial_state=state, output_final_state=True, chunk_size=32
    )
    put_slot(memory, after, step.user, 0)
    return value_columns(out, LENGTH)


def value_columns(out, rows: int):
    """Heads side by side, bfloat16, in whole tiles of rows."""
    width = out.shape[-2] * out.shape[-1]
    out = ttnn.reshape(ttnn.to_layout(out, ttnn.TILE_LAYOUT), (1, 1, rows, width))
    if rows % TILE:
        out = ttnn.pad(out, [(0, 0), (0, 0), (0, -rows % TILE), (0, 0)], 0.0)
    return ttnn.typecast(out, ttnn.bfloat16)


def norm_value_heads(x, count: int, **named):
    """A norm of every head of the values."""
    _, _, rows, width = x.shape
    normed = ttnn.rms_norm(ttnn.reshape(x, (1, rows, count, width // count)), **named)
    return ttnn.reshape(normed, (1, 1, rows, width))
'''

_HELPERS = {
    "rotate_first(": ROTATION,
    "sink_logits(": SINKS,
    "clamped_swiglu(": CLAMP,
    "routed(": EXPERTS,
    "delta_step(": DELTA,
}


def helpers(functions: str) -> str:
    """Return the optional functions that ``functions`` call."""
    return "\n\n".join(text for call, text in _HELPERS.items() if call in functions)
