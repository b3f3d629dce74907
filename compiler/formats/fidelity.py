"""Math fidelities: operand bits in a matmul, and format of the accumulator.

Names and meanings are Wormhole's. The numeric contract of a target defines its implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The compute configuration of Wormhole's matrix unit for a name.

    Attributes:
        name: Name in configurations.
        num_phases: Partial product count, 1 (LoFi) to 4 (HiFi4).
        approx: Approximate special functions.
        fp32_dest: Accumulate in fp32 instead of bf16.
        packer_l1_acc: Add the K blocks in L1. False: spill them in the output format.
        fp32_outputs: Write K blocks in fp32.
    """

    name: str
    num_phases: int
    approx: bool
    fp32_dest: bool
    packer_l1_acc: bool
    fp32_outputs: bool = False


FIDELITIES: Registry[Fidelity] = Registry("fidelity")

for _fidelity in (
    Fidelity("lofi", 1, approx=False, fp32_dest=False, packer_l1_acc=True),
    Fidelity("hifi2", 2, approx=True, fp32_dest=True, packer_l1_acc=True),
    Fidelity("hifi2na", 2, approx=False, fp32_dest=False, packer_l1_acc=False),
    Fidelity("hifi2fp16", 2, approx=False, fp32_dest=False, packer_l1_acc=True),
    # No published setting uses three phases. This definition is hifi4 minus a phase.
    Fidelity("hifi3", 3, approx=False, fp32_dest=True, packer_l1_acc=True),
    Fidelity("hifi4", 4, approx=False, fp32_dest=True, packer_l1_acc=True),
    Fidelity("hifi4fp32", 4, approx=False, fp32_dest=True, packer_l1_acc=True, fp32_outputs=True),
):
    FIDELITIES.register(_fidelity.name, _fidelity)
