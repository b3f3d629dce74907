"""The draft layer of a GGUF file (``blk.N.nextn.*``), as a checkpoint with a single layer.

N is the number of the model's layers. llama.cpp's converter adds 1 to the norms. In ``mtp.fc``, the
columns for the embedding precede the columns for the hidden state.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tilewright.compiler.formats.ggml_blocks import Bytes, larger_blocks
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import Rows, TensorMeta
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint, hf_name
from tilewright.models.config import HybridConfig, ModelConfig

_FC = "mtp.fc.weight"
_HALVES = ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight")
"""Columns of ``mtp.fc`` for the embedding, and for the hidden state."""
_NAMES = {
    "eh_proj": _FC,
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "shared_head_norm": "mtp.norm.weight",
}
_SHARED = ("token_embd.weight", "output.weight")
_LAYER = re.compile(r"blk\.(\d{1,6})\.(?:nextn\.(\w+)\.weight)?")
_WIDEST_BLOCK = 256
_ALLOWED = 'allowed: a file with the draft layer, or --speculative-config without "mtp"'


class GGUFDraftLayerCheckpoint(GGUFCheckpoint):
    """A draft layer's tensors, with the model's embedding and head. The layer has index 0.

    Raises:
        CheckpointError: The draft layer is missing or unsupported. See also `GGUFCheckpoint`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if _FC not in self.names:
            raise CheckpointError(
                f"{path}: no tensor blk.{self._index}.nextn.eh_proj.weight; {_ALLOWED}"
            )
        assert isinstance(self.names, dict)
        fc = self.names.pop(_FC)
        height, columns = fc.shape if len(fc.shape) == 2 else (0, 0)
        for name in _HALVES:
            self.names[name] = TensorMeta((height, columns // 2), fc.dtype, fc.nbytes // 2)

    def _config_of(self, config: ModelConfig) -> HybridConfig:
        assert isinstance(config, HybridConfig)
        self._index = config.num_layers
        return dataclasses.replace(config, num_layers=1, linear_layers=(False,), dense_layers=())

    def _name_of(self, name: str, layer_names: Mapping[str, str]) -> str | None:
        if name in _SHARED:
            return hf_name(name, layer_names)
        if name not in self.draft_names:
            return None
        match = _LAYER.match(name)
        assert match is not None, name
        if int(match[1]) != self._index:
            raise CheckpointError(
                f"{self.path}: {match[0]}* is a second draft layer; allowed: a single layer"
            )
        if ".nextn." not in name:
            return hf_name(name.replace(f"blk.{self._index}.", "blk.0.", 1), layer_names)
        if match[2] not in _NAMES:
            raise CheckpointError(
                f"{self.path}: {name} is not read; allowed: the model's embedding and head"
            )
        return _NAMES[match[2]]

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        if name not in _HALVES:
            return super().get(name, rows, columns)
        count, width = self.names[name].shape
        whole = slice(None) if rows is None or isinstance(rows, tuple) else rows
        start, stop, _ = whole.indices(count)
        first = _HALVES.index(name) * width
        values = self._values(_FC, self._tensors[_FC], start, stop)[:, first : first + width]
        return values[:, columns or slice(None)].contiguous()

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, Bytes]:
        if name not in _HALVES:
            return super().stored(name, rows)
        tensor = self._tensors[_FC]
        start, stop, _ = (rows or slice(None)).indices(self.names[name].shape[0])
        dtype, taken = larger_blocks(self._taken(_FC, tensor, start, stop), tensor.dtype)
        taken = taken.reshape(stop - start, -1)
        width = taken.shape[1] // 2
        first = _HALVES.index(name) * width
        return dtype, taken[:, first : first + width].copy()

    def stored_type(self, name: str) -> str:
        if name not in _HALVES:
            return super().stored_type(name)
        meta = self.names[name]
        return "F32" if meta.shape[1] % _WIDEST_BLOCK else meta.dtype
