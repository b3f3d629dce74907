"""A GGUF file as a checkpoint: Hugging Face names, half-split rope rows, exact dequantization.

Decoder tensor names are mapped here. Tokenizer keys are read elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.formats.ggml_blocks import SIZES, Bytes, dequantise, larger_blocks
from tilewright.errors import CheckpointError
from tilewright.models.architectures.table import architecture_of, find_gguf_type
from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    content_hash,
    inner_part,
    outer_rows,
    row_range,
    shown,
    unknown_tensor,
)
from tilewright.models.checkpoints.gguf.config import config_of_gguf
from tilewright.models.checkpoints.gguf.header import TENSOR_TYPES, GGUFTensor
from tilewright.models.checkpoints.gguf.hybrid import (
    DECAY,
    Order,
    hf_shape,
    log_decay,
    tiled_columns,
    tiled_rows,
)
from tilewright.models.checkpoints.gguf.parts import parts_of, stem_of
from tilewright.models.checkpoints.mapped_file import map_file, release
from tilewright.models.checkpoints.pairs import half_split_order
from tilewright.models.checkpoints.pieces import TensorSlice, View, expert_views, merged_type
from tilewright.models.checkpoints.quantized.float4 import label_of
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.rope import gguf_longrope
from tilewright.models.config import ModelConfig

if TYPE_CHECKING:
    from tilewright.models.config import DeltaShape

_LABEL_BYTES = 1 << 24
"""Bytes of blocks in memory at once, to find a type's range of exponents."""
_ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_CONSTANTS = (_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.((\w+)(?:\.(weight|bias))?)")
_DRAFT_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.nextn\..*")
_NORM = re.compile(r"norm(?:_embedding|_hidden)?\.weight$")
_TYPE_SUFFIX = re.compile(r"[.-](?:B?F16|F32|Q\d\w*)$", re.IGNORECASE)


class GGUFCheckpoint:
    """A ``.gguf`` file with all its parts. See `tilewright.models.checkpoints.base.Checkpoint`.

    Raises:
        CheckpointError: The file is truncated, corrupt or unsupported.
    """

    def __init__(self, path: Path) -> None:
        header = parts_of(path)
        self.files = header.files
        self.path = path = header.files[0]
        self._maps = [map_file(file) for file in header.files]
        self._metadata = header.metadata
        name = header.metadata.get("general.architecture")
        model_type = find_gguf_type(name, f"{path}: general.architecture")
        self._architecture = architecture_of(model_type)
        layer_names = {**_PER_LAYER, **self._architecture.gguf_names}
        self._header_bytes = [each.nbytes for each in header.headers]
        self.config = config_of_gguf(self._metadata, where=path)
        self._tensors: dict[str, GGUFTensor] = {}
        self.draft_names = sorted(
            filter(self._is_draft, header.tensors), key=lambda name: (".nextn." not in name, name)
        )
        self.config = self._config_of(self.config)
        for name, tensor in header.tensors.items():
            if name in _CONSTANTS or _IGNORED.fullmatch(name):
                continue
            ours = self._name_of(name, layer_names)
            if ours is None:
                continue
            if ours in self._tensors:
                raise CheckpointError(
                    f"{path}: tensor {shown(ours)} is stored twice; allowed: once"
                )
            self._tensors[ours] = dataclasses.replace(tensor, shape=hf_shape(ours, tensor.shape))
        self.config = self._complete_config(header.tensors)
        self._views = self._make_views()
        self._labels: dict[str, str] = {}
        self.names: Mapping[str, TensorMeta] = self._name_tensors()

    def _config_of(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the read layers."""
        return config

    def _name_of(self, name: str, layer_names: Mapping[str, str]) -> str | None:
        """Return the Hugging Face name for a GGUF tensor. None: the tensor is not read."""
        return None if name in self.draft_names else hf_name(name, layer_names)

    @property
    def tokenizer_source(self) -> TokenizerSource:
        return TokenizerSource(self.path, self._metadata)

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        shape = self.names[name].shape
        start, stop = row_range(outer_rows(rows), shape[0])
        if name not in self._views:
            values = self._values(name, self._tensors[name], start, stop)
        else:
            parts = [self._values(*each) for each in self._pieces(self._views[name], start, stop)]
            values = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)
            values = values.reshape(stop - start, *shape[1:])
        return inner_part(values, rows, columns)

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, Bytes]:
        """Return the type (ggml's name) and bytes ``[rows, bytes per row]`` in Hugging Face order.

        A type without a corresponding format is converted to a larger type with equal values.

        Raises:
            CheckpointError: The name is unknown.
        """
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        meta = self.names[name]
        assert not self._is_changed(name), name
        start, stop = row_range(rows, meta.shape[0])
        if name in self._views:
            pieces = list(self._pieces(self._views[name], start, stop))
        else:
            pieces = [(name, self._tensors[name], start, stop)]
        kinds, parts = set(), []
        for piece in pieces:
            kind, taken = larger_blocks(self._taken(*piece), piece[1].dtype)
            kinds.add(kind)
            parts.append(taken)
        (kind,) = kinds
        return kind, np.concatenate(parts).reshape(stop - start, -1)

    def stored_type(self, name: str) -> str:
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        if self._is_changed(name):
            return "F32"
        dtype = self.names[name].dtype
        if dtype != "MXFP4":
            return dtype
        if name not in self._labels:
            self._labels[name] = self._label_of_mxfp4(name)
        return self._labels[name]

    def _label_of_mxfp4(self, name: str) -> str:
        """Return the type with its range of exponents. Reads every block of the tensor."""
        stop = self.names[name].shape[0]
        whole = name, self._tensors.get(name), 0, stop
        for _, tensor, start, end in (
            self._pieces(self._views[name], 0, stop) if name in self._views else [whole]
        ):
            assert tensor is not None
            num_rows = 1 if len(tensor.shape) == 1 else tensor.shape[0]  # a vector is a single row
            end = min(end, num_rows)
            count = max(1, _LABEL_BYTES * num_rows // tensor.nbytes)
            for at in range(start, end, count):
                rows = self._rows(tensor, num_rows, slice(at, min(at + count, end)))
                blocks = torch.from_numpy(rows.reshape(-1, SIZES["MXFP4"][1]))
                label = label_of("MXFP4", blocks[:, 0], functools.partial(blocks.narrow, 1, 1, 16))
                if label != "MXFP4":
                    return label
        return "MXFP4"

    def content_hash(self) -> str:
        tensors = [
            (name, tensor.nbytes, functools.partial(self._stored, tensor))
            for name, tensor in self._tensors.items()
        ]
        headers = zip(self._maps, self._header_bytes, strict=True)
        digest = content_hash([(len(file), file[:size]) for file, size in headers], tensors)
        for file in self._maps:
            release(file, 0, len(file))
        return digest

    def stored_tensors(self) -> Iterator[tuple[str, GGUFTensor]]:
        """Return the file's tensors by Hugging Face name.

        Raises:
            CheckpointError: The file splits or changes tensors.
        """
        if self._views or any(map(self._is_changed, self._tensors)):
            raise CheckpointError(
                f"{self.path}: {self.config.model_type} has other tensors in GGUF; allowed: a "
                "dense model, as llama or qwen2"
            )
        return iter(self._tensors.items())

    def row_order(self, name: str) -> Order | None:
        """Return the file row for each Hugging Face row. None: equal order."""
        return self._file_rows(name, self._tensors[name]) if name in self._tensors else None

    def _stored(self, tensor: GGUFTensor, low: int, high: int) -> bytes:
        return self._maps[tensor.part][tensor.start + low : tensor.start + high]

    def _is_draft(self, name: str) -> bool:
        """Return whether a tensor belongs to the draft layers after the last layer."""
        match = _LAYER_NAME.fullmatch(name) or _DRAFT_NAME.fullmatch(name)
        last = self._metadata.get(f"{self._metadata['general.architecture']}.block_count")
        return match is not None and self.config.num_layers <= int(match[1]) < _as_int(last)

    def _make_views(self) -> dict[str, View]:
        """Return views for tensors with different splits than in Hugging Face files."""
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        found: dict[str, View] = {}
        if self._architecture.experts:
            config: Any = self.config
            together = self._architecture.experts == "together"
            found |= expert_views(config, shapes, together=together, path=self.path)
        if self._architecture.gguf_views is not None:
            found |= self._architecture.gguf_views(self.config, shapes, self.path)
        return found

    def _name_tensors(self) -> dict[str, TensorMeta]:
        parts = {piece.tensor for view in self._views.values() for piece in view.pieces}
        names = {
            name: TensorMeta(tensor.shape, tensor.dtype, tensor.nbytes)
            for name, tensor in self._tensors.items()
            if name not in parts
        }
        for name, view in self._views.items():
            pieces = [self._tensors[piece.tensor] for piece in view.pieces]
            rows = [piece.stop - piece.first for piece in view.pieces]
            nbytes = sum(
                count * _row_bytes(tensor) for count, tensor in zip(rows, pieces, strict=True)
            )
            names[name] = TensorMeta(view.shape, merged_type({t.dtype for t in pieces}), nbytes)
        return names

    def _pieces(
        self, view: View, start: int, stop: int
    ) -> Iterator[tuple[str, GGUFTensor, int, int]]:
        """Yield the stored tensors, or an expert's slices, for a view's rows."""
        for piece in view.rows(start, stop):
            yield piece.tensor, self._share(piece), piece.first, piece.stop

    def _share(self, piece: TensorSlice) -> GGUFTensor:
        whole = self._tensors[piece.tensor]
        if piece.expert is None:
            return whole
        nbytes = whole.nbytes // whole.shape[0]
        at = whole.start + piece.expert * nbytes
        return dataclasses.replace(whole, shape=whole.shape[1:], start=at, nbytes=nbytes)

    def _values(self, name: str, tensor: GGUFTensor, start: int, stop: int) -> Tensor:
        """Return a stored tensor's rows with Hugging Face's order and values."""
        shape = (stop - start, *tensor.shape[1:])
        if len(shape) == 1 and TENSOR_TYPES[tensor.dtype][1] > 1:  # rows have no separate bytes
            whole = dequantise(self._rows(tensor, 1, slice(1)), tensor.dtype)
            order = self._file_rows(name, tensor)
            values = whole[slice(start, stop) if order is None else order[start:stop]].clone()
        else:
            blocks = self._taken(name, tensor, start, stop)
            values = dequantise(blocks, tensor.dtype).reshape(shape)
        if not self._is_changed(name):
            return values
        if name.endswith(DECAY):
            return log_decay(values, name, self.path)
        if _NORM.search(name):
            return values - self._architecture.gguf_norm_offset
        columns = tiled_columns(name, self._delta())
        assert columns is not None, name
        return values[:, columns] if values.shape[1] == len(columns) else values

    def _taken(self, name: str, tensor: GGUFTensor, start: int, stop: int) -> Bytes:
        """Return the bytes of rows in Hugging Face order."""
        order = self._file_rows(name, tensor)
        taken = slice(start, stop) if order is None else order[start:stop]
        return self._rows(tensor, tensor.shape[0], taken)

    def _is_changed(self, name: str) -> bool:
        """Return whether the file has different values or columns than Hugging Face's."""
        if _NORM.search(name) and not name.endswith("linear_attn.norm.weight"):
            return self._architecture.gguf_norm_offset != 0.0
        is_tiled = self._architecture.gguf_tiled_heads and name.endswith("out_proj.weight")
        return name.endswith(DECAY) or is_tiled

    def _delta(self) -> DeltaShape:
        config: Any = self.config
        delta: DeltaShape = config.delta
        return delta

    def _complete_config(self, tensors: Mapping[str, GGUFTensor]) -> ModelConfig:
        config = self.config
        rope = config.rope
        factors = {
            name: self._factors(name, tensors[name], config)
            for name in _CONSTANTS
            if name in tensors
        }
        if _ROPE_FACTORS in factors:
            rope = dataclasses.replace(rope, freq_factors=factors[_ROPE_FACTORS])
        if _SHORT_FACTORS in factors or _LONG_FACTORS in factors:
            for name in (_SHORT_FACTORS, _LONG_FACTORS):
                if name not in factors:
                    raise CheckpointError(
                        f"{self.path}: tensor {name} is missing; "
                        f"allowed: {_SHORT_FACTORS} and {_LONG_FACTORS}, or neither"
                    )
            keys = Keys(self._metadata, self.path, f"{self._metadata['general.architecture']}.")
            pair = factors[_SHORT_FACTORS], factors[_LONG_FACTORS]
            scaling = gguf_longrope(keys, pair, config.max_positions)
            rope = dataclasses.replace(rope, scaling=scaling)
        embedding = self._tensors.get("model.embed_tokens.weight")
        vocab_key = f"{self._metadata['general.architecture']}.vocab_size"
        vocab_size = config.vocab_size
        if embedding is not None and vocab_key not in self._metadata:
            vocab_size = embedding.shape[0]
        layer, names = "model.layers.0.", self._tensors
        return dataclasses.replace(
            config,
            name=_TYPE_SUFFIX.sub("", stem_of(self.path)),
            vocab_size=vocab_size,
            rope=rope,
            tie_embeddings="lm_head.weight" not in names,
            attention_bias=config.attention_bias
            or f"{layer}self_attn.q_proj.bias" in self._tensors,
            qk_norm=config.qk_norm or f"{layer}self_attn.q_norm.weight" in names,
            output_bias=f"{layer}self_attn.o_proj.bias" in self._tensors,
            mlp_bias=f"{layer}mlp.gate_proj.bias" in self._tensors,
        )

    def _factors(self, name: str, tensor: GGUFTensor, config: ModelConfig) -> tuple[float, ...]:
        expected = (config.rope.num_pairs(config.head_dim),)
        if tensor.shape != expected or tensor.dtype != "F32":
            raise CheckpointError(
                f"{self.path}: tensor {name} is {tensor.dtype} {list(tensor.shape)}; "
                f"allowed: F32 {list(expected)}"
            )
        factors = np.frombuffer(self._stored(tensor, 0, tensor.nbytes), "<f4")
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise CheckpointError(
                f"{self.path}: tensor {name} has a factor that is not above 0; allowed: above 0"
            )
        return tuple(factors.tolist())

    def _file_rows(self, name: str, tensor: GGUFTensor) -> Order | None:
        """Return the file row for each Hugging Face row. None: equal order.

        GGUF may have adjacent rotation pairs (2i, 2i + 1 within a head). Hugging Face has pairs
        half a head apart (i, i + D / 2). Biases are reordered like weights.
        """
        if self._architecture.gguf_tiled_heads:
            order = tiled_rows(name, self._delta())
            return order if order is not None and len(order) == tensor.shape[0] else None
        is_all = self._architecture.gguf_pairs_adjacent
        if not is_all and not self._architecture.has_adjacent_pairs:
            return None
        if ".self_attn.q_proj." in name:
            num_heads = self.config.num_heads
        elif ".self_attn.k_proj." in name:
            num_heads = self.config.num_kv_heads
        else:
            return None
        num_rows = tensor.shape[0]
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has {num_rows} rows; "
                f"allowed: a multiple of 2 x {num_heads} heads"
            )
        some = 2 * self.config.rope.num_pairs(self.config.head_dim)
        return half_split_order(num_rows, num_heads, num_rows // num_heads if is_all else some)

    def _rows(self, tensor: GGUFTensor, num_rows: int, which: slice | Order) -> Bytes:
        """Return a copy of stored rows, ``[rows, bytes per row]``."""
        file = self._maps[tensor.part]
        stored = np.frombuffer(file, np.uint8, tensor.nbytes, tensor.start)
        table = stored.reshape(num_rows, tensor.nbytes // num_rows)
        taken: Bytes = table[which].copy() if isinstance(which, slice) else table[which]
        del stored, table
        release(file, tensor.start, tensor.nbytes)
        return taken


def hf_name(name: str, layer_names: Mapping[str, str] = _PER_LAYER) -> str:
    """Return the Hugging Face name for a GGUF tensor. Unknown names are unchanged.

    ``layer_names`` maps GGUF's names in a layer.
    """
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return name
    prefix = f"model.layers.{match[1]}."
    if match[2] in layer_names and (match[4] is None or "." in match[2]):
        return prefix + layer_names[match[2]]
    if match[4] is None or match[3] not in layer_names:
        return name
    return f"{prefix}{layer_names[match[3]]}.{match[4]}"


def _row_bytes(tensor: GGUFTensor) -> int:
    """Return the stored bytes per row. Rows are counted over all axes except the last."""
    return tensor.nbytes // math.prod(tensor.shape[:-1])


def _as_int(value: object) -> int:
    return value if isinstance(value, int) else 0
