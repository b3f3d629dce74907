"""The arithmetic that the native backend promises, made of torch operations on the reference's own
graph: what products read, and what operations hand on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, fx

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.targets.cpu.native.numerics import (
    SCALES_OF_16,
    arithmetic,
    storage_format,
)
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.reference import ReferenceExecutable


class Promised(fx.Interpreter):
    """Runs a graph of the reference as the contract says, in the phase that it is told."""

    decodes = False

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op != "call_function":
            return super().run_node(n)
        if n.target is ops.linear.overload:
            args = (self._operand(n, args[0]), *args[1:])
        found = self.call_function(n.target, args, kwargs)
        is_last = any(user.op == "output" for user in n.users)
        if self._rounds and isinstance(found, Tensor) and found.is_floating_point() and not is_last:
            return found.bfloat16().float()
        return found

    def _operand(self, node: fx.Node, x: Tensor) -> Tensor:
        """What a product reads instead of ``x``."""
        compute, weight = info(node).compute, node.args[1]
        assert compute is not None and isinstance(weight, fx.Node)
        recipe = info(weight).recipe
        assert recipe is not None
        kind = storage_format(recipe)
        asked = compute.decode if self.decodes else compute.prefill
        made = arithmetic(kind, asked, exact=False)
        if made == "bf16":
            return x.bfloat16().float()
        return in_int8(x, 16 if kind in SCALES_OF_16 else 32) if made == "int8" else x

    @property
    def _rounds(self) -> bool:
        facts = [info(node).formats for node in self.graph.nodes]
        return any(each is not None and each.in0 == "bf16" for each in facts)


def in_int8(x: Tensor, length: int) -> Tensor:
    """The values of ``x``, whole blocks of so many, that int8 with a scale for each block has."""
    blocks = x.reshape(-1, length)
    most = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return ((blocks * (127.0 / most)).round() * (most / 127.0)).view_as(x)


def promised(executable: Executable) -> Executable:
    """Lets an executable of the reference have that arithmetic; its caches stay float."""
    assert isinstance(executable, ReferenceExecutable)
    runner, forward = Promised(executable.graph_module), executable.forward

    def phased(batch: Batch) -> np.ndarray:
        runner.decodes = batch.decodes
        return forward(batch)

    executable._run = runner.run
    executable.forward = phased  # type: ignore[method-assign]
    return executable
