"""Rates and latencies of Wormhole boards for the performance model: documented, assumed, fitted.

The fitted ones were made by ``python -m bench fit-perf-model``, which also checks them.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCK = 1e9
"""Cycles a second."""
PHASE_CYCLES = 16
"""Of a product of two 32 x 32 tiles in one phase: 2,048 multiplications a cycle, documented."""
SPREAD_BYTES_PER_S = 190e9
"""DRAM rate reached on interleaved tensors: caches, a prompt's activations. Documented."""
L1_BYTES_PER_S = 64 * 32e9
"""All cores' L1 through their network ports, 32 bytes a cycle each. Documented peak."""
LINK_BYTES_PER_S = 2 * 12.5e9
"""Two Ethernet links between neighbours, one direction. Documented for an N300, else assumed."""
HOP_SECONDS = 1e-6
"""A hop of a packet that is only passed on. Assumed."""
SOFTMAX_CYCLES = 1100
"""Of the vector unit for a tile of scores: 32 vectors, about 35 instructions each. Assumed."""
SMALLEST_FITTED = 1_000_000_000
"""Weights of a model below which no published row tells of the constants: the smallest there is
Llama3.2-1B. A step is then mostly what it costs once."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The performance model's fitted constants; all positive.

    Decode: ``bank_bytes_per_s``: DRAM rate of products whose weights lie bank by bank.
    ``tile_cycles``: least cycles a reader needs for a weight tile, whatever its format.
    ``op_seconds``: start and gap of an instruction. ``bias_seconds``: a product's bias.
    ``ring_seconds``: a step of a sum around the chips; ``galaxy_ring_seconds``: of one over an
    axis of a mesh of two. ``step_seconds``: once a step, the host's part included.

    Prefill: ``product_factor``: cycles of a tile product over the peak's. ``prefill_op_seconds``,
    ``prefill_ring_seconds``, ``prefill_seconds``: as in decode, without a trace.
    """

    bank_bytes_per_s: float
    tile_cycles: float
    op_seconds: float
    bias_seconds: float
    ring_seconds: float
    galaxy_ring_seconds: float
    step_seconds: float
    product_factor: float
    prefill_op_seconds: float
    prefill_ring_seconds: float
    prefill_seconds: float


START = Constants(
    bank_bytes_per_s=250e9,
    tile_cycles=32.0,
    op_seconds=10e-6,
    bias_seconds=100e-6,
    ring_seconds=10e-6,
    galaxy_ring_seconds=10e-6,
    step_seconds=4e-3,
    product_factor=2.0,
    prefill_op_seconds=50e-6,
    prefill_ring_seconds=30e-6,
    prefill_seconds=5e-3,
)
"""Where the fit begins: round numbers. Constants that no row tells of stay near them."""

# fitted: begin
FITTED = Constants(
    bank_bytes_per_s=2.541e11,
    tile_cycles=38.25,
    op_seconds=7.1e-06,
    bias_seconds=0.000189,
    ring_seconds=1.437e-05,
    galaxy_ring_seconds=3.14e-05,
    step_seconds=0.004429,
    product_factor=2.991,
    prefill_op_seconds=5.358e-05,
    prefill_ring_seconds=4.436e-05,
    prefill_seconds=0.00133,
)
ERROR_BARS = {
    "short": (0.169, 0.288),
    "batch": (0.543, 1.456),
    "long": (0.186, 0.523),
    "replicas": (0.326, 0.359),
}
# fitted: end
"""The shares of t/s/u and of TTFT that nine of ten predictions were off by at most: of models left
out of the fit, with one user and a short prompt; of 32 users, long prompts and replicas, of which
no row is fitted."""
