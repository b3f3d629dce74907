"""Linear attention of decode steps in CUDA C++: from the convolution to the gated norm at once."""

from __future__ import annotations

from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.launches import Tokens
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_cuda import HybridCudaExecutor
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_steps import BoundMixer
from tilewright.compiler.targets.cuda.engine_generator.parts.native_cuda import (
    native_launch,
    takes_native,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Values
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_step import (
    _DeltaStep,
    columns_of_a_block,
)


class NativeDelta(HybridCudaExecutor):
    """Linear attention of one token a row."""

    _state_rows: Tensor

    def _run_decode(self, inputs: Tensor, splits: int) -> Tensor:
        # what a seat keeps of all layers lies together: the kernel counts layers
        self._state_rows = inputs[2] * self.settings.num_linear
        return super()._run_decode(inputs, splits)

    def delta_rule(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        s, x = self.settings, values[each.does.x]
        dim, heads, columns = s.key_dim, s.value_heads, 0
        if dim in (64, 128) and dim == s.value_dim and s.taps in (2, 3, 4):
            columns = columns_of_a_block(heads, s.key_heads, dim)
        is_step = batch.starts is None and batch.positions is not None
        if not (is_step and columns and takes_native(self.device, x.dtype)):
            return super().delta_rule(each, values, batch)
        assert batch.positions is not None
        out = x.new_empty(len(x), heads * dim)
        _, z, a, b = x.split((s.mixed_width, heads * dim, heads, heads), dim=1)
        place, blocks = s.place_of(each.layer), heads // s.key_heads * dim // columns
        names = {"weight": "convolution", "a_log": "a_log", "dt_bias": "dt_bias", "norm": "norm"}
        arguments = _DeltaStep(
            **{field: each.tensors[name].data_ptr() for field, name in names.items()},
            x=x.data_ptr(),
            z=z.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            window=self._windows[:, place].data_ptr(),
            state=self._memories[:, place].data_ptr(),
            out=out.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=self._state_rows.data_ptr(),
            **dict.fromkeys(("x_stride", "a_stride", "b_stride", "z_stride"), x.stride(0)),
            out_stride=out.stride(0),
            num_heads=heads,
            num_key_heads=s.key_heads,
            width=s.taps,
            early=self.chained and each.layer > 0,  # slots were written long before
            num_blocks=blocks,
            share=-(-2 * dim // (4 * blocks)) * 4,
            eps=s.eps,
        )
        native_launch(
            ("delta_step.cu", f"DELTA_STEP({dim}, {columns})", f"delta_step_{dim}_{columns}"),
            arguments,
            blocks=(s.key_heads * blocks, len(x), 1),
            threads=4 * columns,
            cluster=(blocks, 1, 1),
            chained=self.chained,
        )
        return out
