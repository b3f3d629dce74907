"""A trained draft layer: acceptance, and agreement that needs the norm before its input.

`tests/tools/train_tiny_mtp.py` makes the stored model. Equal outputs check the verification only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.draft_layers import attach, layer_states
from tests.tiny import compiled
from tests.tools import train_tiny_mtp as tiny
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.step import (
    CloseSlot,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
)
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import MTP, SpeculativeConfig

NUM_SLOTS, NUM_DRAFTS = 16, 3
RECORD: dict[str, Any] = json.loads(tiny.RECORD.read_text())


@pytest.fixture(scope="module")
def executable() -> Iterator[HostExecutable]:
    model, layer, _ = tiny.load()
    made: Any = compiled(model, "cpu-native", max_batch=NUM_SLOTS, max_context=tiny.LENGTH)
    attach(made, model, layer, "cpu-native")
    yield made
    made.close()


def test_stored_model_has_its_hash() -> None:
    assert tiny.FILE.stat().st_size <= 1_000_000
    assert hashlib.sha256(tiny.FILE.read_bytes()).hexdigest() == RECORD["sha256"]
    size = tiny.NUM_LINES * tiny.LENGTH
    held_out = torch.tensor(list(tiny.training_text()[-size:]))
    assert torch.equal(tiny.load()[2].flatten(), held_out), "independent of the documentation"


def acceptance_length(executable: HostExecutable, lines: Tensor) -> float:
    """Return the mean tokens per verification, for 40 tokens after 40 bytes of each line."""
    config = SpeculativeConfig(method=MTP, max_drafts=NUM_DRAFTS, schedule=((1, 99, NUM_DRAFTS),))
    loop = EngineLoop(executable, policy=SchedulerConfig(speculative=config))
    params = SamplingParams(max_tokens=40)
    requests = [RequestState(n, tuple(line[:40].tolist()), params) for n, line in enumerate(lines)]
    loop.generate(requests)
    counts = loop.scheduler.speculator.counts
    return 1 + sum(counts.num_accepted) / counts.num_drafts


def test_acceptance_is_within_its_interval(executable: HostExecutable) -> None:
    low, high = RECORD["acceptance_length"]
    assert low <= acceptance_length(executable, tiny.load()[2][:NUM_SLOTS]) <= high


def agreement(executable: HostExecutable, lines: Tensor) -> float:
    """Return the share of drafts that equal the model's next likeliest token, teacher-forced."""
    executable.reset()
    slots, num_equal = tuple(map(Slot, range(len(lines)))), 0
    for slot, line in zip(slots, lines.tolist(), strict=True):
        executable.step(Step(edits=(OpenSlot(slot, SamplingParams(), (line[0],)),)))
        executable.step(Step(prompts=(PrefillChunk(slot, 0, (line[0],), chooses=True),)))
    length = lines.shape[1] - 1
    for at in range(1, length):
        forced = dict(zip(slots, lines[:, at].tolist(), strict=True))
        for slot, token in forced.items():
            executable._slot_states[slot].force(token)
        drafts = executable.step(Step(proposes=dict.fromkeys(slots, 1))).parts[0].read().tokens
        chosen = executable.step(Step(decode=slots, forced=forced)).parts[0].read().tokens
        num_equal += sum(a == b for a, b in zip(drafts, chosen, strict=True))
    executable.step(Step(edits=tuple(map(CloseSlot, slots))))
    return num_equal / (len(slots) * (length - 1))


def test_agreement_shows_a_hidden_state_before_the_norm(
    executable: HostExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the norm's weight, the layer's own norm gives the state before the norm."""
    model, _, text = tiny.load()
    low, high = RECORD["agreement"]
    assert low <= agreement(executable, text[:NUM_SLOTS]) <= high
    layer = executable.draft_layer
    assert layer is not None
    note, weight = layer.note, 1 + model.checkpoint.tensors["model.norm.weight"].numpy()
    monkeypatch.setattr(
        layer,
        "note",
        lambda slot, start, tokens, hidden: note(slot, start, tokens, hidden / weight),
    )
    assert agreement(executable, text[:NUM_SLOTS]) < low


def plain_agreement(
    tensors: dict[str, Tensor],
    lines: Tensor,
    *,
    is_normed: bool = True,
    sizes: dict[str, Any] = tiny.SIZES,
) -> float:
    """Return the agreement in plain torch."""
    model, _ = tiny.tiny_mtp(tensors, sizes)
    weights = {name: each.float() for name, each in tensors.items()}
    before, after = tiny.states(weights, lines, model.config)
    hidden = after if is_normed else before
    drafted = layer_states(
        weights, model.config, lines[:, 1:], hidden[:, :-1], prefix="mtp.layers.0"
    )
    head = weights["model.embed_tokens.weight"]
    likeliest = (after @ head.T).argmax(-1)[:, 1:]
    return float(((drafted @ head.T).argmax(-1) == likeliest).float().mean())


def trained(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Return trained weights, cached by a hash of the script and the text."""
    name = f"tiny-mtp-{sizes['num_layers']}-{tiny.content_key()}"
    path = Path(tmp_path_factory.getbasetemp().parent) / name
    if not path.exists():
        save_file(tiny.made(sizes=sizes), path)
    return load_file(path)


def test_hybrid_training_model_equals_the_reference() -> None:
    """The training code and the compiled model have equal states."""
    model, _ = tiny.tiny_mtp(sizes=tiny.HYBRID)
    tokens = tiny.load()[2][:2, :70]
    before, after = tiny.states(model.checkpoint.tensors, tokens, model.config)
    executable: Any = compiled(model, "reference", max_context=128)
    for line, expected in zip(tokens.tolist(), after, strict=True):
        executable.reset()
        executable.step(Step(edits=(OpenSlot(Slot(0), SamplingParams()),)))
        every, ends = np.arange(len(line)), np.array([0, len(line)])
        batch = Batch(np.array(line), every, ends, every, (Slot(0),), False)
        states = torch.from_numpy(executable.hidden(batch))
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    assert before.shape == after.shape


@pytest.mark.slow
def test_hybrid_layer_has_acceptance_and_the_output_of_the_plain_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A trained hybrid on native kernels. Rejected drafts leave no trace in its state."""
    tensors = trained(tmp_path_factory, tiny.HYBRID)
    lines = tensors.pop("text").long()
    right, wrong = (
        plain_agreement(tensors, lines, is_normed=flag, sizes=tiny.HYBRID) for flag in (True, False)
    )
    model, layer = tiny.tiny_mtp(tensors, tiny.HYBRID)
    made: Any = compiled(model, "cpu-native", max_batch=NUM_SLOTS, max_context=tiny.LENGTH)
    attach(made, model, layer, "cpu-native")
    outputs, params = [], SamplingParams(max_tokens=40)
    config = SpeculativeConfig(method=MTP, max_drafts=NUM_DRAFTS, schedule=((1, 99, NUM_DRAFTS),))
    for speculative in (None, config):
        loop = EngineLoop(made, policy=SchedulerConfig(speculative=speculative))
        prompts = [tuple(line[:40].tolist()) for line in lines[:NUM_SLOTS]]
        requests = [RequestState(n, prompt, params) for n, prompt in enumerate(prompts)]
        loop.generate(requests)
        outputs.append([request.output for request in requests])
    made.close()
    counts = loop.scheduler.speculator.counts
    length = 1 + sum(counts.num_accepted) / counts.num_drafts
    print(f"agreement {right:.3f}, before the norm {wrong:.3f}, acceptance length {length:.2f}")
    assert outputs[0] == outputs[1]
    assert right > 0.6 and right - wrong >= 0.02 and length > 1.9, (right, wrong, length)


@pytest.mark.slow
def test_training_gives_a_layer_that_needs_the_norm(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The weights are cached by the content of the script and of its text."""
    tensors = trained(tmp_path_factory, tiny.SIZES)
    lines = tensors["text"].long()
    right, wrong = (plain_agreement(tensors, lines, is_normed=flag) for flag in (True, False))
    assert right > 0.6 and right - wrong >= 0.02, (right, wrong)
    assert torch.isfinite(tensors["mtp.fc_hidden.weight"].float()).all()
