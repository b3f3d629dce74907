"""Writes a checkpoint as a dllama ``.m`` file, in chunks of rows.

It does not quantize. The caller provides a packing function with ggml's Q4_0 bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.formats.ggml_blocks import Bytes
from tilewright.errors import CheckpointError, allowed
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.base import Checkpoint, check_tensors
from tilewright.models.checkpoints.dllama.checkpoint import config_of
from tilewright.models.checkpoints.dllama.header import (
    ARCHITECTURES,
    DllamaHeader,
    DllamaTensor,
    tensors,
    write_header,
)
from tilewright.models.checkpoints.gguf.header import TENSOR_TYPES
from tilewright.models.config import Llama3Scaling, ModelConfig, RopeConfig

WRITTEN_TYPES = ("F32", "Q4_0")
_CHUNK_VALUES = 1 << 22
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_EPSILONS = (1e-5, 1e-6)
_WRITTEN_AS = {name: name for name in ARCHITECTURES.values()} | {"mistral": "llama"}
_EXPERT_SIZES = {
    "num_experts": "num_experts",
    "num_active_experts": "experts_per_token",
    "expert_size": "expert_size",
}
# The scalings of Llama 3.1 and 3.2. A GGUF file contains only the resulting factors.
_KNOWN_SCALINGS = (
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    Llama3Scaling(32.0, 1.0, 4.0, 8192),
)
_FACTOR_TOLERANCE = 1e-5

PackBlocks = Callable[[Tensor], Tensor]
"""Packs float32 ``[rows, columns]`` to ggml's Q4_0 bytes, flat."""


@runtime_checkable
class HoldsBlocks(Protocol):
    """A checkpoint with access to stored blocks, to avoid another quantization."""

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, Bytes]:
        """Return ggml's type name and bytes ``[rows, bytes per row]``."""


def header_of(config: ModelConfig, weights: str, path: Path) -> DllamaHeader:
    """Return the header for ``config``. ``weights`` is in `WRITTEN_TYPES`.

    Raises:
        CheckpointError: A ``.m`` file cannot express the configuration. The message has ``path``.
    """
    assert weights in WRITTEN_TYPES, weights
    if config.model_type not in _WRITTEN_AS:
        raise _unsayable(path, "model_type", config.model_type, _WRITTEN_AS)
    if config.norm_eps not in _EPSILONS:
        raise _unsayable(path, "norm_eps", config.norm_eps, _EPSILONS)
    theta = config.rope.theta
    if theta != int(theta) or not 1 <= theta < 1 << 31:
        raise _unsayable(path, "rope theta", theta, ("a whole number below 2**31",))
    model_type = _WRITTEN_AS[config.model_type]
    header = DllamaHeader(
        model_type=model_type,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        weights=weights,
        norm_eps=config.norm_eps,
        rope_theta=int(theta),
        pairs_adjacent=model_type == "llama",
        scaling=_whole_scaling(config, path),
        **_expert_sizes(config),
    )
    _check_nothing_is_lost(config, header, path)
    return header


def _expert_sizes(config: ModelConfig) -> dict[str, int]:
    return {
        ours: getattr(config, theirs)
        for ours, theirs in _EXPERT_SIZES.items()
        if hasattr(config, theirs)
    }


def _check_nothing_is_lost(config: ModelConfig, header: DllamaHeader, path: Path) -> None:
    """Raise CheckpointError if a field outside the header differs from the readers' default."""
    again = config_of(header, path)
    rope = dataclasses.replace(config.rope, scaling=header.scaling, freq_factors=None)
    config = dataclasses.replace(config, rope=rope)
    for field in dataclasses.fields(config):
        if field.name not in ("name", "model_type", "tie_embeddings"):
            value, said = getattr(config, field.name), getattr(again, field.name, None)
            if value != said:
                raise _unsayable(path, field.name, value, (said,))


def write_model(
    checkpoint: Checkpoint,
    file: BinaryIO,
    *,
    weights: str,
    pack_q40: PackBlocks,
    progress: Callable[[str, int, int], None],
    token_order: Sequence[range] = (),
) -> None:
    """Write ``checkpoint`` into ``file``, with matrices in ``weights`` and other tensors in F32.

    Existing Q4_0 blocks are copied unchanged. ``token_order`` has ranges of embedding and head rows
    to write first. Remaining rows follow.

    Raises:
        CheckpointError: A ``.m`` file cannot contain the model. A tensor is missing, extra or has
            the wrong shape, or a value is inf, NaN or too large.
        OSError: ``file`` cannot be written.
    """
    header = header_of(checkpoint.config, weights, checkpoint.path)
    write_tensors(
        checkpoint,
        file,
        header,
        tied=checkpoint.config.tie_embeddings,
        pack_q40=pack_q40,
        progress=progress,
        token_order=token_order,
    )


def write_tensors(
    checkpoint: Checkpoint,
    file: BinaryIO,
    header: DllamaHeader,
    *,
    tied: bool,
    pack_q40: PackBlocks,
    progress: Callable[[str, int, int], None],
    token_order: Sequence[range] = (),
) -> None:
    """Write the model described by ``header``, as `write_model`. ``tied``: the head is the
    embedding.
    """
    packed = write_header(header, checkpoint.path)
    plan = list(tensors(header))
    expected = {t.name: t.shape for t in plan if not (tied and t.name == _HEAD)}
    check_tensors(checkpoint, expected)
    vocabulary = _all_rows(token_order, header.vocab_size, checkpoint.path)
    file.write(packed)
    for done, tensor in enumerate(plan):
        source = _EMBEDDING if tied and tensor.name == _HEAD else tensor.name
        whole = [range(tensor.shape[0])]
        runs = vocabulary if tensor.name in (_EMBEDDING, _HEAD) else whole
        for rows in _row_chunks(header, tensor, runs):
            data = _packed_rows(checkpoint, source, rows, tensor.dtype, pack_q40)
            file.write(_in_file_order(data, tensor, header).tobytes())
        progress("weights", done + 1, len(plan))


def _all_rows(token_order: Sequence[range], num_rows: int, path: Path) -> list[range]:
    """Return ranges of embedding rows: tokens in their order, then rows without a token."""
    num_tokens = sum(map(len, token_order))
    if num_tokens > num_rows:
        raise CheckpointError(
            f"{path}: a tokenizer of {num_tokens} tokens for an embedding of {num_rows} rows; "
            "allowed: no more tokens than rows"
        )
    return [*token_order, range(num_tokens, num_rows)]


def _row_chunks(
    header: DllamaHeader, tensor: DllamaTensor, runs: Iterable[range]
) -> Iterator[slice]:
    """Yield chunks of ``runs``. Reordered tensors have whole heads per chunk."""
    unit = header.head_dim if tensor.num_heads else 1
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    step = max(1, _CHUNK_VALUES // columns // unit) * unit
    for run in runs:
        for start in range(run.start, run.stop, step):
            yield slice(start, min(start + step, run.stop))


def _packed_rows(
    checkpoint: Checkpoint, name: str, rows: slice, dtype: str, pack_q40: PackBlocks
) -> Bytes:
    """Return bytes ``[rows, bytes per row]`` with type ``dtype`` in Hugging Face order."""
    num_rows = rows.stop - rows.start
    is_same = dtype == "Q4_0" and checkpoint.names[name].dtype == dtype
    if is_same and isinstance(checkpoint, HoldsBlocks):
        kept = checkpoint.stored(name, rows)[1]
        _check_scales(kept, checkpoint, name)
        return kept
    values = checkpoint.get(name, rows).float().contiguous()
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has values that are inf or NaN; allowed: numbers"
        )
    if dtype == "F32":
        return values.view(torch.uint8).numpy().reshape(num_rows, -1)
    packed: Bytes = pack_q40(values).numpy().reshape(num_rows, -1)
    _check_scales(packed, checkpoint, name)
    return packed


def _check_scales(packed: Bytes, checkpoint: Checkpoint, name: str) -> None:
    block_bytes = TENSOR_TYPES["Q4_0"][2]
    scales = np.ascontiguousarray(packed.reshape(-1, block_bytes)[:, :2]).view("<f2")
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has a Q4_0 block whose scale is inf or NaN; "
            "allowed: values up to 8 x 65504"
        )


def _in_file_order(data: Bytes, tensor: DllamaTensor, header: DllamaHeader) -> Bytes:
    """Convert half-split rows to adjacent pairs, if the file requires this. ``data`` has whole
    heads.
    """
    if not tensor.num_heads:
        return data
    heads = data.reshape(-1, 2, header.head_dim // 2, data.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(data.shape)


def _whole_scaling(config: ModelConfig, path: Path) -> Llama3Scaling | None:
    scaling = config.rope.scaling
    if config.rope.freq_factors is not None:
        scaling = _scaling_of_factors(config, path)
    if scaling is None:
        return None
    if _WRITTEN_AS[config.model_type] != "llama":
        raise _unsayable(path, "rope scaling", scaling, (f"none for {config.model_type}",))
    if not isinstance(scaling, Llama3Scaling):
        raise _unsayable(path, "rope scaling", scaling, ("that of Llama 3.1",))
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        value = getattr(scaling, name)
        if value != int(value):
            raise _unsayable(path, f"rope {name}", value, ("a whole number",))
    return scaling if scaling.factor > 1 else None


def _scaling_of_factors(config: ModelConfig, path: Path) -> Llama3Scaling | None:
    """Return the known scaling for these frequency factors. None: all factors are 1."""
    assert config.rope.freq_factors is not None
    factors = np.array(config.rope.freq_factors)
    if (factors == 1).all():
        return None
    plain = np.array(inverse_frequencies(RopeConfig(config.rope.theta), config.head_dim))
    for known in _KNOWN_SCALINGS:
        rope = RopeConfig(config.rope.theta, scaling=known)
        scaled = np.array(inverse_frequencies(rope, config.head_dim))
        if np.allclose(plain / scaled, factors, rtol=_FACTOR_TOLERANCE, atol=0):
            return known
    raise _unsayable(path, "rope_freqs", "its own factors", ("those of Llama 3.1 or 3.2",))


def _unsayable(path: Path, name: str, value: object, choices: Iterable[object]) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} = {value} cannot be said in a dllama model; {allowed(choices)}"
    )
