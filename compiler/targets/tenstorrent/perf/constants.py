"""Rates and latencies of Wormhole boards for the performance model.

Constants are documented by the vendor, assumed or fitted. ``python -m bench fit-perf-model`` fits
and checks the fitted constants.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCK = 1e9
"""Clock rate in cycles per second."""
PHASE_CYCLES = 16
"""Cycles for a 32 x 32 tile product in one phase: 2,048 multiplications a cycle. Documented."""
SPREAD_BYTES_PER_S = 190e9
"""Achieved DRAM rate on interleaved tensors (caches and prompt activations). Documented."""
L1_BYTES_PER_S = 64 * 32e9
"""L1 rate with all cores through their network ports, 32 bytes a cycle and core. Documented
peak.
"""
LINK_BYTES_PER_S = 2 * 12.5e9
"""Rate for two Ethernet links between neighbors in one direction. Documented for N300, else
assumed.
"""
HOP_SECONDS = 1e-6
"""Time for a hop without a sum. Assumed."""
SOFTMAX_CYCLES = 1100
"""Vector unit cycles for a tile with scores: 32 vectors, about 35 instructions a vector.
Assumed.
"""
SMALLEST_FITTED = 1_000_000_000
"""Minimum number of model weights for error bars. Llama3.2-1B is the smallest published model. In
smaller models, a step consists mostly of its constant time.
"""


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted constants for the performance model. All are positive. The ``prefill`` constants apply
    without a trace.

    Attributes:
        bank_bytes_per_s: DRAM rate in decode for matmuls with bank-sharded weights.
        tile_cycles: Minimum cycles in decode that a reader needs for a weight tile in any format.
        op_seconds: Start and gap of a decode instruction.
        bias_seconds: Time in decode for a matmul's bias.
        ring_seconds: One step of a ring sum in decode.
        galaxy_ring_seconds: One step of a ring sum in decode on a mesh with two axes.
        step_seconds: Constant time for a decode step, with the host's part.
        product_factor: Cycles for a tile product in prefill, divided by the peak's cycles.
        prefill_op_seconds: Start and gap of a prefill instruction.
        prefill_ring_seconds: One step of a ring sum in prefill.
        prefill_seconds: Constant time for a prefill step.
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
"""Start values for the fit. A constant without data remains near its start value."""

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
"""Relative errors of decode speed and TTFT at the 90th percentile. ``short`` has one user, a short
prompt and models excluded from the fit. No fit uses the rows with 32 users (``batch``), long
prompts or replicas.
"""
