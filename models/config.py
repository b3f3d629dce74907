"""One model configuration, whatever container it came from: config.json or GGUF metadata.

It checks every value against what the rest of the code can hold; it reads no files and no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import CheckpointError, allowed
from models.architectures import ARCHITECTURES, check_model_type
from models.hub import repository_name

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 4096
MAX_POSITIONS = 1 << 27


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base, scaling, and whether pairs are neighbours.

    ``freq_factors`` [head_dim / 2] are what a GGUF file carries instead of ``scaling``: each
    frequency is divided by its factor. ``interleaved`` is False for every checkpoint we read,
    because the readers put q and k rows into half-split order.
    """

    theta: float
    scaling: Llama3Scaling | None = None
    interleaved: bool = False
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and switches of a dense decoder; sizes are counts of elements.

    ``attention_bias`` is that of the q, k and v products, ``output_bias`` that of o.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, object], *, where: Path | str) -> ModelConfig:
        """From the contents of a Hugging Face ``config.json`` at ``where``.

        Raises:
            CheckpointError: a key that is missing, out of range, or of a kind that is not read.
        """
        keys = _Keys(values, where)
        model_type = check_model_type(values.get("model_type"), f"{where}: model_type")
        if values.get("quantization_config") is not None:
            method = values["quantization_config"]
            method = method.get("quant_method") if isinstance(method, Mapping) else method
            raise keys.error("quantization_config", method, "allowed: none, unquantised weights")
        keys.choice("hidden_act", ("silu",), default="silu")
        hidden = keys.integer("hidden_size", 1, MAX_WIDTH)
        num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
        num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
        max_positions = keys.integer("max_position_embeddings", 1, MAX_POSITIONS, default=2048)
        _refuse_sliding_window(keys, num_layers, max_positions)
        fixed_bias = ARCHITECTURES[model_type].has_qkv_bias
        bias = keys.boolean("attention_bias", default=False)
        return cls(
            name=_hf_name(values, where),
            model_type=model_type,
            vocab_size=keys.integer("vocab_size", 1, MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=keys.integer("intermediate_size", 1, MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(keys, "num_key_value_heads", num_heads),
            head_dim=_head_dim(keys, "head_dim", hidden, num_heads),
            max_positions=max_positions,
            norm_eps=keys.real("rms_norm_eps", 0.0, 1.0, default=1e-6),
            rope=_hf_rope(keys, max_positions),
            tie_embeddings=keys.boolean("tie_word_embeddings", default=False),
            attention_bias=bias or fixed_bias,
            output_bias=bias and not fixed_bias,
            mlp_bias=keys.boolean("mlp_bias", default=False),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, where: Path | str) -> ModelConfig:
        """From the key-value part of the GGUF file at ``where``.

        Tied embeddings, biases and frequency factors are tensors in a GGUF file, so the reader
        fills them in; here the embeddings are taken as tied, and only fixed biases are there.

        Raises:
            CheckpointError: a key that is missing, out of range, or of a kind that is not read.
        """
        model_type = check_model_type(
            metadata.get("general.architecture"), f"{where}: general.architecture"
        )
        keys = _Keys(metadata, where, prefix=f"{model_type}.")
        _refuse_gguf_extras(keys)
        hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
        num_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
        head_dim = _head_dim(keys, "attention.key_length", hidden, num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.integer(key, 1, MAX_HEAD_DIM, default=head_dim) != head_dim:
                raise keys.error(key, keys.get(key), f"allowed: the head size, {head_dim}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) and tokens else None
        return cls(
            name=Path(where).stem,
            model_type=model_type,
            vocab_size=keys.integer("vocab_size", 1, MAX_VOCAB, default=num_tokens),
            hidden_size=hidden,
            intermediate_size=keys.integer("feed_forward_length", 1, MAX_WIDTH),
            num_layers=keys.integer("block_count", 1, MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_kv_heads(keys, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=keys.integer("context_length", 1, MAX_POSITIONS),
            norm_eps=keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope=RopeConfig(theta=keys.real("rope.freq_base", 1.0, 1e15, default=10000.0)),
            tie_embeddings=True,
            attention_bias=ARCHITECTURES[model_type].has_qkv_bias,
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    """The ``head_dim / 2`` angles per position, float32 values as Hugging Face computes them.

    The float32 operations are those of transformers' ``default`` and ``llama3`` rope, in their
    order, so that results agree to the last bit; with ``freq_factors`` they are divided instead.
    """
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.freq_factors is not None:
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.scaling is not None:
        scaling = rope.scaling
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        length = scaling.original_max_positions
        wavelengths = 2 * math.pi / freqs
        scaled = torch.where(wavelengths > length / low, freqs / scaling.factor, freqs)
        smooth = (length / wavelengths - low) / (high - low)
        blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
        between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
        freqs = torch.where(between, blended, scaled)
    values: list[float] = freqs.tolist()
    return values


class _Keys:
    """Typed access to a mapping read from a file; failures name file, key, value and range."""

    def __init__(self, values: Mapping[str, object], where: Path | str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> object:
        return self.values.get(self.prefix + key)

    def error(self, key: str, value: object, tail: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.where}: {self.prefix}{key} = {shown} is not read; {tail}")

    def _missing(self, key: str, tail: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.prefix}{key} is missing; {tail}")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        tail = f"allowed: a whole number from {low} to {high}"
        value = self.get(key)
        if value is None:
            if default is None:
                raise self._missing(key, tail)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, tail)
        return int(value)

    def real(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A number in [low, high], 0 excluded."""
        tail = f"allowed: a number above 0, from {low:g} to {high:g}"
        value = self.get(key)
        if value is None:
            if default is None:
                raise self._missing(key, tail)
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, value, tail)
        if not (low <= value <= high and value > 0):
            raise self.error(key, value, tail)
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "allowed: true, false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], *, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, value, allowed(choices))
        return value


def _hf_name(values: Mapping[str, object], where: Path | str) -> str:
    folder = Path(where).parent
    name = values.get("_name_or_path")
    written = name if isinstance(name, str) and name else "model"
    return repository_name(folder) or folder.name or written


def _kv_heads(keys: _Keys, key: str, num_heads: int) -> int:
    num_kv_heads = keys.integer(key, 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(key, num_kv_heads, f"allowed: a divisor of the {num_heads} heads")
    return num_kv_heads


def _head_dim(keys: _Keys, key: str, hidden: int, num_heads: int) -> int:
    if keys.get(key) is None and hidden % num_heads:
        raise CheckpointError(
            f"{keys.where}: {keys.prefix}{key} is missing and the hidden size {hidden} "
            f"is not a multiple of the {num_heads} heads; allowed: a multiple"
        )
    head_dim = keys.integer(key, 1, MAX_HEAD_DIM, default=hidden // num_heads)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise keys.error(key, head_dim, f"allowed: an even number from 2 to {MAX_HEAD_DIM}")
    return head_dim


def _hf_rope(keys: _Keys, max_positions: int) -> RopeConfig:
    """Transformers 5 writes ``rope_parameters``, older files ``rope_theta``, ``rope_scaling``."""
    theta = keys.real("rope_theta", 1.0, 1e15, default=10000.0)
    section, value = "rope_parameters", keys.get("rope_parameters")
    older = keys.get("rope_scaling")
    if value is None:
        section, value = "rope_scaling", older
    elif older is not None and older != value:
        raise keys.error("rope_scaling", older, "allowed: null, or the same as rope_parameters")
    if value is None:
        return RopeConfig(theta=theta)
    if not isinstance(value, Mapping):
        raise keys.error(section, value, "allowed: null or an object")
    rope = _Keys(
        {f"{section}.{key}": item for key, item in value.items()}, keys.where, f"{section}."
    )
    theta = rope.real("rope_theta", 1.0, 1e15, default=theta)
    if rope.real("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        raise rope.error("partial_rotary_factor", rope.get("partial_rotary_factor"), "allowed: 1.0")
    type_key = "rope_type" if rope.get("rope_type") is not None else "type"
    if rope.choice(type_key, ("default", "llama3"), default="default") == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, scaling=_llama3_scaling(rope, max_positions))


def _llama3_scaling(rope: _Keys, max_positions: int) -> Llama3Scaling:
    low = rope.real("low_freq_factor", 0.0, 1e6)
    high = rope.real("high_freq_factor", 0.0, 1e6)
    if high <= low:
        raise rope.error("high_freq_factor", high, f"allowed: above low_freq_factor, {low:g}")
    key = "original_max_position_embeddings"
    return Llama3Scaling(
        factor=rope.real("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.integer(key, 1, MAX_POSITIONS, default=max_positions),
    )


def _refuse_sliding_window(keys: _Keys, num_layers: int, max_positions: int) -> None:
    """Windows that would cut some layer's attention short of the whole context."""
    if not keys.boolean("use_sliding_window", default=False):
        return
    window = keys.integer("sliding_window", 1, MAX_POSITIONS, default=max_positions)
    kinds = keys.get("layer_types")
    if isinstance(kinds, list):
        has_windows = any(kind != "full_attention" for kind in kinds)
    else:
        has_windows = keys.integer("max_window_layers", 0, MAX_POSITIONS, default=0) < num_layers
    if has_windows and window < max_positions:
        tail = f"allowed: false, or a sliding_window of all {max_positions} positions"
        raise keys.error("use_sliding_window", True, tail)


def _refuse_gguf_extras(keys: _Keys) -> None:
    """Switches that would change the arithmetic and that this reader does not carry out."""
    keys.choice("rope.scaling.type", ("none",), default="none")
    for key in ("expert_count", "attention.sliding_window"):
        if keys.integer(key, 0, MAX_POSITIONS, default=0):
            raise keys.error(key, keys.get(key), "allowed: 0")
    if keys.real("rope.scale_linear", 0.0, 1e9, default=1.0) != 1.0:
        raise keys.error("rope.scale_linear", keys.get("rope.scale_linear"), "allowed: 1.0")
