"""Lines for routers, experts and Gated DeltaNet in an emitted ttnn file.

The called functions are in ``mixer_text.py``.
"""

from __future__ import annotations

from tilewright.compiler.mesh import ROWS
from tilewright.compiler.targets.tenstorrent.emit_ttnn.lines import SourceSection, quoted
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    CausalConv,
    ExpertMatmul,
    RmsNorm,
    Route,
    TtDeltaRule,
    TtSwiGLU,
    class_name,
)
from tilewright.errors import CompileError


class MixerLines(SourceSection):
    """Writer for the instructions of experts and Gated DeltaNet."""

    def _route(self, op: Route) -> None:
        x = self._at(op.x, self._open())
        name = self._bind(op.out, "routing", "a routing")
        self._names[op.experts], self._places[op.experts] = name, "a routing"
        rows = "BATCH" if self.is_decode else "LENGTH"
        named = {"renormalize": str(op.renormalize), "cluster_axis": str(self._expert_axis())}
        self._call(name, "routed", x, str(op.top_k), rows, **named)

    def _expert_axis(self) -> int | None:
        weights = (e.weight for e in self.program.instructions if isinstance(e, ExpertMatmul))
        over = next(weights).expert_over
        return None if not over else 1 if over == ROWS else 0

    def _expert_matmul(self, op: ExpertMatmul) -> None:
        if (op.weights is not None) != op.is_expanded:
            raise CompileError(
                f"{op.fqn}: {class_name(op)} with an input for all experts and a sum; allowed "
                "in a ttnn file: gated experts"
            )
        x = self._names[op.x]
        if not op.is_expanded:
            x = self._at(op.x, self._open())
        arguments = [x, self._weight(op.weight), self._names[op.experts]]
        if op.bias is not None:
            arguments.append(self._weight(op.bias))
        named = {
            "dtype": "ttnn.bfloat16",
            "compute_kernel_config": self._fidelity(op, op.compute),
        }
        name = self._bind(op.out, op.fqn.rsplit(".", 1)[-1], "DRAM")
        function = "combined_experts" if op.is_expanded else "expert_product"
        self._call(name, function, *arguments, **named)
        self._cast(op, name, "bf16", op.out)

    def _clamped(self, op: TtSwiGLU) -> None:
        gate, up, memory = self._together(op.gate, op.up)
        name = self._bind(op.out, "hidden", memory)
        bounds = f"single({op.limit!r})", f"single({op.alpha!r})"
        self._call(name, "clamped_swiglu", gate, up, *bounds, dtype=self._dtype(op, op.out))

    def _conv(self, op: CausalConv) -> None:
        x = self._at(op.x, self._open())
        name = self._bind(op.out, "mixed", self._open())
        function, more = ("convolve_step", []) if self.is_decode else ("convolve_prompt", ["step"])
        weight = self._weight(op.weight)
        self._call(name, function, x, weight, 'caches["window"]', *more)
        self._cast(op, name, "bf16", op.out)

    def _delta_rule(self, op: TtDeltaRule) -> None:
        x, a, b = (self._at(value, self._open()) for value in (op.x, op.a, op.b))
        name = self._bind(op.out, "attended", self._open())
        function, more = ("delta_step", []) if self.is_decode else ("delta_prompt", ["step"])
        vectors = self._weight(op.a_log), self._weight(op.dt_bias)
        named = {
            "key_heads": str(op.num_key_heads),
            "key_dim": str(op.key_dim),
            "value_heads": str(op.num_value_heads),
        }
        memory = f"caches[{quoted('memory')}]"
        self._call(name, function, x, a, b, *vectors, memory, *more, **named)
        self._cast(op, name, "bf16", op.out)

    def _norm_value_heads(self, op: RmsNorm) -> None:
        x = self._at(op.x, self._open())
        name = self._bind(op.out, "normed", self._open())
        self._call(
            name,
            "norm_value_heads",
            x,
            str(op.num_heads),
            epsilon=repr(op.eps),
            weight=self._weight(op.weight),
            memory_config=self._open(),
            compute_kernel_config=self._fidelity(op, op.compute),
        )
        self._cast(op, name, op.x.format, op.out)
