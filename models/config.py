"""A model's configuration as plain dataclasses, whatever container it was read from.

How config.json, GGUF metadata and dllama headers spell one, `tilewright.models.checkpoints` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 4096
MAX_POSITIONS = 1 << 27
MAX_EXPERTS = 4096
MAX_CONV_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Division of every frequency by ``factor`` (``rope_type: linear``; Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: two divisors for each frequency (``rope_type: longrope``; Ding et al., 2024).

    The short ones are for contexts up to ``original_max_positions``, the long ones beyond;
    ``attention_factor`` multiplies cosines and sines in both.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (``rope_type: yarn``; Peng et al., 2023): low frequencies are divided by ``factor``.

    Pairs that turn more than ``beta_fast`` times in ``original_max_positions`` keep their
    frequency. Pairs below ``beta_slow`` turns are divided. ``truncate`` rounds the borders to whole
    pairs. ``attention_factor`` multiplies cosines and sines.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_positions(self) -> int:
        """Positions of the longer context."""
        return int(self.factor * self.original_max_positions)


Scaling: TypeAlias = Llama3Scaling | LinearScaling | LongRopeScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base, scaling, and whether pairs are neighbours.

    ``freq_factors`` [pairs] are what a GGUF file carries instead of Llama 3's scaling: each
    frequency is divided by its factor. ``interleaved`` is False for every checkpoint we read,
    because the readers put q and k rows into half-split order. The first ``num_rotated`` channels
    of a head turn (None: all).
    """

    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    freq_factors: tuple[float, ...] | None = None
    num_rotated: int | None = None

    def num_pairs(self, head_dim: int) -> int:
        """How many pairs of channels of a head turn."""
        return (head_dim if self.num_rotated is None else self.num_rotated) // 2

    @property
    def attention_factor(self) -> float:
        """What the cosines and sines of the rotation are multiplied by."""
        scaling = self.scaling
        if isinstance(scaling, LongRopeScaling | YarnScaling):
            return scaling.attention_factor
        return 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and switches of a dense decoder; sizes are counts of elements.

    ``attention_bias`` is that of the q, k and v products, ``output_bias`` that of o. ``qk_norm``:
    heads of q and k are normed before they turn. ``windows``: positions that each layer sees, 0
    for all; empty where every layer sees all.
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
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """The positions that a layer sees, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def program_context(self, max_context: int) -> int:
        """The longest context that a program built for ``max_context`` serves as it is.

        LongRoPE turns differently beyond its original length.
        """
        return next((each for each in self.contexts if max_context <= each), self.max_positions)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context lengths that programs are built for, ascending."""
        if isinstance(self.rope.scaling, LongRopeScaling):
            original = self.rope.scaling.original_max_positions
            if original < self.max_positions:
                return (original, self.max_positions)
        return (self.max_positions,)


@dataclass(frozen=True, slots=True)
class MoeConfig(ModelConfig):
    """The sizes and switches of a decoder with mixtures of experts.

    ``expert_size`` and ``shared_size``: inner sizes of an expert, and of the one that every token
    has (0: there is none). ``renormalise``: the weights of the chosen experts add up to one.
    ``dense_layers``: indices of layers with a dense block.
    """

    num_experts: int = 2
    experts_per_token: int = 1
    expert_size: int = 1
    shared_size: int = 0
    renormalise: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of Gated DeltaNet: heads, channels of a key and of a value, and ``conv_width``, the
    tokens that the convolution sees, the present one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def key_width(self) -> int:
        """How many channels the keys of all heads have."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """How many channels the values of all heads have."""
        return self.num_value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """How many channels queries, keys and values have together."""
        return 2 * self.key_width + self.value_width


_NO_DELTA = DeltaShape(1, 1, 2, 2)


@dataclass(frozen=True, slots=True)
class HybridConfig(MoeConfig):
    """The sizes and switches of a decoder with layers of attention and of Gated DeltaNet.

    ``linear_layers``: whether each layer is one of Gated DeltaNet, whose sizes are ``delta``.
    """

    linear_layers: tuple[bool, ...] = ()
    delta: DeltaShape = _NO_DELTA
