"""dllama's ``.t`` tokenizers, read and written: what dllama makes of a text, and files that lie."""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.dllama_files import tokenizer_bytes, tokens
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer, read_vocabulary
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary
from tilewright.models.tokenizer.vocabulary_dllama import (
    MAX_PIECE,
    pack_tokenizer,
    token_order,
)

TEXTS = ("hell", "hello <think> hell<|im_end|>", "héllo 👍\n\thehell", "", " ", "<|start|>x")


def load(path: Path, data: bytes) -> Tokenizer:
    path.write_bytes(data)
    return load_tokenizer(TokenizerSource(path))


def parsed(data: bytes) -> tuple[list[bytes], int]:
    """The tokens of a ``.t`` file and its beginning id: what dllama splits texts by."""
    _, size = struct.unpack_from("<ii", data)
    values = dict(struct.iter_unpack("<ii", data[8:size]))
    at, found = size + values.get(7, 0) + 4 * values[9], []
    for _ in range(values[1]):
        _, length = struct.unpack_from("<fI", data, at)
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found, values[3]


def by_dllama(text: str, vocabulary: list[bytes], bos: int) -> list[int]:
    """The description's algorithm, word for word, over bytes."""
    ids = {token: index for index, token in enumerate(vocabulary[:bos])}
    raw, found, at, pending = text.encode(), [], 0, b""
    while at < len(raw):
        special = [i for i in range(bos, len(vocabulary)) if raw.startswith(vocabulary[i], at)]
        if special:
            found.append(special[0])
            at += len(vocabulary[special[0]])
            continue
        pending, at = pending + raw[at : at + 1], at + 1
        if pending in ids:
            found.append(ids[pending])
            pending = b""
    while True:
        pairs = [vocabulary[a] + vocabulary[b] for a, b in itertools.pairwise(found)]
        places = [(ids[pair], place) for place, pair in enumerate(pairs) if pair in ids]
        if not places:
            return found
        index, place = min(places)  # the best score is the smallest id
        found[place : place + 2] = [index]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_split_as_dllama_splits_them(text: str, tmp_path: Path) -> None:
    bos = 259
    tokenizer = load(tmp_path / "a.t", tokenizer_bytes(tokens(), bos=bos, eos=(260,)))
    ids = tokenizer.encode(text)
    assert ids == by_dllama(text, tokens(), bos)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode(text, add_special=True) == [bos, *ids]
    assert tokenizer.eos_ids == (260,) and tokenizer.special_ids == {259, 260, 261}


@pytest.mark.parametrize("bos", [0, None])
def test_special_tokens_before_the_bytes_are_those_that_nothing_makes(
    bos: int | None, tmp_path: Path
) -> None:
    """dllama itself would take every token for special."""
    data = tokenizer_bytes(tokens(special_first=True), bos=bos, extra=[(10, 0)])
    tokenizer = load(tmp_path / "a.t", data)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("hello<think>") == [261, 3 + ord("o"), 2]
    assert tokenizer.encode("he", add_special=True) == [259]


def test_template_and_ends(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    data = tokenizer_bytes(tokens(), bos=259, eos=(260, 3), template=template.encode())
    tokenizer = load(tmp_path / "a.t", data)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "é"}])
    assert chat == "<|start|>é<|im_end|>" and tokenizer.eos_ids == (260, 3)
    old = tokenizer_bytes(tokens(), bos=259, eos=(), template=b"", extra=[(4, 260), (5, 1), (6, 3)])
    tokenizer = load(tmp_path / "a.t", old)
    assert tokenizer.eos_ids == (260, 3) and not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "needs 8 bytes, 0 are left"),
        (struct.pack("<ii", 0x567123, 8), "not a dllama tokenizer"),
        (struct.pack("<iI", 0x567124, 2**31), "the header says it has 2147483648 bytes"),
        (tokenizer_bytes(tokens(), extra=[(8, 4)]), "header key 8 = 4 is not read; allowed: 0, 1,"),
        (tokenizer_bytes(tokens(), extra=[(11, 4)]), "header key 11 = 4 is not read"),
        (tokenizer_bytes(tokens(), extra=[(1, 4)]), r"vocab_size \(key 1\) stands twice"),
        (tokenizer_bytes(tokens(), bos=262), "beginning or end id 262; allowed: 0 to 261"),
        (tokenizer_bytes(tokens(), eos=(-1,)), "beginning or end id -1; allowed: 0 to 261"),
        (tokenizer_bytes(tokens(), template=b"\xff"), "the chat template is not UTF-8"),
        (tokenizer_bytes([*tokens(), b"he"]), "token 256 is the same as token 262"),
        (tokenizer_bytes([*tokens(), b"\xff\xfe"], bos=259), "special token 262 is not UTF-8"),
        (tokenizer_bytes([*tokens(), b"x" * (MAX_PIECE + 1)]), "token 262 has 257 bytes; allowed"),
        (tokenizer_bytes([*tokens(), b""]), "token 262 has 0 bytes, allowed: 1 to 10"),
        (tokenizer_bytes(tokens()) + b"x", "1 bytes follow the last token"),
        (tokenizer_bytes(tokens())[:-1], "token 261 at byte .* needs 7 bytes, 6 are left"),
        (tokenizer_bytes(tokens())[:200], r"vocab_size \(key 1\) is 262, and \d+ bytes are left"),
        (tokenizer_bytes(tokens()).replace(struct.pack("<ii", 0, 1), bytes(8)), "version"),
        (
            tokenizer_bytes(tokens()).replace(struct.pack("<f", -7.0), struct.pack("<f", math.nan)),
            "the score of token 7 is nan",
        ),
    ],
)
def test_files_that_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path / "a.t", data)
    assert "\n" not in str(caught.value) and str(tmp_path / "a.t") in str(caught.value)


def test_what_is_written_is_what_the_description_says(tmp_path: Path) -> None:
    """Header in the order of dllama's converter: 3, 0, 1, 2, 7, 9, 10."""
    source = tokenizer_bytes(tokens(), bos=259, eos=(260, 3))
    (tmp_path / "a.t").write_bytes(source)
    vocabulary = read_vocabulary(TokenizerSource(tmp_path / "a.t"))
    assert token_order(vocabulary) == (range(262),)
    packed = pack_tokenizer(vocabulary)
    pairs = [(3, 259), (0, 1), (1, 262), (2, 10), (7, 53), (9, 2), (10, 1)]
    head = struct.pack("<ii", 0x567124, 8 + 8 * len(pairs))
    head += b"".join(struct.pack("<ii", *pair) for pair in pairs)
    assert packed == head + source[8 + 8 * 6 :]
    again = load(tmp_path / "b.t", packed)
    for text in TEXTS:
        ids = load_tokenizer(TokenizerSource(tmp_path / "a.t")).encode(text, add_special=True)
        assert again.encode(text, add_special=True) == ids


def vocabulary_of(
    special: list[str], *, eos: bool = True, bos: str = "", first: bool = False
) -> Vocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *alphabet] if first else [*alphabet, *special]
    backend = Backend(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    ends = (256,) if eos else ()
    named = {"bos_token": bos} if bos else {}
    return Vocabulary(Path("v"), backend, named, ends, chat_template=None)


def test_special_tokens_are_written_behind_all_others(tmp_path: Path) -> None:
    """The beginning token leads them, and those that others begin with come after these."""
    vocabulary = vocabulary_of(["<a", "<ab>", "<s>", "<abc>"], bos="<s>", first=True)
    assert [*token_order(vocabulary)] == [
        range(4, 260),
        range(2, 3),
        range(1, 2),
        range(3, 4),
        range(1),
    ]
    packed = pack_tokenizer(vocabulary)
    found, bos = parsed(packed)
    assert found[bos:] == [b"<s>", b"<ab>", b"<abc>", b"<a"]
    order = [index for run in token_order(vocabulary) for index in run]
    again = load(tmp_path / "a.t", packed)
    for text in ("<a<abc><ab> <s>a<", "plain"):
        ids = by_dllama(text, found, bos)
        assert [order[index] for index in ids] == Tokenizer(vocabulary).encode(text)
        assert again.encode(text) == ids
    assert again.eos_ids == (order.index(256),)


def test_a_beginning_token_that_hides_another_is_refused() -> None:
    with pytest.raises(CheckpointError, match="v: the beginning token '<s' begins the special"):
        token_order(vocabulary_of(["<s", "<s>"], bos="<s"))


def test_without_a_beginning_token_the_first_special_one_parts_them(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(["<end of text>", "｜<"])
    packed = pack_tokenizer(vocabulary)
    assert packed[8:16] == struct.pack("<ii", 3, 256)
    again = load(tmp_path / "a.t", packed)
    assert again.encode("a｜<b<end of text>", add_special=True) == [
        *Tokenizer(vocabulary).encode("a｜<b<end of text>")
    ]
    assert again.decode([257, 256], skip_special=False) == "｜<<end of text>"


def test_what_has_no_place_in_a_file() -> None:
    with pytest.raises(CheckpointError, match="v: no beginning token, nor any special one"):
        pack_tokenizer(vocabulary_of([]))
    with pytest.raises(CheckpointError, match="v: no end token"):
        pack_tokenizer(vocabulary_of(["<s>"], eos=False))
    pieces = vocabulary_of(["<s>"])
    pieces.backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    with pytest.raises(CheckpointError, match="tokens that are pieces of text have no place"):
        pack_tokenizer(pieces)


PLAIN = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is "
    "Rome. The sun rises in the east and sets in the west. Water freezes at zero degrees Celsius "
    "and boils at one hundred degrees Celsius."
)


@pytest.mark.weights
def test_dllama_splits_texts_of_the_default_model_as_its_own_tokenizer(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """Its special tokens come first there, and last in the file; none falls into bytes."""
    source = load_model(smollm2_path)
    vocabulary = read_vocabulary(source.checkpoint.tokenizer_source)
    assert token_order(vocabulary) == (range(17, 49152), range(1, 2), range(1), range(2, 17))
    packed = pack_tokenizer(vocabulary)
    again = load(tmp_path / "a.t", packed)
    order = [index for run in token_order(vocabulary) for index in run]
    assert [order[index] for index in again.eos_ids] == [*source.tokenizer.eos_ids]
    assert again.bos_id is not None and order[again.bos_id] == source.tokenizer.bos_id
    chat = source.tokenizer.apply_chat_template([{"role": "user", "content": "Why is it blue?"}])
    assert again.apply_chat_template([{"role": "user", "content": "Why is it blue?"}]) == chat
    found, bos = parsed(packed)
    assert (len(found), bos) == (49152, 49152 - 17)
    for text, num_tokens in ((PLAIN, 47), (chat, None)):
        ids = by_dllama(text, found, bos)
        assert [order[index] for index in ids] == source.tokenizer.encode(text)
        assert again.encode(text) == ids and num_tokens in (len(ids), None)
    assert chat.count("<|im_start|>") == sum(found[i] == b"<|im_start|>" for i in ids) == 3


@pytest.mark.weights
def test_a_file_in_the_default_models_own_order_is_still_read(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """As it was written once, its special tokens first."""
    source = load_model(smollm2_path).tokenizer
    listed = [source.token_bytes(index) for index in range(source.vocab_size)]
    again = load(tmp_path / "a.t", tokenizer_bytes(listed, bos=1, eos=(2,)))
    assert again.special_ids == source.special_ids
    text = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    assert again.encode(text) == source.encode(text)
