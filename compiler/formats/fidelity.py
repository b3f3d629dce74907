"""The math fidelities: how much of each operand a product sees, and where it is accumulated.

Names and their meaning on Wormhole; what a target makes of them is its numeric contract.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The compute configuration behind a name, as Wormhole's matrix unit takes it.

    ``num_phases`` of the four partial products (1 LoFi ... 4 HiFi4); ``approx`` concerns special
    functions only; ``fp32_dest`` accumulates in fp32 instead of bf16; ``packer_l1_acc`` adds the
    K blocks in L1 instead of spilling them in the output format; ``fp32_outputs`` makes those fp32.
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
    # No published setting uses three phases; ours is hifi4 with one phase less.
    Fidelity("hifi3", 3, approx=False, fp32_dest=True, packer_l1_acc=True),
    Fidelity("hifi4", 4, approx=False, fp32_dest=True, packer_l1_acc=True),
    Fidelity("hifi4fp32", 4, approx=False, fp32_dest=True, packer_l1_acc=True, fp32_outputs=True),
):
    FIDELITIES.register(_fidelity.name, _fidelity)
