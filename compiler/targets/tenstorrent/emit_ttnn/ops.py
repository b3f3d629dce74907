"""Python lines with ttnn calls for the instructions of a phase.

Selects a ttnn operator for each instruction and moves operands to the required memory. Excludes the
remaining source text.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.mesh import ROWS
from tilewright.compiler.targets.tenstorrent.emit_ttnn.lines import (
    DTYPES,
    HEADS,
    SourceSection,
    quoted,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    WIDTH_SHARDED,
    Add,
    AllGather,
    ConcatHeads,
    CreateHeads,
    DeviceProgram,
    Gated,
    Matmul,
    ReduceScatter,
    RmsNorm,
    Rotate,
    Scale,
    SelectRows,
    Tanh,
    TtAllReduce,
    TtAttention,
    TtEmbedding,
    TtInstruction,
    TtSwiGLU,
    UpdateCache,
    class_name,
)
from tilewright.compiler.targets.tenstorrent.program.product_blocks import (
    prompt_blocks,
    step_blocks,
)
from tilewright.errors import CompileError


class InstructionLines(SourceSection):
    """Writer for a program's instructions, section by section."""

    def __init__(self, program: DeviceProgram) -> None:
        super().__init__(program)
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
        }

    def write(self, index: int) -> None:
        """Append the lines for instruction ``index``.

        Raises:
            CompileError: The emitter does not support the instruction.
        """
        self._index = index
        instruction = self.program.instructions[index]
        writer = self._writers.get(type(instruction))
        if writer is None:
            raise CompileError(
                f"{instruction.fqn}: {class_name(instruction)} has no lines in a ttnn file; "
                "allowed: models without experts and Gated DeltaNet"
            )
        writer(instruction)

    # -- instructions --------------------------------------------------------------------------

    def _embedding(self, each: TtEmbedding) -> None:
        name = self._bind(each.out, "x", "DRAM")
        layout = {"layout": "ttnn.TILE_LAYOUT", "memory_config": "DRAM"}
        self._call(name, "ttnn.embedding", "step.tokens", self._weight(each.table), **layout)
        self._call(name, "ttnn.unsqueeze_to_4D", name)

    def _norm_heads(self, each: RmsNorm) -> None:
        """Append a norm of every head. A decode step moves its heads to interleaved L1 and back."""
        x = self._names[each.x]
        name = self._bind(each.out, x, self._places[each.x])
        if self.is_decode:
            self._call("memory", f"{x}.memory_config")
            self._call(name, "ttnn.to_memory_config", x, "L1")
        self._call(
            name,
            "ttnn.rms_norm",
            name,
            epsilon=repr(each.eps),
            weight=self._weight(each.weight),
            memory_config=self._open(),
            compute_kernel_config=self._fidelity(each, each.compute),
        )
        if self.is_decode:
            self._call(name, "ttnn.to_memory_config", name, "memory")

    def _norm(self, each: RmsNorm) -> None:
        if each.num_heads:
            self._norm_heads(each)
            return
        count = self.program.mesh.size(each.x.over) if each.x.over else 1
        if each.width != each.x.columns * count or each.x.columns % TILE:
            raise CompileError(
                f"{each.fqn}: {each.width} columns over {count} chips; allowed in a ttnn file: "
                f"multiples of {TILE * count}"
            )
        memory = self._home(each.out)
        x = self._at(each.x, memory)
        named = {"compute_kernel_config": self._fidelity(each, each.compute)}
        if each.out.memory.layout == WIDTH_SHARDED:
            blocks = f"norm_blocks({each.x.columns}, {each.out.memory.cores})"
            named = {"program_config": blocks, **named}
        scale = {"epsilon": repr(each.eps), "weight": self._weight(each.weight)}
        name = self._bind(each.out, "normed", memory)
        if not each.x.over:
            self._call(name, "ttnn.rms_norm", x, **scale, memory_config=memory, **named)
        else:
            sums = f"columns({TILE * count}, 1)" if self.is_decode else "DRAM"
            self._call("sums", "ttnn.rms_norm_pre_all_gather", x, dtype="ttnn.bfloat16", **named)
            gather = {"dim": "3", "cluster_axis": _axis(each.x.over), "memory_config": sums}
            self._call("sums", "ttnn.all_gather", "sums", **gather)
            post = {**scale, "memory_config": memory, **named}
            self._call(name, "ttnn.rms_norm_post_all_gather", x, "sums", **post)
        self._cast(each, name, each.x.format, each.out)

    def _matmul(self, each: Matmul) -> None:
        for size in (each.weight.rows, *([] if each.group == "lm_head" else [each.weight.columns])):
            if size % TILE:
                raise CompileError(
                    f"{each.fqn}: a side of {size}; allowed in a ttnn file: multiples of {TILE}"
                )
        if each.weight.memory.layout != WIDTH_SHARDED:
            raise CompileError(f"{each.fqn}: a weight in {each.weight.memory}; allowed: dram banks")
        if each.out.tiles[0] == 1:
            self._step_product(each)
        else:
            self._prompt_product(each)

    def _product_arguments(self, each: Matmul) -> dict[str, str]:
        named = {"bias": self._weight(each.bias)} if each.bias is not None else {}
        named["compute_kernel_config"] = self._fidelity(each, each.compute)
        return {**named, "dtype": self._dtype(each, each.out)}

    def _step_product(self, each: Matmul) -> None:
        """Append a matmul for one row of tiles. The weight moves from the DRAM banks to the cores
        with x.
        """
        blocks = step_blocks(each)
        x = self._at(each.x, f"columns({each.x.columns}, {blocks.cores})")
        named = self._product_arguments(each)
        if each.group == "lm_head":
            name = self._bind(each.out, "logits", "DRAM")
            weight = self._weight(each.weight)
            sizes = str(blocks.k_block), str(blocks.cores)
            self._call(name, "product_in_pieces", x, weight, *sizes, **named)
            return
        if blocks.num_pieces > 1:
            raise CompileError(
                f"{each.fqn}: blocks of {each.weight.columns} columns in {each.weight.format} do "
                "not fit L1; allowed: a larger mesh, or a narrower format"
            )
        n_tiles = -(-each.weight.columns // TILE)
        memory = f"the product's: {n_tiles} over {blocks.cores}"
        name = self._bind(each.out, _product_name(each), memory)
        config = f"step_blocks({blocks.k_block}, {-(-n_tiles // blocks.cores)})"
        where = {"program_config": config, "memory_config": "ttnn.L1_WIDTH_SHARDED_MEMORY_CONFIG"}
        self._call(name, "ttnn.linear", x, self._weight(each.weight), **named, **where)

    def _prompt_product(self, each: Matmul) -> None:
        blocks = prompt_blocks(each)
        x = self._at(each.x, "DRAM")
        out_rows = self._mark(each, "out_rows", str(blocks.out_rows))
        config = f"prompt_blocks({blocks.k_block}, {blocks.rows}, {blocks.columns}, {out_rows})"
        name = self._bind(each.out, _product_name(each), "DRAM")
        where = {"program_config": config, "memory_config": "DRAM"}
        named = self._product_arguments(each)
        self._call(name, "ttnn.linear", x, self._weight(each.weight), **named, **where)

    def _create_heads(self, each: CreateHeads) -> None:
        x = self._at(each.x, self._open())
        named = {"num_heads": str(each.num_heads), "num_kv_heads": str(each.num_kv_heads)}
        memory = HEADS if self.is_decode else "DRAM"
        if self.is_decode:
            shape = f"(1, 1, BATCH, {each.x.columns})", f"(1, 1, {TILE}, {each.x.columns})"
            self._call(x, "ttnn.reshape", x, *shape)
        targets = [
            self._bind(value, name, memory)
            for value, name in ((each.out, "q"), (each.k, "k"), (each.v, "v"))
        ]
        if self.is_decode:
            function = "ttnn.experimental.nlp_create_qkv_heads_decode"
            named["memory_config"] = "ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG"
        else:
            function = "ttnn.experimental.nlp_create_qkv_heads"
            named |= {"transpose_k_heads": "False", "memory_config": "DRAM"}
        self._call(", ".join(targets), function, x, **named)

    def _rotate(self, each: Rotate) -> None:
        x = self._names[each.x]
        name = self._bind(each.out, x, self._places[each.x])
        self._recast(x, "ttnn.bfloat16", needed=each.x.format != "bf16")
        llama = ["step.pairs"] if each.interleaved else []
        function = "rotary_embedding_llama" if each.interleaved else "rotary_embedding_hf"
        self._call(
            name,
            f"ttnn.experimental.{function}",
            x,
            "step.cos",
            "step.sin",
            *llama,
            is_decode_mode=str(self.is_decode),
            compute_kernel_config=self._fidelity(each, each.compute),
        )
        self._cast(each, name, "bf16", each.out)

    def _update_cache(self, each: UpdateCache) -> None:
        x, cache = self._names[each.x], f"caches[{quoted(each.cache.kind)}]"
        if self.is_decode:
            self._recast(x, "ttnn.bfloat16", needed=each.x.format != "bf16")
            self._call(
                "",
                "ttnn.experimental.paged_update_cache",
                cache,
                x,
                update_idxs_tensor="step.positions",
                page_table="step.pages",
            )
            return
        dtype = self.marks.put(f"{each.cache.kind}.dtype", DTYPES[each.cache.format])
        values = f"cast({x}, {dtype})"
        call = "ttnn.experimental.paged_fill_cache"
        self._call("", call, cache, values, "step.new_pages", batch_idx="0")

    def _attention(self, each: TtAttention) -> None:
        q = self._names[each.q]
        name = self._bind(each.out, "attended", self._open())
        window = {}
        if any(isinstance(e, TtAttention) and e.window for e in self.program.instructions):
            size = self._mark(each, "window", str(each.window or None))
            window = {"sliding_window_size": size}
        named = {
            "scale": f"single({each.scale!r})",
            **window,
            "compute_kernel_config": self._fidelity(each, each.compute),
        }
        if each.sinks is not None:
            named["attention_sink"] = self._weight(each.sinks)
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
                program_config=f"attention_blocks(0, {each.k_chunk})",
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
                program_config=f"attention_blocks({each.k_chunk}, {each.k_chunk})",
            )
        self._cast(each, name, each.q.format, each.out)

    def _concat_heads(self, each: ConcatHeads) -> None:
        if self.is_decode:
            x = self._at(each.x, f"users(BATCH, {each.head_dim})")
            name = self._bind(each.out, "joined", "a head a core")
            function = "ttnn.experimental.nlp_concat_heads_decode"
            self._call(name, function, x, num_heads=str(each.num_heads))
        else:
            x = self._at(each.x, "DRAM")
            name = self._bind(each.out, "joined", "DRAM")
            self._call(name, "ttnn.experimental.nlp_concat_heads", x, memory_config="DRAM")
        self._cast(each, name, each.x.format, each.out)

    def _swiglu(self, each: TtSwiGLU) -> None:
        gate, up = self._names[each.gate], self._at(each.up, self._places[each.gate])
        name = self._bind(each.out, "hidden", self._places[each.gate])
        self._call(
            name,
            "ttnn.mul",
            gate,
            up,
            input_tensor_a_activations="[ttnn.UnaryOpType.SILU]",
            dtype=self._dtype(each, each.out),
            memory_config=f"{gate}.memory_config()",
        )

    def _gated(self, each: Gated) -> None:
        memory = self._places[each.gate]
        gate, x = self._names[each.gate], self._at(each.x, memory)
        name = self._bind(each.out, "hidden", memory)
        function = {"gelu_tanh": "GELU", "sigmoid": "SIGMOID"}[each.activation]
        self._call(
            name,
            "ttnn.mul",
            gate,
            x,
            input_tensor_a_activations=f"[ttnn.UnaryOpType.{function}]",
            dtype=self._dtype(each, each.out),
            memory_config=f"{x}.memory_config()",
        )

    def _scale(self, each: Scale) -> None:
        x = self._names[each.x]
        name = self._bind(each.out, x, self._places[each.x])
        self._call(name, "ttnn.multiply", x, f"single({each.factor!r})")

    def _tanh(self, each: Tanh) -> None:
        x = self._names[each.x]
        name = self._bind(each.out, x, self._places[each.x])
        self._call(name, "ttnn.tanh", x)

    def _add(self, each: Add) -> None:
        memory = self._home(each.out)
        x, y = self._at(each.x, memory), self._at(each.y, memory)
        name = self._bind(each.out, "x", memory)
        self._call(name, "ttnn.add", x, y, dtype=self._dtype(each, each.out), memory_config=memory)

    def _select_rows(self, each: SelectRows) -> None:
        if self.is_decode:  # a decode step has one row for each user already
            self._bind(each.out, self._names[each.x], self._places[each.x])
            return
        x = self._at(each.x, "DRAM")
        name = self._bind(each.out, x, "DRAM")
        ends = f"(0, 0, step.last, 0), (1, 1, step.last + {TILE}, {each.x.columns})"
        self._call(name, "ttnn.slice", x, ends)

    def _reduce(self, each: ReduceScatter | TtAllReduce) -> None:
        """Append a sum. The links transfer the result's format."""
        x = self._at(each.x, self._open())
        self._cast(each, x, each.x.format, each.out)
        name = self._bind(each.out, x, self._open())
        named = {"cluster_axis": _axis(each.axis), "memory_config": self._open()}
        if isinstance(each, ReduceScatter):
            named = {"dim": "3", **named, "topology": "TOPOLOGY"}
            self._call(name, "ttnn.reduce_scatter", x, **named)
        else:
            self._call(name, "ttnn.all_reduce", x, **named, topology="TOPOLOGY")

    def _gather(self, each: AllGather) -> None:
        memory = "DRAM" if self._last_use.get(each.out) is None else self._open()
        x = self._at(each.x, memory)
        self._cast(each, x, each.x.format, each.out)
        name = self._bind(each.out, x, memory)
        named = {"dim": "3", "cluster_axis": _axis(each.axis), "memory_config": memory}
        self._call(name, "ttnn.all_gather", x, **named)


def _axis(axis: str) -> str:
    """Return the ttnn index for a mesh axis. ttnn's second axis is ``ROWS``."""
    return "1" if axis == ROWS else "0"


def _product_name(each: Matmul) -> str:
    name = each.fqn.rsplit(".", 1)[-1]
    if each.group == "wqkv":
        return "qkv"
    return name if name.isidentifier() and name.endswith("_proj") else "product"
