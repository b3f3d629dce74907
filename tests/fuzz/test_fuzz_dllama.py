"""dllama's files that lie: about lengths, counts, sizes, types and vocabularies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dllama_files import (
    MOE,
    header_bytes,
    header_pairs,
    model_bytes,
    random_weights,
    tokenizer_bytes,
    tokens,
)
from tests.fuzz.limits import guarded, guarded_apart
from tests.fuzz.mutations import LYING_NUMBERS, Mutation, mutations
from tilewright.models import load_model
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.checkpoints.dllama.checkpoint import DllamaCheckpoint
from tilewright.models.checkpoints.dllama.header import KEYS
from tilewright.models.tokenizer.load import load_tokenizer, read_vocabulary
from tilewright.models.tokenizer.vocabulary_dllama import pack_tokenizer

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 8, "vocab_size": 262, "max_positions": 64},
}
HEADER = 160
KINDS = ("F32", "F16", "Q4_0", "Q8_0")


@pytest.fixture(scope="module")
def sound() -> bytes:
    return model_bytes("llama", "Q4_0", random_weights("llama", **SMALL), **SMALL)


@pytest.fixture(scope="module")
def sound_tokenizer() -> bytes:
    return tokenizer_bytes(tokens(), bos=259, eos=(260,), extra=[(10, 1)])


def read_model(path: Path) -> None:
    checkpoint = DllamaCheckpoint(path)
    for name in checkpoint.names:
        checkpoint.get(name)
        checkpoint.get(name, slice(1, 3))
    checkpoint.content_hash()


def read_tokenizer(path: Path) -> None:
    source = TokenizerSource(path)
    tokenizer = load_tokenizer(source)
    tokenizer.decode(tokenizer.encode("hell <think> 1", add_special=True))
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    pack_tokenizer(read_vocabulary(source))


def check(path: Path, raw: bytes, guard: Callable[..., str] = guarded) -> str:
    path.write_bytes(raw)
    read = read_tokenizer if path.suffix == ".t" else read_model
    return guard(lambda: read(path), file_size=len(raw))


@pytest.mark.parametrize("guard", [guarded, guarded_apart])
def test_sound_files_are_read(
    guard: Callable[..., str], sound: bytes, sound_tokenizer: bytes, scratch: Path
) -> None:
    assert check(scratch / "x.m", sound, guard) == ""
    assert check(scratch / "x.t", sound_tokenizer, guard) == ""


@given(mutation=mutations(head=HEADER))
def test_damage_near_the_front(mutation: Mutation, sound: bytes, scratch: Path) -> None:
    check(scratch / "x.m", mutation(sound))


@given(mutation=mutations(max_steps=8))
def test_damage_anywhere(mutation: Mutation, sound: bytes, scratch: Path) -> None:
    check(scratch / "x.m", mutation(sound))


@given(mutation=mutations(head=HEADER))
def test_damage_near_the_front_of_a_tokenizer(
    mutation: Mutation, sound_tokenizer: bytes, scratch: Path
) -> None:
    check(scratch / "x.t", mutation(sound_tokenizer), guarded_apart)


@given(mutation=mutations(max_steps=8))
def test_damage_anywhere_in_a_tokenizer(
    mutation: Mutation, sound_tokenizer: bytes, scratch: Path
) -> None:
    check(scratch / "x.t", mutation(sound_tokenizer), guarded_apart)


sizes = st.sampled_from((-(2**31), -1, 0, 1, 2, 3, 5, 32, 4096, 4097, 2**20, 2**24, 2**31 - 1))


@given(
    values=st.dictionaries(st.integers(-1, len(KEYS)), sizes, min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    arch=st.sampled_from(("llama", "qwen3", "qwen3_moe")),
    rest=st.integers(0, 5000),
)
def test_any_header(values: dict[int, int], kind: str, arch: str, rest: int, scratch: Path) -> None:
    extra = MOE if arch == "qwen3_moe" else {}
    pairs = dict(header_pairs(arch, kind, **SMALL, **extra)) | values
    check(scratch / "x.m", header_bytes(list(pairs.items())) + bytes(rest))


@pytest.mark.parametrize("number", LYING_NUMBERS[2:5])
def test_ten_gigabytes_that_are_not_there(
    number: int, sound: bytes, sound_tokenizer: bytes, scratch: Path
) -> None:
    """Every place of the front in turn, under a limit that native code sees."""

    def read_each() -> None:
        for suffix, data in ((".m", sound), (".t", sound_tokenizer)):
            for at in range(4, HEADER, 4):
                raw = data[:at] + struct.pack("<I", number) + data[at + 4 :]
                check(scratch / f"lie{suffix}", raw)

    assert guarded_apart(read_each, file_size=len(sound), seconds=60) == ""


def test_thousands_of_layers_and_experts_that_are_not_there(scratch: Path) -> None:
    layers = header_pairs("llama", "F32", **{**SMALL, "num_layers": 4096})
    said = check(scratch / "x.m", header_bytes(layers) + bytes(100_000))
    assert "tensor model.layers." in said and "cut short" in said
    many = {**SMALL, **MOE, "num_experts": 4096, "num_layers": 4096}
    experts = header_pairs("qwen3_moe", "Q4_0", **many)
    said = check(scratch / "x.m", header_bytes(experts) + bytes(100_000))
    assert "mlp.gate.weight of shape [4096, 32]" in said


@given(
    found=st.lists(st.binary(max_size=6) | st.sampled_from((b"a", b"<s>", b"\0", b"ab", b"b"))),
    bos=st.none() | st.integers(-2, 40),
    eos=st.lists(st.integers(-2, 40), max_size=3),
    template=st.binary(max_size=8),
)
def test_any_vocabulary(
    found: list[bytes], bos: int | None, eos: list[int], template: bytes, scratch: Path
) -> None:
    data = tokenizer_bytes(found or [b""], bos=bos, eos=eos, template=template)
    check(scratch / "x.t", data, guarded_apart)


def test_every_prefix_a_token_and_every_suffix_too(scratch: Path) -> None:
    """Each cut of each token is a merge: a file of 100 KB has as many merges as bytes."""
    nested = [bytes([65 + n]) * size for n in range(3) for size in range(1, 257)]
    raw = tokenizer_bytes(nested, bos=0, eos=(0,))
    (scratch / "x.t").write_bytes(raw)
    source = TokenizerSource(scratch / "x.t")
    for guard in (guarded, guarded_apart):
        assert guard(lambda: load_tokenizer(source), file_size=len(raw), factor=300) == ""


def test_a_model_beside_a_tokenizer_that_is_none(sound: bytes, scratch: Path) -> None:
    folder = scratch / "pair"
    folder.mkdir()
    (folder / "x.m").write_bytes(sound)
    for raw in (b"", b"\0" * 64, b"GGUF", sound, b"\xff" * 4096):
        (folder / "x.t").write_bytes(raw)
        assert "x.t: " in guarded(lambda: load_model(folder / "x.m"), file_size=len(sound))


def test_any_other_bytes(scratch: Path) -> None:
    for raw in (b"", b"\0" * 64, b"GGUF", struct.pack("<i", 0x0A00ABCD) * 100, b"\xff" * 4096):
        assert check(scratch / "x.m", raw)
        assert check(scratch / "x.t", raw)
