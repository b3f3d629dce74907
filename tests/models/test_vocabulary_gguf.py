"""GGUF tokenizer keys that contradict each other or are not read; ids are in test_tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.errors import CheckpointError
from tilewright.models.tokenizer.vocabulary_gguf import read_metadata


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [-2.0, -3.0, -1.0], np.float32),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * 3, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def test_named_and_end_tokens() -> None:
    template = "{{ messages[0].content }}<|im_end|>"
    metadata = sentencepiece_metadata(eot_token_id=259)
    metadata["tokenizer.chat_template"] = template
    metadata["tokenizer.ggml.tokens"][260] = "<|im_end|>"
    vocabulary = read_metadata(metadata, Path("m.gguf"))
    assert vocabulary.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert vocabulary.eos_ids == (2, 259, 260)
    assert vocabulary.chat_template == template
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, False)


def test_merges_come_from_scores() -> None:
    backend = read_metadata(sentencepiece_metadata(), Path("m.gguf")).backend
    assert backend.encode("ab", add_special_tokens=False).tokens[-1] == "ab"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "bert"}, r"ggml\.model = 'bert'.*allowed: gpt2, llama"),
        ({"model": "gpt2", "pre": "llama9", "merges": []}, r"ggml\.pre = 'llama9'.*mean 'llama4'"),
        ({"model": "gpt2"}, r"ggml\.merges = None"),
        ({"model": "gpt2", "merges": ["ab"]}, r"ggml\.merges = 'ab'.*one space"),
        ({"model": "gpt2", "merges": ["zz qq"]}, r"ggml\.merges = 'zz qq'.*vocabulary"),
        ({"tokens": None}, r"ggml\.tokens = None"),
        ({"tokens": ["a", "a"]}, r"ggml\.tokens = 'a'.*each token once"),
        ({"scores": None}, r"ggml\.scores = None"),
        ({"token_type": np.zeros(3, np.int32)}, r"ggml\.token_type .*one per token"),
        ({"eos_token_id": 10**6}, r"ggml\.eos_token_id = 1000000.*allowed: 0 to"),
        ({"eos_token_id": "2"}, r"ggml\.eos_token_id = '2'"),
        ({"add_bos_token": 1}, r"ggml\.add_bos_token = 1.*true, false"),
    ],
)
def test_bad_metadata(more: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_metadata(sentencepiece_metadata(**more), Path("m.gguf"))
    assert "\n" not in str(caught.value)


def test_long_piece_is_refused() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][261] = "x" * 1000
    with pytest.raises(CheckpointError, match="at most 128 characters"):
        read_metadata(metadata, Path("m.gguf"))
