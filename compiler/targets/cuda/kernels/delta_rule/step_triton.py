"""Gated delta rule for a single token, with unit vectors, gates, state and gated norm, in float32.

A program computes a head. Shape letters: B rows, H value heads, G key heads, K key size, V value
size, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded

EPS = tl.constexpr(1e-6)
"""Epsilon of the query and key normalization. The model defines the value."""
FUSES = False
"""Contract products and sums. The compiler contracts loops and single steps differently, and the
rows of drafts must equal single steps.
"""


class DeltaSizes(NamedTuple):
    """Sizes as a compile-time argument, by shape letter. KEYS and VALUES are blocks of K and V."""

    H: int
    G: int
    K: int
    V: int
    KEYS: int
    VALUES: int


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The delta rule's inputs; see :data:`ops.gated_delta_rule`.

    Attributes:
        qkv: ``[T, 2 G K + H V]`` with any row stride.
        a, b: ``[T, H]`` with any row stride.
        a_log, dt_bias: ``[H]``.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    num_key_heads: int
    key_dim: int

    @property
    def num_heads(self) -> int:
        return self.a.shape[1]

    @property
    def value_dim(self) -> int:
        width = self.qkv.shape[1] - 2 * self.num_key_heads * self.key_dim
        return width // self.num_heads

    @property
    def sizes(self) -> DeltaSizes:
        """Return the sizes for kernels."""
        blocks = block_of(self.key_dim), block_of(self.value_dim)
        heads = self.num_heads, self.num_key_heads
        return DeltaSizes(*heads, self.key_dim, self.value_dim, *blocks)

    def check(self, state: Tensor) -> None:
        """Check the kernels' assumptions, with ``state [S, H, K, V]``."""
        assert state.shape[1:] == (self.num_heads, self.key_dim, self.value_dim)
        assert state.is_contiguous() and self.num_heads % self.num_key_heads == 0
        assert self.a.shape == self.b.shape and self.qkv.stride(1) == 1
        assert self.num_heads == 1 or self.a.stride(1) == self.b.stride(1) == 1


@triton.jit
def decay_of(a, a_log, dt_bias):
    """Return the state's log decay: -exp(a_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    # softplus is log(1 + exp(x)). Above 20, it equals x in float32.
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def state_at(state_ptr, slot, h, SIZES: tl.constexpr):
    """Return the pointers and the mask ``[KEYS, VALUES]`` of a head's state."""
    i, j = tl.arange(0, SIZES.KEYS)[:, None], tl.arange(0, SIZES.VALUES)[None, :]
    pointers = state_ptr + (slot * SIZES.H + h) * (SIZES.K * SIZES.V) + i * SIZES.V + j
    return pointers, (i < SIZES.K) & (j < SIZES.V)


@triton.jit
def update_state(state, q, k, v, decay, beta, K: tl.constexpr):
    """Return the state after a token, and its output ``[VALUES]``."""
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * (1.0 / K**0.5)
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    state *= tl.exp(decay)
    wrong = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * wrong[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def gated_norm(o, weight, z, eps, V: tl.constexpr):
    """Return the RMSNorm of an output ``[VALUES]``, times the SiLU of ``z``."""
    return o * tl.rsqrt(tl.sum(o * o) / V + eps) * weight * (z * tl.sigmoid(z))


@triton.jit
def _step_kernel(
    out_ptr,
    qkv_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    z_ptr,
    norm_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_stride,
    qkv_stride,
    a_stride,
    b_stride,
    z_stride,
    eps,
    SIZES: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    if not EARLY:
        wait_for_inputs(CHAINED)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions_ptr + row), tl.load(slots_ptr + row)
    G: tl.constexpr = SIZES.G
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    i, j = tl.arange(0, SIZES.KEYS), tl.arange(0, SIZES.VALUES)
    is_key, is_value = i < K, j < V
    pointers, inside = state_at(state_ptr, slot, h, SIZES)
    state = tl.load(pointers, mask=inside & (position > 0), other=0.0)
    a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
    weight = tl.load(norm_ptr + j, mask=is_value, other=0.0)
    if EARLY:
        wait_for_inputs(CHAINED)
    qkv = qkv_ptr + row * qkv_stride
    g = h // (SIZES.H // G)
    q = tl.load(qkv + g * K + i, mask=is_key, other=0.0)
    k = tl.load(qkv + (G + g) * K + i, mask=is_key, other=0.0)
    v = tl.load(qkv + 2 * G * K + h * V + j, mask=is_value, other=0.0)
    a, b = tl.load(a_ptr + row * a_stride + h), tl.load(b_ptr + row * b_stride + h)
    z = tl.load(z_ptr + row * z_stride + h * V + j, mask=is_value, other=0.0)
    decay = decay_of(a, a_log, dt_bias)
    state, o = update_state(state, q, k, v, decay, tl.sigmoid(b), K)
    tl.store(pointers, state, mask=inside & (position >= 0))
    y = gated_norm(o, weight, z, eps, V)
    y = rounded(tl.where(position >= 0, y, 0.0), out_ptr.dtype.element_ty, CHAINED)
    tl.store(out_ptr + row * out_stride + h * V + j, y, mask=is_value)


def delta_rule_step(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    is_early: bool = False,
) -> None:
    """Run the delta rule and the gated norm for one token per sequence. Inputs are float32.

    Args:
        state: ``[S, H, K, V]``. Updated in the rows' slots.
        positions: int64 ``[B]``. Position 0 starts from a zero state. Negative: the result is zero
            and the state does not change.
        slots: int64 ``[B]``.
        is_early: Read positions, slots and state before the wait for the previous kernel. No
            kernel of this chain writes them before.
    """
    inputs.check(state)
    weight, eps = norm
    assert out.shape == z.shape and z.stride(1) == out.stride(1) == 1
    sizes = inputs.sizes
    _step_kernel[(len(out), inputs.num_heads)](
        out,
        inputs.qkv,
        inputs.a,
        inputs.b,
        inputs.a_log,
        inputs.dt_bias,
        z,
        weight,
        state,
        positions,
        slots,
        out.stride(0),
        inputs.qkv.stride(0),
        inputs.a.stride(0),
        inputs.b.stride(0),
        z.stride(0),
        eps,
        SIZES=sizes,
        EARLY=is_early,
        num_warps=min(16, max(1, sizes.KEYS * sizes.VALUES // 2048)),
        enable_fp_fusion=FUSES,
        **chained(out),
    )
