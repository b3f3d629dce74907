"""Checks for every architecture on every target: logits equal transformers' for any order of
tokens. The test file of an architecture calls the checks with tiny models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import gguf
import pytest
import torch
from torch import Tensor

from tests.expected_rewrites import expected_rewrites
from tests.runtime.test_engine import Operations
from tests.tiny import (
    compiled,
    copy_slot,
    lowered,
    pipeline,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
)
from tests.twins import twin_of
from tilewright.compiler.targets.interface.base import Executable
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.base import Checkpoint, check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.sources import stored_shapes
from tilewright.runtime.engine import Engine

TARGETS = ("reference", "cpu")
EVERY_TARGET = (*TARGETS, "cpu-native")
WITHIN = 1e-4
ODD_CHUNKS = ([1] * 22, [3, 7, 5], [1, 1, 13, 2], [22])
NotRead: TypeAlias = list[tuple[dict[str, Any], str]]
"""Changes of a config.json that are refused, and a pattern of the message."""


def check_logits(model: SimpleNamespace, target: str, **options: Any) -> None:
    """Compare fp32 logits with transformers, token by token and in chunks with odd sizes."""
    tokens = random_tokens(23, vocab_size=model.config.vocab_size)
    expected = their_logits(model, tokens)
    executable = compiled(model, target, **options)
    assert 0.1 < expected.std() < 30
    for sizes in ([], *ODD_CHUNKS):
        assert_near(prefill(executable, tokens, sizes), expected)
    executable.close()


def their_logits(model: SimpleNamespace, tokens: list[int]) -> Tensor:
    """Return the logits of transformers' model for a sequence, at every position.

    The model keeps the last result for the next target.
    """
    kept = vars(model).get("their_logits")
    if kept is not None and kept[0] == tokens:
        return cast(Tensor, kept[1])
    with torch.no_grad():
        found = twin_of(model.config, model.checkpoint.tensors)(torch.tensor([tokens])).logits[0]
    assert isinstance(found, Tensor)
    model.their_logits = tokens, found
    return found


def check_mixed_lengths(model: SimpleNamespace, target: str) -> None:
    """Decode sequences with different lengths together, and compare with single runs."""
    executable = compiled(model, target)
    prompts = [random_tokens(count, seed=count) for count in (5, 1, 17, 9)]
    tails = [random_tokens(3, seed=100 + index) for index in range(4)]
    alone = [prefill(executable, a + b)[-3:] for a, b in zip(prompts, tails, strict=True)]
    handles = [take_slot(executable, 40) for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        step(executable, [(handle, prompt, 0)])
    for at, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0])):
        work = [(handles[i], tails[i][at : at + 1], len(prompts[i]) + at) for i in order]
        logits = step(executable, work)
        for row, i in enumerate(order):
            assert_near(logits[row], alone[i][at])
    executable.close()


def check_random_operations(model: SimpleNamespace, target: str, seed: int = 0) -> None:
    """Make 100 random engine calls. Every sequence must equal a fresh run."""
    engine = Engine(compiled(model, target, max_context=32), step_tokens=5)
    operations = Operations(engine, oracle_of(model), seed)
    operations.run(100)
    assert min(operations.counts.values()) > 0
    engine.executable.close()


def check_snapshots(model: SimpleNamespace, target: str) -> None:
    """Copy a whole history and continue both.

    A truncated copy must fail: state has no truncation.
    """
    start, tails = random_tokens(9), [random_tokens(count, seed=count) for count in (4, 5)]
    executable = compiled(model, target)
    expected = [prefill(executable, start + tail)[len(start) :] for tail in tails]
    handle = take_slot(executable, 40)
    step(executable, [(handle, start, 0)])
    handles = handle, copy_slot(executable, handle, len(start))
    for state, tail, wanted in zip(handles, tails, expected, strict=True):
        got = [step(executable, [(state, [t], 9 + at)])[0] for at, t in enumerate(tail)]
        assert_near(torch.stack(got), wanted)
    shorter = copy_slot(executable, handle, 12)
    with pytest.raises(AssertionError, match="12 is not where its state is"):
        step(executable, [(shorter, [5, 6], 12)])
    executable.close()


def oracle_of(model: SimpleNamespace) -> Executable:
    return compiled(model, "reference", max_batch=32, max_context=32)


def check_formats(model: SimpleNamespace) -> None:
    """Compare the cpu target with the reference for block formats."""
    tokens = random_tokens(19, vocab_size=model.config.vocab_size)
    for name, axis in (("bf16", "in"), ("bfp8", "in"), ("bfp4", "out")):
        precision = precision_of(name, block_axis=axis)
        expected = prefill(compiled(model, precision=precision), tokens)
        executable = compiled(model, "cpu", precision=precision)
        assert_near(prefill(executable, tokens, [17, 1]), expected)
        executable.close()


def check_rewrites(model: SimpleNamespace) -> None:
    """Compare the rewrite counts with `expected_rewrites`."""
    expected = expected_rewrites(model.config)
    for target in (*TARGETS, "cuda"):
        _, ctx = lowered(model, target=target, precision=precision_of("bf16"))
        found = {report.name: report.num_rewrites for report in ctx.reports}
        assert found.keys() == {each.name for each in pipeline(target)}
        wrong = {n: c for n, c in found.items() if n in expected and c != expected[n]}
        assert not wrong, target


def check_folder(model: SimpleNamespace, folder: Path) -> None:
    """Save with transformers, read the folder, and compare configuration and tensors."""
    twin_of(model.config, model.checkpoint.tensors).save_pretrained(folder)
    _check_checkpoint(model, open_checkpoint(folder))


def check_gguf(
    model: SimpleNamespace,
    path: Path,
    *,
    architecture: gguf.MODEL_ARCH,
    extra: Callable[[gguf.GGUFWriter], None],
    adjacent: bool = False,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Read a file with names from llama.cpp's library.

    ``extra`` writes further keys. ``adjacent``: The file has adjacent rotation pairs in q and k.
    ``prepare`` converts tensors to names known by llama.cpp's library.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    extra(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    added = architecture_of(config.model_type).gguf_norm_offset
    num_rotated = 2 * config.rope.num_pairs(config.head_dim)
    for name, tensor in prepare(model.checkpoint.tensors).items():
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        values = tensor + added if name.endswith("norm.weight") else tensor
        if adjacent and (".q_proj." in name or ".k_proj." in name):
            heads = values.unflatten(0, (-1, config.head_dim))
            pairs = heads[:, :num_rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            values = torch.cat((pairs, heads[:, num_rotated:]), dim=1).flatten(0, 1)
        writer.add_tensor(theirs, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _check_checkpoint(model, open_checkpoint(path))


def _check_checkpoint(model: SimpleNamespace, checkpoint: Checkpoint) -> None:
    assert dataclasses.replace(checkpoint.config, name=model.config.name) == model.config
    check_tensors(checkpoint, stored_shapes(model.module))
    for name, tensor in model.checkpoint.tensors.items():
        torch.testing.assert_close(checkpoint.get(name), tensor, atol=1e-6, rtol=0)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=WITHIN, rtol=0)
