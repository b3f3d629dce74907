"""Model configurations as plain dataclasses, independent of the container.

`tilewright.models.checkpoints` reads them from config.json, GGUF metadata and dllama headers.
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
    """Llama 3.1's scaling of low frequencies (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Division of all frequencies by ``factor`` (``rope_type: linear``; Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: two divisors per frequency (``rope_type: longrope``; Ding et al., 2024).

    The short divisors apply up to ``original_max_positions``, the long divisors beyond. Both
    multiply cosines and sines by ``attention_factor``.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (``rope_type: yarn``; Peng et al., 2023): low frequencies are divided by ``factor``.

    Pairs with more than ``beta_fast`` turns in ``original_max_positions`` keep their frequency.
    Pairs below ``beta_slow`` turns are divided. ``truncate`` rounds the borders to whole pairs.
    ``attention_factor`` multiplies cosines and sines.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_positions(self) -> int:
        """Return the positions in the longer context."""
        return int(self.factor * self.original_max_positions)


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotation of the first ``num_turned`` pairs (``rope_type: proportional``; Gemma 4).

    A pair has channels half a head apart. Frequencies are those of the whole head, divided by
    ``factor``.
    """

    num_turned: int
    factor: float = 1.0


Scaling: TypeAlias = (
    Llama3Scaling | LinearScaling | LongRopeScaling | YarnScaling | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base.
        scaling: Frequency scaling. None: none.
        interleaved: Pairs are neighbors. Readers convert q and k rows to half-split order, so this
            is False for all checkpoints.
        freq_factors: Divisors per pair, in GGUF files instead of Llama 3's scaling.
        num_rotated: Rotated channel count at a head's start. None: all.
        query_growth: Queries grow with this factor and the logarithm of their position beyond the
            original context. Such contexts are not supported. 0: queries do not grow.
    """

    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    freq_factors: tuple[float, ...] | None = None
    num_rotated: int | None = None
    query_growth: float = 0.0

    def num_pairs(self, head_dim: int) -> int:
        """Return the rotated pair count per head."""
        return (head_dim if self.num_rotated is None else self.num_rotated) // 2

    @property
    def attention_factor(self) -> float:
        """Return the factor for cosines and sines."""
        scaling = self.scaling
        if isinstance(scaling, LongRopeScaling | YarnScaling):
            return scaling.attention_factor
        return 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches for a dense decoder. Sizes are numbers of elements.

    Attributes:
        attention_bias: The q, k and v linears have a bias.
        output_bias: The o linear has a bias.
        qk_norm: Normalize q and k heads before the rotation.
        windows: Attention window per layer in tokens. 0: no window. Empty: no windows at all.
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
        """Return a layer's attention window, including the current token. 0: no window."""
        return self.windows[layer] if self.windows else 0

    def program_context(self, max_context: int) -> int:
        """Return the longest context for a program compiled for ``max_context``.

        LongRoPE has a different rotation beyond its original length.
        """
        return next((each for each in self.contexts if max_context <= each), self.max_positions)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the context lengths with separate programs, ascending."""
        if isinstance(self.rope.scaling, LongRopeScaling):
            original = self.rope.scaling.original_max_positions
            if original < self.max_positions:
                return (original, self.max_positions)
        return (self.max_positions,)


@dataclass(frozen=True, slots=True)
class MoeConfig(ModelConfig):
    """Sizes and switches for a decoder with mixtures of experts.

    Attributes:
        expert_size: Inner size of an expert.
        shared_size: Inner size of the shared expert. 0: none.
        renormalise: Selected experts' weights sum to 1.
        dense_layers: Layer indices with a dense block.
    """

    num_experts: int = 2
    experts_per_token: int = 1
    expert_size: int = 1
    shared_size: int = 0
    renormalise: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TwoRopesConfig(ModelConfig):
    """Sizes and switches for a decoder with a second rotation in some layers.

    Attributes:
        second_layers: Layer indices with the second rotation.
        second_rope: The second rotation. None: these layers do not rotate.
    """

    second_layers: tuple[int, ...] = ()
    second_rope: RopeConfig | None = None


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Gated DeltaNet sizes: heads, key and value channels, and the convolution width.

    ``conv_width`` is the token count in the convolution, including the current token.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def key_width(self) -> int:
        """Return the total key channels over all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the total value channels over all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Return the total channels for queries, keys and values."""
        return 2 * self.key_width + self.value_width


_NO_DELTA = DeltaShape(1, 1, 2, 2)


@dataclass(frozen=True, slots=True)
class HybridConfig(MoeConfig):
    """Sizes and switches for a decoder with attention and Gated DeltaNet layers.

    ``linear_layers`` is true for Gated DeltaNet layers. ``delta`` has their sizes.
    """

    linear_layers: tuple[bool, ...] = ()
    delta: DeltaShape = _NO_DELTA
