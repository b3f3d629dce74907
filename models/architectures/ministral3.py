"""The text model of Ministral 3 (Mistral AI, 2025): Mistral with YaRN.

Queries grow beyond the original context of YaRN. Longer contexts are not supported, so the context
ends there.
"""

from __future__ import annotations

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.spelling.windows import hf_windows_of_all


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 with its head."""


ARCHITECTURE = Architecture(
    Ministral3ForCausalLM,
    hf_defaults={
        "sliding_window": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    read_hf=hf_windows_of_all,
    text_config=True,
)
