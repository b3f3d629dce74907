"""A GGUF file in another type: values as gguf quantises them, everything else as it was."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from bench.baselines.gguf_copy import cached_gguf, gguf_sizes, write_gguf
from tilewright.errors import ConfigError

Q4_1 = gguf.GGMLQuantizationType.Q4_1


def values(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TENSORS = {
    "token_embd.weight": values(6, 64, seed=1),
    "blk.0.attn_norm.weight": values(64, seed=2),
    "blk.0.attn_q.weight": values(64, 64, seed=3),
    "blk.0.ffn_down.weight": values(64, 96, seed=4),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One tensor in Q4_1, one in F16, the others in F32."""
    return write(tmp_path / "source.gguf", TENSORS)


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e5)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_1))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "ü", "c"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges([])
    writer.add_add_bos_token(False)
    for name, tensor in tensors.items():
        if "ffn_down" in name:
            writer.add_tensor(name, quantize(tensor, Q4_1), raw_dtype=Q4_1)
        else:
            writer.add_tensor(name, tensor.astype(np.float16) if "attn_q" in name else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_matrices_are_quantised_anew(source: Path, tmp_path: Path, kind: str) -> None:
    write_gguf(source, tmp_path / "copy.gguf", kind)
    wanted = gguf.GGMLQuantizationType[kind]
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "copy.gguf").tensors}
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.shape.tolist() == before[name].shape.tolist()
        old = dequantize(before[name].data, before[name].tensor_type).astype(np.float32)
        new = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if "norm" in name:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            np.testing.assert_array_equal(new, old)
        else:
            assert tensor.tensor_type == wanted
            expected = dequantize(quantize(old, wanted), wanted).astype(np.float32)
            np.testing.assert_array_equal(new, expected)
            assert np.abs(new - old).max() < (0.5 if "4" in kind else 0.05)


def test_metadata_and_tokenizer_are_copied(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "copy.gguf", "Q8_0")
    before, after = (
        {
            name: (field.types[0], field.contents())
            for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith("GGUF.")
        }
        for path in (source, tmp_path / "copy.gguf")
    )
    file_type = after.pop("general.file_type")[1]
    assert file_type == gguf.LlamaFileType.MOSTLY_Q8_0
    del before["general.file_type"]
    assert after == before
    assert before["tokenizer.ggml.tokens"][1] == ["a", "ü", "c"]


def test_sizes_are_those_of_the_tensors(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "tied.gguf", "Q8_0")
    embedding, others = 6 * 2 * 34, 64 * 2 * 34 + 64 * 3 * 34 + 64 * 4
    assert gguf_sizes(tmp_path / "tied.gguf") == (embedding + others, embedding + others)
    head = {**TENSORS, "output.weight": TENSORS["token_embd.weight"]}
    write_gguf(write(tmp_path / "untied.gguf", head), tmp_path / "copy.gguf", "Q8_0")
    assert gguf_sizes(tmp_path / "copy.gguf") == (2 * embedding + others, embedding + others)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    odd = write(tmp_path / "odd.gguf", {"token_embd.weight": values(4, 48, seed=5)})
    with pytest.raises(ConfigError, match=r"token_embd.weight has rows of 48 .* multiples of 32"):
        write_gguf(odd, tmp_path / "copy.gguf", "Q4_0")
    assert not (tmp_path / "copy.gguf").exists()


def test_the_cache_writes_once_and_by_content(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = cached_gguf(source, "Q8_0", content_hash="a", folder=folder)
    written = first.stat().st_mtime_ns
    assert cached_gguf(source, "Q8_0", content_hash="a", folder=folder) == first
    assert first.stat().st_mtime_ns == written
    others = {
        cached_gguf(source, "Q8_0", content_hash="b", folder=folder),
        cached_gguf(source, "Q4_0", content_hash="a", folder=folder),
    }
    assert len({first, *others}) == 3
    assert set(folder.iterdir()) == {first, *others}, "nothing half-written is left"


def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    folder = tmp_path / "cache"
    with pytest.raises(ConfigError, match="No space left"):
        cached_gguf(source, "Q8_0", content_hash="a", folder=folder)
    assert list(folder.iterdir()) == []
