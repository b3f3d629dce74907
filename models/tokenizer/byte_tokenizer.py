"""Tokenizer for models without a tokenizer: a token per byte, and names for all other ids."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from tilewright.models.tokenizer.tokenizer import Tokenizer, byte_of_character
from tilewright.models.tokenizer.vocabulary import Vocabulary

NUM_BYTES = 256


def byte_tokenizer(vocab_size: int, where: str) -> Tokenizer:
    """Return a tokenizer with UTF-8 bytes as the first ids, and text ``" <N>"`` as later id ``N``.

    An answer in a later chat turn has its original ids, if its bytes are UTF-8 without such names.
    The tokenizer has no end token, no special tokens and no chat template. ``vocab_size`` is
    ``256`` or more. ``where`` is for messages.
    """
    assert vocab_size >= NUM_BYTES, vocab_size
    characters = {byte: character for character, byte in byte_of_character().items()}
    space = characters[ord(" ")]
    vocab = {characters[byte]: byte for byte in range(NUM_BYTES)}
    vocab.update({f"{space}<{index}>": index for index in range(NUM_BYTES, vocab_size)})
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    names = pre_tokenizers.Split(Regex(" <[1-9][0-9]*>"), "isolated")
    text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([names, text])
    backend.decoder = decoders.ByteLevel()
    parts = Vocabulary(
        where=Path(where), backend=backend, special_tokens={}, eos_ids=(), chat_template=None
    )
    return Tokenizer(parts)
