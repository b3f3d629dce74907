"""GGUF files that lie: about lengths, counts, offsets, types and vocabularies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.limits import guarded, guarded_apart
from tests.fuzz.mutations import LYING_NUMBERS, Mutation, mutations
from tilewright.models import load_model
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.vocabulary_gguf import MAX_PIECE

HIDDEN, INNER, VOCAB = 32, 32, 262
HEADER = 9000


def tokens() -> list[str]:
    return ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab", "▁"]


def write(
    path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None, *, part_size: int = 0
) -> Path:
    """A whole tiny Llama of one layer, its weights of several types.

    ``part_size``: Maximum number of tensors in a file. 0: a single file.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part_size)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens())
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([3, 3] + [6] * 256 + [1] * 4)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if change is not None:
        change(writer)
    kinds = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "F16", "ffn_up": "BF16"}
    rows = {"attn_k": 16, "attn_v": 16}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        values = np.ones((rows.get(name, HIDDEN), HIDDEN), np.float32)
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "sound.gguf").read_bytes()


def read_all(path: Path) -> None:
    model = load_model(path)
    for name in model.checkpoint.names:
        model.checkpoint.get(name)
    model.checkpoint.content_hash()
    ids = model.tokenizer.encode("ab ab</s>", add_special=True)
    model.tokenizer.decode(ids)
    model.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def check(path: Path, raw: bytes, guard: Callable[..., str] = guarded) -> str:
    path.write_bytes(raw)
    return guard(lambda: read_all(path), file_size=len(raw))


def test_the_sound_file_is_read(sound: bytes, scratch: Path) -> None:
    assert check(scratch / "x.gguf", sound) == ""
    assert check(scratch / "x.gguf", sound, guarded_apart) == ""


@given(mutation=mutations(head=HEADER))
def test_damage_near_the_front(mutation: Mutation, sound: bytes, scratch: Path) -> None:
    check(scratch / "x.gguf", mutation(sound))


@given(mutation=mutations(max_steps=8))
def test_damage_anywhere(mutation: Mutation, sound: bytes, scratch: Path) -> None:
    check(scratch / "x.gguf", mutation(sound))


@given(number=st.integers(1, 3), mutation=mutations(head=HEADER))
def test_damage_of_a_part(number: int, mutation: Mutation, scratch: Path) -> None:
    if not (scratch / "p-00001-of-00003.gguf").exists():
        write(scratch / "p.gguf", part_size=4)
    path = scratch / f"p-{number:05}-of-00003.gguf"
    whole = path.read_bytes()
    try:
        check(path, mutation(whole))
    finally:
        path.write_bytes(whole)


@given(data=st.data())
def test_fields_that_lie(data: st.DataObject, sound: bytes, scratch: Path) -> None:
    """Numbers put where numbers stand: behind a key, and in the table of tensors."""
    marks = [b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores", b"llama.block_count"]
    marks += [b"attn_q.weight", b"token_embd.weight", b"general.architecture"]
    mark = data.draw(st.sampled_from(marks))
    at = sound.index(mark) + len(mark) + 4 * data.draw(st.integers(0, 6))
    number = data.draw(st.sampled_from(LYING_NUMBERS))
    field = struct.pack("<Q", number)[: data.draw(st.sampled_from((4, 8)))]
    check(scratch / "x.gguf", sound[:at] + field + sound[at + len(field) :])


@pytest.mark.parametrize("number", LYING_NUMBERS[2:])
def test_ten_gigabytes_that_are_not_there(number: int, sound: bytes, scratch: Path) -> None:
    """Every place of the front at once, under a limit that native code sees."""

    def read_each() -> None:
        for at in range(4, 1200, 7):
            raw = sound[:at] + struct.pack("<Q", number) + sound[at + 8 :]
            (scratch / "lie.gguf").write_bytes(raw)
            guarded(lambda: read_all(scratch / "lie.gguf"), file_size=len(raw))

    assert guarded_apart(read_each, file_size=len(sound), seconds=60) == ""


@given(
    settings=st.dictionaries(
        st.sampled_from(
            [
                *("llama.block_count", "llama.embedding_length", "llama.context_length"),
                *("llama.attention.head_count", "llama.attention.head_count_kv"),
                *("llama.vocab_size", "llama.attention.key_length", "llama.feed_forward_length"),
            ]
        ),
        st.sampled_from((0, 1, 2, 3, 4096, 4097, 2**20, 2**31, 2**32 - 1)),
        min_size=1,
        max_size=3,
    )
)
def test_sizes_that_no_tensor_has(settings: dict[str, int], scratch: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in settings.items():
            writer.kv_data[0].pop(key, None)
            writer.add_uint32(key, value)

    path = write(scratch / "sizes.gguf", change)
    guarded(lambda: read_all(path), file_size=path.stat().st_size)


odd_tokens = st.lists(st.text(max_size=6) | st.sampled_from(("a", "<s>", "<0x00>", "▁", "\0")))


@given(
    texts=odd_tokens, kinds=st.lists(st.integers(-1, 8)), model=st.sampled_from(("gpt2", "llama"))
)
def test_any_vocabulary(texts: list[str], kinds: list[int], model: str, scratch: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("tokens", "scores", "token_type", "model"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_tokenizer_model(model)
        writer.add_token_list(texts or [""])
        writer.add_token_scores([float(len(text)) for text in texts] or [0.0])
        writer.add_token_types((kinds + [1] * len(texts))[: len(texts)] or [1])
        if model == "gpt2":
            writer.add_token_merges([f"{text} {text}" for text in texts[:3]] or ["a b"])

    path = write(scratch / "vocabulary.gguf", change)

    def read() -> None:
        load_tokenizer(GGUFCheckpoint(path).tokenizer_source).encode("ab <s> ▁", add_special=True)

    guarded_apart(read, file_size=path.stat().st_size)


def test_merges_of_nested_pieces_stay_small(scratch: Path) -> None:
    """Every prefix a token and every suffix too: each cut of each piece is a merge."""
    pieces = [letter * n for letter in "abcdefghij" for n in range(1, MAX_PIECE + 1)]

    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("tokens", "scores", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * len(pieces))
        writer.add_token_types([1] * len(pieces))

    path = write(scratch / "nested.gguf", change)
    source = GGUFCheckpoint(path).tokenizer_source
    size = path.stat().st_size
    assert guarded(lambda: load_tokenizer(source), file_size=size, factor=300) == ""
    assert guarded_apart(lambda: load_tokenizer(source), file_size=size, factor=300) == ""


def test_four_thousand_layers_of_nothing(scratch: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.block_count")
        writer.add_block_count(4096)

    path = write(scratch / "deep.gguf", change)
    said = guarded(lambda: load_model(path), file_size=path.stat().st_size)
    assert "4096 layers, but 11 tensors" in said


def test_tensors_with_one_name_and_many(scratch: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 10_000, 0)
    row = struct.pack("<IQIQ", 1, 1, 0, 0)
    for names in ((b"t" * 8,) * 10_000, tuple(b"%08d" % n for n in range(10_000))):
        raw = header + b"".join(struct.pack("<Q", 8) + name + row for name in names) + bytes(64)
        (scratch / "many.gguf").write_bytes(raw)
        said = guarded(lambda: GGUFCheckpoint(scratch / "many.gguf"), file_size=len(raw))
        assert "twice" in said or "overlaps" in said


def test_any_other_bytes(scratch: Path) -> None:
    for raw in (b"", b"\0" * 64, b"GGUF", b"GGUF" * 100, b"\xef\xbb\xbfGGUF", b"\xff" * 4096):
        assert check(scratch / "x.gguf", raw)
