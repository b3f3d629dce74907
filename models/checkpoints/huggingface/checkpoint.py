"""A Hugging Face directory as a checkpoint: config.json and safetensors, in one or more shards.

Architectures and tokenizers are defined elsewhere.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewright.errors import CheckpointError, allowed, one_line
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    content_hash,
    outer_rows,
    row_range,
    shown,
    unknown_tensor,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.checkpoints.huggingface.shards import INDEX, find_shards
from tilewright.models.checkpoints.huggingface.vision import PROCESSORS, read_vision
from tilewright.models.checkpoints.pairs import Order, half_split_order
from tilewright.models.checkpoints.pieces import TensorSlice, View, expert_views, merged_type
from tilewright.models.checkpoints.quantized.alternating import take_alternating
from tilewright.models.checkpoints.quantized.base import QuantizedTensor, RawModel, RawTensor, Read
from tilewright.models.checkpoints.quantized.config import SIDE_FILES, read_config
from tilewright.models.checkpoints.quantized.methods import take_quantized
from tilewright.models.config import ModelConfig

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_RAW_BYTES = {
    **ELEMENT_BYTES,
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "U32": 4, "I64": 8},
}
"""Bytes per element in stored tensors, including quantized modules."""
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Prefixes of the text model in multimodal files, and their replacements."""
_OTHER_PARTS = (
    *("mtp.", "vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
    *("model.vision_adapter.", "model.vision_projection."),
)
"""Prefixes of tensors outside the model: unsupported image towers, and the draft layer."""
_TOWER, _TOWER_PREFIX = "visual.", "model.visual."
_TILE_TOWER, _SQUARE_TOWER = "vision_model.", "siglip."
_UNUSED = "siglip.head."
"""Pooled output of SigLIP, without use in language models."""
_FLAT = (
    *("visual.patch_embed.proj.weight", "vision_model.patch_embedding.weight"),
    "siglip.embeddings.patch_embedding.weight",
)
"""Convolutions over patches. Their rows are read as vectors."""
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,6})\.")
_COMPARED_ROWS = 4096
_MOST_MAPPED = 1 << 26
"""Bytes to read from a shard before reopening, which frees mapped memory."""


class SafetensorsCheckpoint:
    """An opened Hugging Face directory. See `tilewright.models.checkpoints.base.Checkpoint`.

    Raises:
        CheckpointError: A file is missing, truncated, corrupt or unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._device = path, torch.device("cpu")
        values = read_config(path)
        self.config = self._config_of(values)
        self._shards, expected = find_shards(path)
        self._files = {shard: _open_shard(path / shard) for shard in self._shards}
        self._num_mapped = dict.fromkeys(self._shards, 0)
        self._shard_of: dict[str, str] = {}
        self.names: dict[str, TensorMeta] = {}
        self._stored_name: dict[str, str] = {}
        architecture = architecture_of(self.config.model_type)
        self._has_parts, self._experts = architecture.text_config, architecture.experts
        self._has_adjacent_pairs = architecture.has_adjacent_pairs
        self._draft_layers = _draft_layers(values, self.config.num_layers)
        self.vision, why = read_vision(values, self.config, path)
        self._prefixes, self._skips = architecture.hf_prefixes, architecture.skips_tensor
        for shard in self._shards:
            self._read_names(shard)
        self._quantized = self._take_quantized(values)
        self._stored_types: dict[str, str] = {}
        for stored, shard in expected.items():
            name = self._name_of(stored)
            if name is None:
                continue
            if self._shard_of.get(name, shard) != shard or (
                name not in self._shard_of and not name.endswith(_IGNORED_SUFFIX)
            ):
                raise CheckpointError(
                    f"{path / shard}: tensor {shown(name)}, which {INDEX} lists, is missing; "
                    "allowed: the shards of a model with its index"
                )
        self._views = self._make_views()
        self._settle_head(says="tie_word_embeddings" in values)
        self._settle_tower(why)

    def on(self, device: torch.device) -> SafetensorsCheckpoint:
        """Return the checkpoint with tensors on a device, which decodes most quantized tensors."""
        checkpoint = copy.copy(self)
        checkpoint._device = device
        return checkpoint

    def _config_of(self, values: dict[str, Any]) -> ModelConfig:
        return config_of_hf(values, where=self.path / "config.json")

    @property
    def files(self) -> tuple[Path, ...]:
        optional = [
            name for name in (INDEX, *SIDE_FILES, *PROCESSORS) if (self.path / name).is_file()
        ]
        names = ("config.json", *optional, *self._shards)
        return tuple(self.path / name for name in names)

    @property
    def tokenizer_source(self) -> TokenizerSource:
        return TokenizerSource(self.path)

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        shape = self.names[name].shape
        if not shape:
            return self._read(name, ())
        start, stop = row_range(outer_rows(rows), shape[0])
        inner = rows[1] if isinstance(rows, tuple) else slice(None)
        wide = slice(None) if columns is None else columns
        last = (wide,) if len(shape) > 1 else ()
        order = self._pair_order(name)
        if order is not None:
            return self._read(name, (slice(None), *last))[torch.from_numpy(order[start:stop])]
        if name not in self._views:
            middle = (inner, *[slice(None)] * (len(shape) - 3)) if len(shape) > 2 else ()
            return self._read(name, (slice(start, stop), *middle, *last))
        view = self._views[name]
        if isinstance(rows, tuple):
            pieces = view.parts(start, stop, *row_range(inner, shape[1]))
        else:
            pieces = view.rows(start, stop)
        parts = [self._read_piece(piece, wide) for piece in pieces]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)
        width = len(range(*wide.indices(shape[-1])))
        if isinstance(rows, tuple):
            return joined.reshape(stop - start, len(range(*inner.indices(shape[1]))), width)
        return joined.reshape(stop - start, *shape[1:-1], width)

    def _pair_order(self, name: str) -> Order | None:
        """Return the stored rows in half-split order. None: equal order."""
        if not self._has_adjacent_pairs:
            return None
        config, num_rows = self.config, self.names[name].shape[0]
        module = name.rpartition(".")[0].rpartition(".")[2]
        counts = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        num_heads = counts.get(module, 0)
        if num_heads * config.head_dim != num_rows:  # including other tensors
            return None
        return half_split_order(num_rows, num_heads, 2 * config.rope.num_pairs(config.head_dim))

    def _read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Return a slice of a tensor. Scalars are whole."""
        if name not in self._quantized:
            return self._read_raw(name, where).to(self._device)
        tensor = self._quantized[name]
        # The caller's default device is for random tensors.
        with self._device if tensor.runs_on_device else torch.device("cpu"):
            return tensor.slices(self._reader(tensor), where).to(self._device)

    def _reader(self, tensor: QuantizedTensor) -> Read:
        """Return a read function for a tensor's arithmetic."""
        if not tensor.runs_on_device:
            return self._read_raw
        return lambda name, where: self._read_raw(name, where).to(self._device)

    def _read_raw(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Return a slice of a stored tensor, or the whole tensor without slices."""
        shard = self._shard_of[name]
        read = self._read_mapped(shard, name, where)
        self._num_mapped[shard] += read.nbytes
        # Mapped pages stay in memory while the file is open.
        if self._num_mapped[shard] > _MOST_MAPPED:
            self._files[shard] = _open_shard(self.path / shard)
            self._num_mapped[shard] = 0
        return read

    def _read_mapped(self, shard: str, name: str, where: tuple[slice, ...]) -> Tensor:
        file = self._files[shard]
        try:
            view = file.get_slice(self._stored_name[name])
            if not where or not view.get_shape():
                return _owned(file.get_tensor(self._stored_name[name]))
            if name in _FLAT:
                return _owned(view[where[0]].flatten(1)[:, *where[1:]])
            return _owned(view[where])
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.path / shard, error) from None

    def _read_piece(self, piece: TensorSlice, columns: slice) -> Tensor:
        rows = slice(piece.first, piece.stop)
        if piece.expert is None:
            return self._read(piece.tensor, (rows, columns))
        expert = slice(piece.expert, piece.expert + 1)
        return self._read(piece.tensor, (expert, rows, columns))[0]

    def stored_type(self, name: str) -> str:
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        if name not in self._stored_types:
            pieces = self._views[name].pieces if name in self._views else ()
            parts = {piece.tensor for piece in pieces} or {name}
            self._stored_types[name] = merged_type({self._own_type(part) for part in parts})
        return self._stored_types[name]

    def _own_type(self, name: str) -> str:
        if name in self._quantized:
            return self._quantized[name].stored_type(self._read_raw)
        return self._types[name]

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, npt.NDArray[np.uint8]]:
        """Return `stored_blocks` as an array."""
        label, blocks = self.stored_blocks(name, rows)
        return label, blocks.numpy()

    def stored_blocks(self, name: str, rows: slice | None = None) -> tuple[str, Tensor]:
        """Return a quantized tensor's rows as blocks, and ggml's name of their format.

        The format is the equivalent of the tensor's `stored_type`.

        Raises:
            CheckpointError: The name is unknown.
        """
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        num_rows = self.names[name].shape[0]
        start, stop = row_range(rows, num_rows)
        order = self._pair_order(name)
        if order is not None:
            whole = self._quantized[name]
            label, blocks = whole.stored(self._reader(whole), 0, num_rows)
            return label, blocks.reshape(num_rows, -1)[torch.from_numpy(order[start:stop])]
        pieces = [TensorSlice(name, start, stop)]
        if name in self._views:
            pieces = list(self._views[name].rows(start, stop))
        kinds, parts = set(), []
        for piece in pieces:
            part = self._quantized[piece.tensor]
            kind, blocks = part.stored(self._reader(part), piece.first, piece.stop)
            kinds.add(kind)
            parts.append(blocks.to(self._device))
        (kind,) = kinds
        blocks = parts[0] if len(parts) == 1 else torch.cat(parts)
        return kind, blocks.reshape(stop - start, -1)

    def content_hash(self) -> str:
        settings = [self.path / name for name in ("config.json", *SIDE_FILES)]
        headers = [_header_of(file, whole=True) for file in settings if file.is_file()]
        headers += [_header_of(self.path / shard) for shard in self._shards]
        tensors = []
        for shard in self._shards:
            tensors += _stored_tensors(self.path / shard, set(self._stored_name.values()))
        return content_hash(headers, tensors)

    def _read_names(self, shard: str) -> None:
        file = self._files[shard]
        for stored in sorted(file.keys()):
            name = self._name_of(stored)
            if name is None or name.endswith(_IGNORED_SUFFIX):
                continue
            if name in self.names:
                raise CheckpointError(
                    f"{self.path / shard}: tensor {shown(name)} is in {self._shard_of[name]} too; "
                    "allowed: once"
                )
            view = file.get_slice(stored)
            shape, dtype = tuple(view.get_shape()), str(view.get_dtype())
            shape = (shape[0], math.prod(shape[1:])) if name in _FLAT and shape else shape
            if dtype not in _RAW_BYTES:
                raise self._unread_type(shard, name, dtype)
            nbytes = math.prod(shape) * _RAW_BYTES[dtype]
            self.names[name] = TensorMeta(shape, dtype, nbytes)
            self._shard_of[name] = shard
            self._stored_name[name] = stored

    def _unread_type(self, shard: str, name: str, dtype: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / shard}: tensor {shown(name)} has type {dtype}, "
            "which is not read; " + allowed(ELEMENT_BYTES)
        )

    def _take_quantized(self, values: Mapping[str, object]) -> dict[str, QuantizedTensor]:
        """Replace stored tensors of quantized modules with their weights in ``names``."""
        raw = {n: RawTensor(m.shape, m.dtype, m.nbytes) for n, m in self.names.items()}
        metadata = {
            key: text
            for file in self._files.values()
            for key, text in (file.metadata() or {}).items()
        }
        model = RawModel(
            self.path,
            dict(raw),
            self._read_raw,
            stored_names=self._stored_name,
            metadata=metadata,
        )
        take_quantized(values, str(self.path / "config.json"), model)
        if self._experts == "alternating":
            take_alternating(model)
        self.notes = tuple(model.notes)
        self.names = {name: self.names[name] for name in model.tensors}
        for name, meta in self.names.items():
            if meta.dtype not in ELEMENT_BYTES:
                raise self._unread_type(self._shard_of[name], name, meta.dtype)
        for name, weight in model.found.items():
            nbytes = sum(raw[part].nbytes for part in weight.names) // weight.num_shares
            self.names[name] = TensorMeta(weight.shape, weight.label, nbytes)
        self._types = {name: meta.dtype for name, meta in self.names.items()}
        return model.found

    def _make_views(self) -> dict[str, View]:
        """Return views for experts with different splits than the architecture's, and update
        ``names``.
        """
        if self._experts not in ("apart", "together"):
            return {}
        config: Any = self.config
        shapes = {name: meta.shape for name, meta in self.names.items()}
        views = expert_views(config, shapes, together=self._experts == "together", path=self.path)
        parts = {piece.tensor for view in views.values() for piece in view.pieces}
        stored = {name: self.names.pop(name) for name in parts}
        for name, view in views.items():
            dtype = merged_type({stored[piece.tensor].dtype for piece in view.pieces})
            nbytes = 0
            for piece in view.pieces:
                whole = stored[piece.tensor]
                rows = piece.stop - piece.first
                nbytes += whole.nbytes * rows // math.prod(whole.shape[:-1])
            self.names[name] = TensorMeta(view.shape, dtype, nbytes)
        return views

    def _name_of(self, stored: str) -> str | None:
        """Return a tensor's name in the text model, or None for tensors outside the model."""
        layer = _LAYER_NAME.match(stored)
        if layer is not None and int(layer[1]) in self._draft_layers:
            return None
        if not self._has_parts:
            return stored
        for prefix, own in self._prefixes.items():
            if stored.startswith(prefix):
                stored = own + stored.removeprefix(prefix)
                break
        if self._skips is not None:
            is_skipped = self.vision is None and self._skips(self.config, stored)
            is_skipped |= stored.startswith(_UNUSED)
            return None if is_skipped else stored
        if stored.startswith(_OTHER_PARTS):
            return None
        if stored.startswith(_TOWER_PREFIX):
            return None if self.vision is None else _TOWER + stored.removeprefix(_TOWER_PREFIX)
        for prefix, text in _TEXT_PREFIXES.items():
            if stored.startswith(prefix):
                return text + stored.removeprefix(prefix)
        return stored

    def _settle_tower(self, why: str) -> None:
        """Drop a tower without tensors. ``why``: the reason for a model without a tower."""
        if why:
            self.notes = (*self.notes, why)
        elif self.vision is not None:
            towers = (_TOWER, _TILE_TOWER, _SQUARE_TOWER)
            if any(name.startswith(towers) for name in self.names):
                return
            self.vision = None
            if self._skips is not None:
                skipped = [name for name in self.names if self._skips(self.config, name)]
                self.names = {n: meta for n, meta in self.names.items() if n not in skipped}

    def _settle_head(self, says: bool) -> None:
        """Determine whether the head is tied, if config.json has no key or the file has two
        copies.
        """
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.names:
            if not says:
                self.config = dataclasses.replace(self.config, tie_embeddings=True)
            return
        if not self.config.tie_embeddings:
            return
        ours, table = self.names[head], self.names.get(embedding)
        same = table is not None and (ours.dtype, ours.shape[1:]) == (table.dtype, table.shape[1:])
        same = same and ours.shape[0] == self.config.vocab_size  # a table may have more rows
        for start in range(0, ours.shape[0] if same else 0, _COMPARED_ROWS):
            rows = slice(start, min(start + _COMPARED_ROWS, ours.shape[0]))
            same = same and torch.equal(self.get(head, rows), self.get(embedding, rows))
        if not same:
            raise CheckpointError(
                f"{self.path}: {head} differs from {embedding}, but config.json has "
                "tie_word_embeddings = true; allowed: equal tensors, no lm_head.weight, or false"
            )
        for stored in self._quantized[head].names if head in self._quantized else (head,):
            del self._shard_of[stored], self._stored_name[stored]
        del self.names[head]


def _draft_layers(values: Mapping[str, object], num_layers: int) -> range:
    """Return the layers after the last layer that only draft tokens."""
    count = values.get("num_nextn_predict_layers")
    return range(num_layers, num_layers + (count if isinstance(count, int) else 0))


def _open_shard(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: the shard is missing; allowed: all shards")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: cut short or corrupt safetensors file: {one_line(error)}; allowed: a whole file"
    )


def _owned(tensor: Tensor) -> Tensor:
    """Copy a tensor: the library may return a view of the mapped file."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _header_of(path: Path, whole: bool = False) -> tuple[int, bytes]:
    """Return the file size, and the safetensors header (length and JSON) or the ``whole`` file."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if whole:
            return size, file.read()
        prefix = file.read(8)
        return size, prefix + file.read(int.from_bytes(prefix, "little"))


def _stored_tensors(path: Path, names: Container[str]) -> list[Any]:
    """Return name, bytes and byte reader for each tensor in an opened, valid shard."""
    _, header = _header_of(path)

    def reader(start: int) -> Any:
        def read(low: int, high: int) -> bytes:
            with path.open("rb") as file:
                file.seek(start + low)
                return file.read(high - low)

        return read

    stored = []
    for name, entry in json.loads(header[8:]).items():
        if name != "__metadata__" and name in names:
            start, stop = entry["data_offsets"]
            stored.append((name, stop - start, reader(len(header) + start)))
    return stored
