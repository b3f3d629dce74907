"""Python lines with ttnn calls for a phase's instructions.

Selects a ttnn operator for each instruction and moves operands to the required memory. Excludes the
remaining source text.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.mesh import ROWS
from tilewright.compiler.targets.tenstorrent.emit_ttnn.lines import DTYPES, HEADS, quoted
from tilewright.compiler.targets.tenstorrent.emit_ttnn.mixer_lines import MixerLines
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    WIDTH_SHARDED,
    Add,
    AllGather,
    CausalConv,
    ConcatHeads,
    CreateHeads,
    DeviceProgram,
    ExpertMatmul,
    Gated,
    Matmul,
    ReduceScatter,
    RmsNorm,
    Rotate,
    Route,
    Scale,
    SelectRows,
    Tanh,
    TtAllReduce,
    TtAttention,
    TtDeltaRule,
    TtEmbedding,
    TtInstruction,
    TtSwiGLU,
    TtValue,
    UpdateCache,
)
from tilewright.compiler.targets.tenstorrent.program.product_blocks import (
    prompt_blocks,
    step_blocks,
)
from tilewright.errors import CompileError

_NARROW = ("router", "delta_gates")
"""Tensor groups with a small number of columns. Their weights are padded to whole tiles."""


class InstructionLines(MixerLines):
    """Writer for a program's instructions, section by section."""

    def __init__(self, program: DeviceProgram) -> None:
        super().__init__(program)
        rotations = (op for op in program.instructions if isinstance(op, Rotate))
        self._rotations = list(dict.fromkeys(rotation_of(op) for op in rotations))
        self._heads: set[TtValue] = set()
        self._writers: dict[type[TtInstruction], Callable[..., None]] = {
            TtEmbedding: self._embedding,
            RmsNorm: self._norm,
            Matmul: self._matmul,
            CreateHeads: self._create_heads,
            Rotate: self._rotate,
            UpdateCache: self._update_cache,
            TtAttention: self._attention,
            ConcatHeads: self._concat_heads,
            TtSwiGLU: self._swiglu,
            Gated: self._gated,
            Scale: self._scale,
            Tanh: self._tanh,
            Add: self._add,
            SelectRows: self._select_rows,
            ReduceScatter: self._reduce,
            TtAllReduce: self._reduce,
            AllGather: self._gather,
            Route: self._route,
            ExpertMatmul: self._expert_matmul,
            CausalConv: self._conv,
            TtDeltaRule: self._delta_rule,
        }

    def write(self, index: int) -> None:
        """Append the lines for instruction ``index``.

        Raises:
            CompileError: The emitter does not support the instruction.
        """
        self._index = index
        instruction = self.program.instructions[index]
        self._writers[type(instruction)](instruction)

    # -- instructions --------------------------------------------------------------------------

    def _embedding(self, op: TtEmbedding) -> None:
        name = self._bind(op.out, "x", "DRAM")
        layout = {"layout": "ttnn.TILE_LAYOUT", "memory_config": "DRAM"}
        self._call(name, "ttnn.embedding", "step.tokens", self._weight(op.table), **layout)
        self._call(name, "ttnn.unsqueeze_to_4D", name)

    def _norm_heads(self, op: RmsNorm) -> None:
        """Append a norm of every head. A decode step moves its heads to interleaved L1 and back."""
        x = self._names[op.x]
        name = self._bind(op.out, x, self._places[op.x])
        if self.is_decode:
            self._call("memory", f"{x}.memory_config")
            self._call(name, "ttnn.to_memory_config", x, "L1")
        self._call(
            name,
            "ttnn.rms_norm",
            name,
            epsilon=repr(op.eps),
            weight=self._weight(op.weight),
            memory_config=self._open(),
            compute_kernel_config=self._fidelity(op, op.compute),
        )
        if self.is_decode:
            self._call(name, "ttnn.to_memory_config", name, "memory")

    def _norm(self, op: RmsNorm) -> None:
        if op.num_heads:
            (self._norm_heads if op.x in self._heads else self._norm_value_heads)(op)
            return
        count = self.program.mesh.size(op.x.over) if op.x.over else 1
        if op.width != op.x.columns * count or op.x.columns % TILE:
            raise CompileError(
                f"{op.fqn}: {op.width} columns over {count} chips; allowed in a ttnn file: "
                f"multiples of {TILE * count}"
            )
        memory = self._home(op.out)
        x = self._at(op.x, memory)
        named = {"compute_kernel_config": self._fidelity(op, op.compute)}
        if op.out.memory.layout == WIDTH_SHARDED:
            blocks = f"norm_blocks({op.x.columns}, {op.out.memory.cores})"
            named = {"program_config": blocks, **named}
        scale = {"epsilon": repr(op.eps), "weight": self._weight(op.weight)}
        name = self._bind(op.out, "normed", memory)
        if not op.x.over:
            self._call(name, "ttnn.rms_norm", x, **scale, memory_config=memory, **named)
        else:
            sums = f"columns({TILE * count}, 1)" if self.is_decode else "DRAM"
            self._call("sums", "ttnn.rms_norm_pre_all_gather", x, dtype="ttnn.bfloat16", **named)
            gather = {"dim": "3", "cluster_axis": _axis(op.x.over), "memory_config": sums}
            self._call("sums", "ttnn.all_gather", "sums", **gather)
            post = {**scale, "memory_config": memory, **named}
            self._call(name, "ttnn.rms_norm_post_all_gather", x, "sums", **post)
        self._cast(op, name, op.x.format, op.out)

    def _matmul(self, op: Matmul) -> None:
        is_padded = op.group in ("lm_head", *_NARROW)
        for size in (op.weight.rows, *([] if is_padded else [op.weight.columns])):
            if size % TILE:
                raise CompileError(
                    f"{op.fqn}: a side of {size}; allowed in a ttnn file: multiples of {TILE}"
                )
        if op.weight.memory.layout != WIDTH_SHARDED:
            raise CompileError(f"{op.fqn}: a weight in {op.weight.memory}; allowed: dram banks")
        if op.out.tiles[0] == 1:
            self._step_product(op)
        else:
            self._prompt_product(op)
        if op.group in _NARROW and op.weight.columns % TILE:
            name = self._at(op.out, self._open())
            rows = TILE if self.is_decode else op.out.rows
            ends = f"(0, 0, 0, 0), (1, 1, {rows}, {op.weight.columns})"
            self._call(name, "ttnn.slice", name, ends)

    def _product_arguments(self, op: Matmul) -> dict[str, str]:
        named = {"bias": self._weight(op.bias)} if op.bias is not None else {}
        named["compute_kernel_config"] = self._fidelity(op, op.compute)
        return {**named, "dtype": self._dtype(op, op.out)}

    def _step_product(self, op: Matmul) -> None:
        """Append a matmul for one row of tiles. The weight moves from the DRAM banks to the cores
        with x.
        """
        blocks = step_blocks(op)
        x = self._at(op.x, f"columns({op.x.columns}, {blocks.cores})")
        named = self._product_arguments(op)
        if op.group == "lm_head":
            name = self._bind(op.out, "logits", "DRAM")
            weight = self._weight(op.weight)
            sizes = str(blocks.k_block), str(blocks.cores)
            self._call(name, "product_in_pieces", x, weight, *sizes, **named)
            return
        if blocks.num_pieces > 1:
            raise CompileError(
                f"{op.fqn}: blocks of {op.weight.columns} columns in {op.weight.format} do "
                "not fit L1; allowed: a larger mesh, or a narrower format"
            )
        n_tiles = -(-op.weight.columns // TILE)
        memory = f"the product's: {n_tiles} over {blocks.cores}"
        name = self._bind(op.out, _product_name(op), memory)
        config = f"step_blocks({blocks.k_block}, {-(-n_tiles // blocks.cores)})"
        where = {"program_config": config, "memory_config": "ttnn.L1_WIDTH_SHARDED_MEMORY_CONFIG"}
        self._call(name, "ttnn.linear", x, self._weight(op.weight), **named, **where)

    def _prompt_product(self, op: Matmul) -> None:
        blocks = prompt_blocks(op)
        x = self._at(op.x, "DRAM")
        out_rows = self._mark(op, "out_rows", str(blocks.out_rows))
        config = f"prompt_blocks({blocks.k_block}, {blocks.rows}, {blocks.columns}, {out_rows})"
        name = self._bind(op.out, _product_name(op), "DRAM")
        where = {"program_config": config, "memory_config": "DRAM"}
        named = self._product_arguments(op)
        self._call(name, "ttnn.linear", x, self._weight(op.weight), **named, **where)

    def _create_heads(self, op: CreateHeads) -> None:
        x = self._at(op.x, self._open())
        named = {"num_heads": str(op.num_heads), "num_kv_heads": str(op.num_kv_heads)}
        memory = HEADS if self.is_decode else "DRAM"
        if self.is_decode:
            shape = f"(1, 1, BATCH, {op.x.columns})", f"(1, 1, {TILE}, {op.x.columns})"
            self._call(x, "ttnn.reshape", x, *shape)
        targets = [
            self._bind(value, name, memory)
            for value, name in ((op.out, "q"), (op.k, "k"), (op.v, "v"))
        ]
        self._heads |= {op.out, op.k, op.v}
        if self.is_decode:
            function = "ttnn.experimental.nlp_create_qkv_heads_decode"
            named["memory_config"] = "ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG"
        else:
            function = "ttnn.experimental.nlp_create_qkv_heads"
            named |= {"transpose_k_heads": "False", "memory_config": "DRAM"}
        self._call(", ".join(targets), function, x, **named)

    def _rotate(self, op: Rotate) -> None:
        x = self._names[op.x]
        name = self._bind(op.out, x, self._places[op.x])
        self._heads.add(op.out)
        self._recast(x, "ttnn.bfloat16", needed=op.x.format != "bf16")
        llama = ["step.pairs"] if op.interleaved else []
        function = "rotary_embedding_llama" if op.interleaved else "rotary_embedding_hf"
        function = f"ttnn.experimental.{function}"
        if 2 * op.frequencies.columns != op.head_dim:
            function = "rotate_first"
        number = self._mark(op, "rotation", str(self._rotations.index(rotation_of(op))))
        self._call(
            name,
            function,
            x,
            f"step.cos[{number}]",
            f"step.sin[{number}]",
            *llama,
            is_decode_mode=str(self.is_decode),
            compute_kernel_config=self._fidelity(op, op.compute),
        )
        self._cast(op, name, "bf16", op.out)

    def _update_cache(self, op: UpdateCache) -> None:
        x, cache = self._names[op.x], f"caches[{quoted(op.cache.kind)}]"
        if self.is_decode:
            self._recast(x, "ttnn.bfloat16", needed=op.x.format != "bf16")
            self._call(
                "",
                "ttnn.experimental.paged_update_cache",
                cache,
                x,
                update_idxs_tensor="step.positions",
                page_table="step.pages",
            )
            return
        dtype = self.marks.put(f"{op.cache.kind}.dtype", DTYPES[op.cache.format])
        values = f"cast({x}, {dtype})"
        call = "ttnn.experimental.paged_fill_cache"
        self._call("", call, cache, values, "step.new_pages", batch_idx="0")

    def _attention(self, op: TtAttention) -> None:
        q = self._names[op.q]
        name = self._bind(op.out, "attended", self._open())
        window = {}
        if any(isinstance(e, TtAttention) and e.window for e in self.program.instructions):
            size = self._mark(op, "window", str(op.window or None))
            window = {"sliding_window_size": size}
        named = {
            "scale": f"single({op.scale!r})",
            **window,
            "compute_kernel_config": self._fidelity(op, op.compute),
        }
        if op.sinks is not None:
            sinks = self._weight(op.sinks)
            named["attention_sink"] = f"sink_logits({sinks}, {op.scale!r}, {self.is_decode})"
        caches = [f"caches[{quoted(kind)}]" for kind in ("k", "v")]
        if self.is_decode:
            self._call(
                name,
                "ttnn.transformer.paged_scaled_dot_product_attention_decode",
                q,
                *caches,
                page_table_tensor="step.pages",
                cur_pos_tensor="step.positions",
                **named,
                program_config=f"attention_blocks(0, {op.k_chunk})",
                memory_config="L1",
            )
        else:
            self._call(
                name,
                "ttnn.transformer.chunked_scaled_dot_product_attention",
                q,
                *caches,
                "step.pages",
                chunk_start_idx_tensor="step.start",
                **named,
                program_config=f"attention_blocks({op.k_chunk}, {op.k_chunk})",
            )
        self._cast(op, name, op.q.format, op.out)

    def _concat_heads(self, op: ConcatHeads) -> None:
        if self.is_decode:
            x = self._at(op.x, f"users(BATCH, {op.head_dim})")
            name = self._bind(op.out, "joined", "a head a core")
            function = "ttnn.experimental.nlp_concat_heads_decode"
            self._call(name, function, x, num_heads=str(op.num_heads))
        else:
            x = self._at(op.x, "DRAM")
            name = self._bind(op.out, "joined", "DRAM")
            self._call(name, "ttnn.experimental.nlp_concat_heads", x, memory_config="DRAM")
        self._cast(op, name, op.x.format, op.out)

    def _swiglu(self, op: TtSwiGLU) -> None:
        if op.limit:
            self._clamped(op)
            return
        gate, up, memory = self._together(op.gate, op.up)
        name = self._bind(op.out, "hidden", memory)
        self._call(
            name,
            "ttnn.mul",
            gate,
            up,
            input_tensor_a_activations="[ttnn.UnaryOpType.SILU]",
            dtype=self._dtype(op, op.out),
            memory_config=f"{gate}.memory_config()",
        )

    def _gated(self, op: Gated) -> None:
        gate, x, memory = self._together(op.gate, op.x)
        name = self._bind(op.out, "hidden", memory)
        function = {"gelu_tanh": "GELU", "sigmoid": "SIGMOID"}[op.activation]
        self._call(
            name,
            "ttnn.mul",
            gate,
            x,
            input_tensor_a_activations=f"[ttnn.UnaryOpType.{function}]",
            dtype=self._dtype(op, op.out),
            memory_config=f"{x}.memory_config()",
        )

    def _scale(self, op: Scale) -> None:
        x = self._names[op.x]
        name = self._bind(op.out, x, self._places[op.x])
        self._call(name, "ttnn.multiply", x, f"single({op.factor!r})")

    def _tanh(self, op: Tanh) -> None:
        x = self._names[op.x]
        name = self._bind(op.out, x, self._places[op.x])
        self._call(name, "ttnn.tanh", x)

    def _add(self, op: Add) -> None:
        memory = self._home(op.out)
        x, y = self._at(op.x, memory), self._at(op.y, memory)
        name = self._bind(op.out, "x", memory)
        self._call(name, "ttnn.add", x, y, dtype=self._dtype(op, op.out), memory_config=memory)

    def _select_rows(self, op: SelectRows) -> None:
        if self.is_decode:  # a decode step has the last tokens only
            self._bind(op.out, self._names[op.x], self._places[op.x])
            return
        x = self._at(op.x, "DRAM")
        name = self._bind(op.out, x, "DRAM")
        ends = f"(0, 0, step.last, 0), (1, 1, step.last + {TILE}, {op.x.columns})"
        self._call(name, "ttnn.slice", x, ends)

    def _reduce(self, op: ReduceScatter | TtAllReduce) -> None:
        """Append a sum. The links transfer the result's format, or float32."""
        x = self._at(op.x, self._open())
        is_cast_after = op.x.format == "fp32"
        if not is_cast_after:
            self._cast(op, x, op.x.format, op.out)
        name = self._bind(op.out, x, self._open())
        named = {"cluster_axis": _axis(op.axis), "memory_config": self._open()}
        if isinstance(op, ReduceScatter):
            named = {"dim": "3", **named, "topology": "TOPOLOGY"}
            self._call(name, "ttnn.reduce_scatter", x, **named)
        else:
            self._call(name, "ttnn.all_reduce", x, **named, topology="TOPOLOGY")
        if is_cast_after:
            self._cast(op, name, "fp32", op.out)

    def _gather(self, op: AllGather) -> None:
        memory = "DRAM" if self._last_use.get(op.out) is None else self._open()
        x = self._at(op.x, memory)
        self._cast(op, x, op.x.format, op.out)
        name = self._bind(op.out, x, memory)
        named = {"dim": "3", "cluster_axis": _axis(op.axis), "memory_config": memory}
        self._call(name, "ttnn.all_gather", x, **named)


def rotation_of(op: Rotate) -> tuple[str, int, float]:
    """Return the name and the number of a rotation's frequencies, and its factor."""
    return op.frequencies.name, op.frequencies.columns, op.factor


def _axis(axis: str) -> str:
    """Return the ttnn index for a mesh axis. ttnn's second axis is ``ROWS``."""
    return "1" if axis == ROWS else "0"


def _product_name(op: Matmul) -> str:
    name = op.fqn.rsplit(".", 1)[-1]
    if op.group == "wqkv":
        return "qkv"
    return name if name.isidentifier() and name.endswith("_proj") else "product"
