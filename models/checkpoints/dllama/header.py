"""A dllama ``.m`` file's header: its keys, and the tensor order after it.

All numbers are checked. Tensors have Hugging Face names and are not read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import CheckpointError, allowed
from tilewright.models.checkpoints.gguf.header import TENSOR_TYPES
from tilewright.models.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Llama3Scaling,
)

MAGIC = 0x0A00ABCD
BLOCK_TYPES = ("F32", "F16", "Q4_0", "Q8_0")
"""ggml type names by their number in key 13."""

ARCHITECTURES: Mapping[int, str] = {0xABCD00: "llama", 0xABCD01: "qwen3", 0xABCD02: "qwen3_moe"}
KEYS = (
    *("version", "arch", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "num_experts", "num_active_experts", "vocab_size", "max_positions"),
    *("hidden_act", "rope_theta", "weights", "rope_factor", "rope_low_freq_factor"),
    *("rope_high_freq_factor", "rope_original_positions", "rope_type", "head_dim", "norm_eps"),
    "expert_size",
)
"""Names of the keys 0, 1, ..., for messages."""

# Order in dllama's converter.
_WRITTEN = (
    *("version", "arch", "hidden_act", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "weights", "max_positions", "vocab_size", "head_dim"),
    *("num_experts", "num_active_experts", "rope_theta", "rope_factor", "rope_low_freq_factor"),
    *("rope_high_freq_factor", "rope_original_positions", "rope_type", "norm_eps", "expert_size"),
)
_PREFIX = struct.Struct("<iI")
_PAIR = struct.Struct("<ii")
_EPSILONS = {5: 1e-5, 6: 1e-6}
_ADJACENT, _HALF_SPLIT, _LLAMA3 = range(3)
_SILU = 1
_MOE = "qwen3_moe"


@dataclass(frozen=True, slots=True)
class DllamaHeader:
    """Sizes and switches in a ``.m`` file. Sizes count elements.

    Attributes:
        weights: matrix type, see `BLOCK_TYPES`.
        pairs_adjacent: whether rotation pairs are adjacent rows in q and k. False: half-split.
        num_experts: experts. 0: dense model.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    weights: str
    norm_eps: float
    rope_theta: int
    pairs_adjacent: bool
    scaling: Llama3Scaling | None = None
    num_experts: int = 0
    num_active_experts: int = 0
    expert_size: int = 0


@dataclass(frozen=True, slots=True)
class DllamaTensor:
    """A tensor in the file. ``num_heads``: heads with reordered rows, or 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_heads: int = 0

    @property
    def nbytes(self) -> int:
        """Return the size in the file, in bytes."""
        _, block, block_bytes = TENSOR_TYPES[self.dtype]
        return math.prod(self.shape) // block * block_bytes


class _Values:
    """A header's numbers by name, with range checks."""

    def __init__(self, values: Mapping[str, int], path: Path) -> None:
        self.values = values
        self.path = path

    def error(self, name: str, tail: str) -> CheckpointError:
        value = self.values.get(name)
        said = "is missing" if value is None else f"= {value} is not read"
        return CheckpointError(f"{self.path}: {name} (key {KEYS.index(name)}) {said}; {tail}")

    def take(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if value is None or not low <= value <= high:
            raise self.error(name, f"allowed: {low} to {high}")
        return value

    def choice(self, name: str, choices: Mapping[int, str], *, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if value is None or value not in choices:
            meanings = (f"{number} ({meaning})" for number, meaning in choices.items())
            raise self.error(name, allowed(meanings))
        return value


def read_header(data: memoryview, path: Path) -> tuple[DllamaHeader, int]:
    """Return the header in a ``.m`` file's bytes ``data``, and its tensors' offset.

    Raises:
        CheckpointError: for another type of file, for an unknown, missing or repeated key, and for
            a value out of range or unsupported.
    """
    if len(data) < _PREFIX.size or _PREFIX.unpack_from(data)[0] != MAGIC:
        raise CheckpointError(
            f"{path}: not a dllama model (it does not begin with {MAGIC:#010x}); allowed: a .m "
            "file of dllama"
        )
    nbytes = _PREFIX.unpack_from(data)[1]
    longest = min(len(data), _PREFIX.size + len(KEYS) * _PAIR.size)
    if nbytes % _PAIR.size or not _PREFIX.size <= nbytes <= longest:
        raise CheckpointError(
            f"{path}: the header says it has {nbytes} bytes; allowed: a multiple of {_PAIR.size}, "
            f"up to {longest}"
        )
    values: dict[str, int] = {}
    for key, value in _PAIR.iter_unpack(data[_PREFIX.size : nbytes]):
        if not 0 <= key < len(KEYS):
            raise CheckpointError(
                f"{path}: header key {key} = {value} is unknown and may change the arithmetic; "
                f"allowed: 0 to {len(KEYS) - 1}"
            )
        if KEYS[key] in values:
            raise CheckpointError(
                f"{path}: {KEYS[key]} (key {key}) occurs twice in the header; allowed: keys once"
            )
        values[KEYS[key]] = value
    header = _parse(_Values(values, path))
    _check_widths(header, path)
    return header, nbytes


def _parse(values: _Values) -> DllamaHeader:
    values.choice("version", {0: "the only one"}, default=0)
    values.choice("hidden_act", {_SILU: "silu"}, default=_SILU)
    model_type = ARCHITECTURES[values.choice("arch", ARCHITECTURES)]
    hidden = values.take("hidden_size", 1, MAX_WIDTH)
    num_heads = values.take("num_heads", 1, MAX_HEADS)
    num_kv_heads = values.take("num_kv_heads", 1, num_heads)
    if num_heads % num_kv_heads:
        raise values.error("num_kv_heads", f"allowed: a divisor of the {num_heads} heads")
    head_dim = values.take("head_dim", 0, MAX_HEAD_DIM, default=0)
    if head_dim == 0 and hidden % num_heads == 0:
        head_dim = hidden // num_heads
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise values.error("head_dim", f"allowed: an even number from 2 to {MAX_HEAD_DIM}")
    is_moe = int(model_type == _MOE)
    num_experts = values.take("num_experts", is_moe, MAX_EXPERTS * is_moe, default=0)
    kinds = dict(enumerate(BLOCK_TYPES))
    is_half_split = _half_split(values, model_type)
    return DllamaHeader(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=values.take("intermediate_size", 0 if is_moe else 1, MAX_WIDTH),
        num_layers=values.take("num_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=values.take("vocab_size", 1, MAX_VOCAB),
        max_positions=values.take("max_positions", 1, MAX_POSITIONS),
        weights=kinds[values.choice("weights", kinds)],
        norm_eps=_EPSILONS[values.choice("norm_eps", {5: "1e-5", 6: "1e-6"}, default=5)],
        rope_theta=values.take("rope_theta", 1, (1 << 31) - 1, default=10000),
        pairs_adjacent=not is_half_split,
        scaling=_scaling(values, is_half_split),
        num_experts=num_experts,
        num_active_experts=values.take("num_active_experts", is_moe, num_experts, default=0),
        expert_size=values.take("expert_size", is_moe, MAX_WIDTH * is_moe, default=0),
    )


def _half_split(values: _Values, model_type: str) -> bool:
    """Return whether q and k have half-split rotation pairs. Qwen3 always has them."""
    kinds = {_ADJACENT: "adjacent pairs", _HALF_SPLIT: "half split", _LLAMA3: "Llama 3.1"}
    kind = values.choice("rope_type", kinds, default=_ADJACENT)
    return kind == _HALF_SPLIT or model_type != "llama"


def _scaling(values: _Values, is_half_split: bool) -> Llama3Scaling | None:
    factor = values.take("rope_factor", 1, 1 << 20, default=1)
    if factor == 1:
        return None
    if is_half_split:
        raise values.error("rope_factor", "allowed: 1 where rotation pairs are half a head apart")
    low = values.take("rope_low_freq_factor", 1, 1 << 20)
    return Llama3Scaling(
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(values.take("rope_high_freq_factor", low + 1, 1 << 20)),
        original_max_positions=values.take("rope_original_positions", 1, MAX_POSITIONS),
    )


def _check_widths(header: DllamaHeader, path: Path) -> None:
    """Check that matrix rows have whole blocks."""
    block = TENSOR_TYPES[header.weights][1]
    for tensor in _layer(header, 0):
        if tensor.dtype == header.weights and tensor.shape[-1] % block:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} has rows of {tensor.shape[-1]} in "
                f"{header.weights}; allowed: a multiple of {block}"
            )


def write_header(header: DllamaHeader, path: Path) -> bytes:
    """Return the header's bytes in the order of dllama's converter.

    Raises:
        CheckpointError: if `read_header` rejects a value. The message contains ``path``.
    """
    values = {
        "version": 0,
        "arch": next(n for n, name in ARCHITECTURES.items() if name == header.model_type),
        "hidden_act": _SILU,
        "hidden_size": header.hidden_size,
        "intermediate_size": header.intermediate_size,
        "num_layers": header.num_layers,
        "num_heads": header.num_heads,
        "num_kv_heads": header.num_kv_heads,
        "weights": BLOCK_TYPES.index(header.weights),
        "max_positions": header.max_positions,
        "vocab_size": header.vocab_size,
        "head_dim": header.head_dim,
        "num_experts": header.num_experts,
        "num_active_experts": header.num_active_experts,
        "rope_theta": header.rope_theta,
        "norm_eps": next(n for n, eps in _EPSILONS.items() if eps == header.norm_eps),
    }
    if header.scaling is not None:
        values["rope_factor"] = int(header.scaling.factor)
        values["rope_low_freq_factor"] = int(header.scaling.low_freq_factor)
        values["rope_high_freq_factor"] = int(header.scaling.high_freq_factor)
        values["rope_original_positions"] = header.scaling.original_max_positions
        values["rope_type"] = _LLAMA3
    elif header.model_type == "llama" and not header.pairs_adjacent:
        values["rope_type"] = _HALF_SPLIT
    if header.num_experts:
        values["expert_size"] = header.expert_size
    pairs = [(KEYS.index(name), values[name]) for name in _WRITTEN if name in values]
    body = b"".join(_PAIR.pack(*pair) for pair in pairs)
    packed = _PREFIX.pack(MAGIC, _PREFIX.size + len(body)) + body
    again, _ = read_header(memoryview(packed), path)
    assert again == header, (again, header)
    return packed


def tensors(header: DllamaHeader) -> Iterator[DllamaTensor]:
    """Yield the file's tensors in order. Lazy, because the layer count may be wrong."""
    hidden, vocab = header.hidden_size, header.vocab_size
    yield DllamaTensor("model.embed_tokens.weight", (vocab, hidden), "F32")
    for layer in range(header.num_layers):
        yield from _layer(header, layer)
    yield DllamaTensor("model.norm.weight", (hidden,), "F32")
    yield DllamaTensor("lm_head.weight", (vocab, hidden), header.weights)


def _layer(header: DllamaHeader, layer: int) -> Iterator[DllamaTensor]:
    prefix = f"model.layers.{layer}."
    hidden, kind = header.hidden_size, header.weights
    q_width = header.num_heads * header.head_dim
    kv_width = header.num_kv_heads * header.head_dim
    moved = (header.num_heads, header.num_kv_heads) if header.pairs_adjacent else (0, 0)

    def matrix(name: str, rows: int, columns: int, num_heads: int = 0) -> DllamaTensor:
        return DllamaTensor(f"{prefix}{name}.weight", (rows, columns), kind, num_heads)

    def vector(name: str, length: int) -> DllamaTensor:
        return DllamaTensor(f"{prefix}{name}.weight", (length,), "F32")

    yield matrix("self_attn.q_proj", q_width, hidden, moved[0])
    yield matrix("self_attn.k_proj", kv_width, hidden, moved[1])
    yield matrix("self_attn.v_proj", kv_width, hidden)
    yield matrix("self_attn.o_proj", hidden, q_width)
    if header.num_experts:
        yield DllamaTensor(f"{prefix}mlp.gate.weight", (header.num_experts, hidden), "F32")
        for expert in range(header.num_experts):
            yield matrix(f"mlp.experts.{expert}.gate_proj", header.expert_size, hidden)
            yield matrix(f"mlp.experts.{expert}.down_proj", hidden, header.expert_size)
            yield matrix(f"mlp.experts.{expert}.up_proj", header.expert_size, hidden)
    else:
        yield matrix("mlp.gate_proj", header.intermediate_size, hidden)
        yield matrix("mlp.down_proj", hidden, header.intermediate_size)
        yield matrix("mlp.up_proj", header.intermediate_size, hidden)
    if header.model_type != "llama":
        yield vector("self_attn.q_norm", header.head_dim)
        yield vector("self_attn.k_norm", header.head_dim)
    yield vector("input_layernorm", hidden)
    yield vector("post_attention_layernorm", hidden)
