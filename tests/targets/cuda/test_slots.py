"""Slots of the cuda executable: rows of a bucket, moved tokens, and forced tokens."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.grids import only
from tests.masks import allowed_of
from tests.models.test_qwen3_5 import ON_CUDA
from tests.targets.cuda.test_conformance_cuda import SMALL
from tests.targets.cuda.test_executable import (
    BF16,
    GREEDY,
    ROWS,
    executable,
    first_step,
    release,
    started,
    step_by_step,
)
from tests.tiny import (
    compiled,
    copy_slot,
    joined,
    leave_slot,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.state import slot_table as slots_module
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send, send_into
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
    SwapHandle,
    SwapIn,
    SwapOut,
)

__all__ = ["executable"]

PENALISED = SamplingParams(temperature=0.7, seed=8, repetition_penalty=1.5, frequency_penalty=0.3)


def test_a_slot_that_is_opened_again_has_parameters_of_its_own() -> None:
    """Seeds are signed 64-bit integers. Top k has 31 bits."""
    table = SlotTable(2, 3, torch.device("cpu"))
    table.open({Slot(1): SamplingParams(temperature=0.5, stop_token_ids=(1, 2, 3), seed=-5)})
    by = table.parameters
    assert by.seeds.tolist() == [0, -5, 0] and by.end_tokens[1].tolist() == [1, 2, 3]
    table.open({Slot(1): SamplingParams(stop_token_ids=(7,), seed=-(2**63), top_k=2**31 - 1)})
    assert by.seeds.tolist() == [0, -(2**63), 0] and by.temperature[1] == 0.0
    assert by.end_tokens[1].tolist() == [7, -1, -1] and by.top_k[1] == 2**31 - 1


def test_rows_are_written_in_one_copy_and_only_where_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unchanged rows between them stay. A failed write is repeated later."""
    sent: list[int] = []
    into = slots_module.send_into

    def counted(place: Tensor, values: np.ndarray, *, first: int) -> None:
        sent.append(len(values))
        into(place, values, first=first)

    monkeypatch.setattr(slots_module, "send_into", counted)
    table = SlotTable(4, 3, torch.device("cpu"))
    a, b, c = (
        SamplingParams(seed=7),
        SamplingParams(seed=8, stop_token_ids=(5,)),
        SamplingParams(top_p=0.5, min_p=0.25),
    )
    table.open({Slot(1): b})
    table.open({Slot(2): a, Slot(0): c})
    expected = [0, 8, 7, 0, 0], [0.5, 1.0, 1.0, 1.0, 1.0], [-1, 5, -1, -1, -1]

    def found() -> tuple[list[int], list[float], list[int]]:
        by = table.parameters
        return by.seeds.tolist(), by.top_p.tolist(), by.end_tokens[:, 0].tolist()

    assert found() == expected and sent == [1, 3]
    table.open({Slot(0): c, Slot(2): a})
    table.open({Slot(3): SamplingParams()})
    assert found() == expected and sent == [1, 3]
    with pytest.raises(OverflowError):
        table.open({Slot(0): b, Slot(1): SamplingParams(stop_token_ids=(1 << 64,))})
    assert found() == expected and sent == [1, 3]
    table.open({Slot(0): b})
    assert found() == ([8, 8, 7, 0, 0], [1.0] * 5, [5, 5, -1, -1, -1]) and sent == [1, 3, 1]


def test_slots_that_leave_a_bucket_take_their_tokens_along(executable: Executable) -> None:
    """A slot continues separately, both return in another order, and a third joins after its
    prompt.
    """
    rows = [ROWS[1], GREEDY]
    expected = [list(each) for each in zip(*step_by_step(executable, rows, 4), strict=True)]
    slots = started(executable, rows)
    a, b = slots
    third = take_slot(executable, 40, GREEDY)
    first = executable.step(first_step(slots))
    alone = executable.step(
        Step(decode=(a,), prompts=(PrefillChunk(third, 0, (7, 8), chooses=True),))
    )
    both = [executable.step(Step(decode=(third, b, a))) for _ in range(2)]
    found: dict[Slot, list[int]] = {}
    for output in (first, alone, *both):
        for part in output.parts:
            for slot, token in zip(part.slots, part.read().tokens, strict=True):
                found.setdefault(slot, []).append(token)
    assert (found[a], found[b]) == (expected[0], expected[1][:3])
    release(executable, (*slots, third))
    fresh = take_slot(executable, 40)
    assert found[third][0] == int(step(executable, [(fresh, (7, 8), 0)]).argmax())
    leave_slot(executable, fresh)


def test_one_slot_s_token_may_be_forced_beside_another_s_own(executable: Executable) -> None:
    slots = started(executable, [GREEDY] * 2)
    held = list(executable.step(first_step(slots)).parts[0].read().tokens)
    mixed = joined(executable.step(Step(decode=slots, forced={slots[1]: 3}, want_logits=True)))
    release(executable, slots)
    slots = started(executable, [GREEDY] * 2)
    executable.step(first_step(slots))
    forced = dict(zip(slots, (held[0], 3), strict=True))
    told = joined(executable.step(Step(decode=slots, forced=forced, want_logits=True)))
    assert torch.equal(mixed, told)
    release(executable, slots)


@pytest.mark.parametrize("row", only([PENALISED], [PENALISED, GREEDY, ROWS[1]]))
def test_more_rows_than_a_bucket_has_come_in_parts(
    executable: Executable, row: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row, GREEDY, row]
    expected = step_by_step(executable, rows, 3)
    inner: Any = executable
    monkeypatch.setattr(inner._buckets, "rows", (1, 2))
    slots = started(executable, rows)
    outputs = [executable.step(first_step(slots))]
    outputs += [executable.step(Step(decode=slots)) for _ in range(2)]
    for output, tokens in zip(outputs, expected, strict=True):
        assert [part.slots for part in output.parts] == [slots[:2], slots[2:]]
        assert [token for part in output.parts for token in part.read().tokens] == tokens
    output = executable.step(Step(decode=slots, masked=True))
    only_one = np.arange(61) == 11
    executable.choose(output, allowed_of({slots[0]: only_one, slots[2]: only_one}))
    chosen = [token for part in output.parts for token in part.read().tokens]
    assert (chosen[0], chosen[2]) == (11, 11)
    release(executable, slots)


def test_a_token_chosen_late_is_the_one_that_is_read_next(executable: Executable) -> None:
    """A masked step, then steps on the device, with other random numbers."""
    rows = [ROWS[1], GREEDY]
    slots = started(executable, rows)
    output = executable.step(dataclasses.replace(first_step(slots), masked=True))
    executable.choose(output, allowed_of({slot: np.arange(61) == 9 + slot for slot in slots}))
    tokens = output.parts[0].read().tokens
    assert tokens == [9 + slot for slot in slots]
    ahead = executable.step(Step(decode=slots, want_logits=True))
    release(executable, slots)
    slots = started(executable, rows)
    executable.step(first_step(slots))
    forced = dict(zip(slots, tokens, strict=True))
    told = executable.step(Step(decode=slots, forced=forced, want_logits=True))
    assert torch.equal(joined(ahead), joined(told))
    assert ahead.parts[0].read() == told.parts[0].read()
    release(executable, slots)


def test_known_tokens_are_read_behind_a_prompt_that_chose_nothing(executable: Executable) -> None:
    """As after preemption. The prompt exceeds all captured sizes."""
    inner: Any = executable
    tokens = random_tokens(8)
    expected = prefill(executable, tokens, [6, 1])[-1:]
    sizes, inner._buckets.tokens = inner._buckets.tokens, (4,)
    slot = take_slot(executable, 20)
    assert not executable.step(Step(prompts=(PrefillChunk(slot, 0, tuple(tokens[:6])),))).parts
    step(executable, [(slot, tokens[6:7], 6)])
    assert torch.equal(step(executable, [(slot, tokens[7:], 7)]), expected)
    inner._buckets.tokens = sizes
    leave_slot(executable, slot)


@pytest.mark.parametrize(("row", "hybrid"), only([], [(PENALISED, False), (ROWS[1], True)]))
def test_a_slot_that_went_to_the_host_and_back_goes_on(row: SamplingParams, hybrid: bool) -> None:
    """On another slot in other pages, after its pages were overwritten."""
    changes = {"model_type": "qwen3_5", **ON_CUDA} if hybrid else SMALL
    options: dict[str, Any] = {"compute": "fast", "max_context": 128}
    found = compiled(tiny_model(std=0.2, **changes), "cuda", precision=BF16, **options)
    a, b, place = Slot(0), Slot(3), SwapHandle(5)
    prompt = tuple(random_tokens(70 if not hybrid else 9))
    begins = (
        OpenSlot(a, row, prompt),
        AssignPages(a, 0, (4, 1)),
        OpenSlot(b, GREEDY),
        AssignPages(b, 0, (0, 2)),
    )

    def run(out_and_back: bool) -> list[Any]:
        found.reset()
        output = found.step(Step(edits=begins, prompts=(PrefillChunk(a, 0, prompt, chooses=True),)))
        parts, slot = [*output.parts, *found.step(Step(decode=(a,))).parts], a
        if out_and_back:
            found.step(Step(edits=(SwapOut(a, place), CloseSlot(a), CloseSlot(b))))
            assert found.memory().state == 0
            taken = (OpenSlot(a, GREEDY), AssignPages(a, 0, (1, 4)))
            found.step(Step(edits=taken, prompts=(PrefillChunk(a, 0, (5,) * 66),)))
            slot = Slot(2)
            again = (OpenSlot(slot, row, prompt), AssignPages(slot, 0, (3, 0)), SwapIn(slot, place))
            parts += found.step(Step(edits=again, decode=(slot,))).parts
        else:
            parts += found.step(Step(decode=(a,))).parts
        parts += found.step(Step(decode=(slot,))).parts
        last = found.step(Step(decode=(slot,), want_logits=True))
        return [[part.read() for part in parts], joined(last).tolist()]

    assert run(True) == run(False)
    found.close()


def test_what_a_scheduler_gets_wrong_fails_an_assertion(executable: Executable) -> None:
    slot = take_slot(executable, 40)
    step(executable, [(slot, (1, 2, 3), 0)])
    copied = copy_slot(executable, slot, 2)
    wrong = [
        Step(edits=(OpenSlot(slot, GREEDY),)),
        Step(edits=(OpenSlot(Slot(4), GREEDY),)),
        Step(edits=(AssignPages(slot, 2, (3,)),)),
        Step(prompts=(PrefillChunk(copied, 3, (1,)),)),
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            executable.step(each)
    release(executable, (slot, copied))


def test_a_step_past_a_slot_s_own_pages_is_refused(executable: Executable) -> None:
    """Further table entries may be another slot's pages, which must not be written."""
    other, slot = take_slot(executable, 40), take_slot(executable, 64)
    step(executable, [(other, (5, 6, 7), 0)])
    step(executable, [(slot, tuple(random_tokens(64)), 0)])
    inner: Any = executable
    before = [each.values.clone() for each in inner._state.pages.values()]
    for wrong in (
        Step(decode=(slot,), forced={slot: 3}),
        Step(prompts=(PrefillChunk(slot, 64, (3,), chooses=True),)),
    ):
        with pytest.raises(AssertionError, match="pages up to 64"):
            executable.step(wrong)
    after = [each.values for each in inner._state.pages.values()]
    assert all(map(torch.equal, before, after))
    release(executable, (other, slot))


@pytest.mark.gpu
def test_what_is_sent_may_be_changed_at_once() -> None:
    """More data than the pinned memory, in all sizes, while the device is busy."""
    device = torch.device("cuda", 0)
    busy = torch.randn(2048, 2048, device=device)
    wanted, sent = [], []
    for number in range(600):
        values = np.arange(1 + number * number % 4099, dtype=np.int64) + number
        busy = busy @ busy
        sent.append(send(values, device))
        wanted.append(int(values.sum()))
        into = torch.zeros(len(values), dtype=torch.int64, device=device)
        half = len(values) // 2
        send_into(into, np.flip(values[half:]))
        send_into(into, values[:half], first=len(values) - half)
        sent.append(into)
        wanted.append(wanted[-1])
        values[:] = -2
    assert slots_module._staging(device).staged(np.arange(3)).is_pinned()
    large = np.full((3, 1 << 18), 7, dtype=np.int64)
    assert bool((send(large, device) == 7).all())
    assert [int(each.sum()) for each in sent] == wanted


def test_what_is_sent_may_end_where_a_half_of_the_staging_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each half has an event and is reused after the event."""
    told: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.name = chr(ord("a") + sum(each.startswith("left") for each in told))

        def record(self) -> None:
            told.append(f"left {self.name}")

        def synchronize(self) -> None:
            told.append(f"waited {self.name}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(slots_module._Staging, "_HALF", 256)
    staging = slots_module._Staging(torch.device("cpu"))
    for count in (8, 8, 8, 8, 3, 29, 32, 1):  # 8-byte values: 256 per half, in units of 64
        sent = np.arange(count) + count
        assert staging.send(sent).tolist() == sent.tolist()
    assert staging.send(np.arange(0)).tolist() == []
    assert told == [
        *("left a", "left b", "waited a", "left c", "waited b", "left d", "waited c"),
    ]


def test_what_is_staged_is_a_copy_of_its_kind() -> None:
    """For all types, shapes and strides, in separate memory."""
    staging = slots_module._Staging(torch.device("cpu"))
    square = np.arange(12, dtype=np.int64).reshape(3, 4)
    given: list[np.ndarray | Tensor] = [square, square[:, 1::2], square.T.astype(np.int32)]
    given += [np.array(3.5), np.zeros((0, 5), dtype=np.uint8), torch.tensor([True, False])]
    expected = [torch.as_tensor(each).clone() for each in given]
    staged = [staging.staged(each) for each in given]
    square[:] = -1
    for found, each in zip(staged, expected, strict=True):
        assert found.dtype == each.dtype and torch.equal(found, each) and found.is_contiguous()


def test_values_are_written_at_an_address_in_the_order_of_a_contiguous_array() -> None:
    staging = slots_module._Staging(torch.device("cpu"))
    for values in (np.arange(12).reshape(3, 4).T, np.array([7], dtype=np.int32)):
        address = staging.address_of(values)
        assert address % 64 == 0 == staging._address % 64
        assert ctypes.string_at(address, values.nbytes) == values.tobytes()


def test_values_are_sent_to_their_flat_index_of_a_device_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch.zeros(4, 3, dtype=torch.int64)
    device: Any = SimpleNamespace(
        is_cuda=True,
        device=torch.device("cuda", 2),
        nbytes=memory.nbytes,
        is_contiguous=lambda: True,
        data_ptr=memory.data_ptr,
    )
    devices: list[int] = []

    def copy(target: int, source: int, num_bytes: int, *, device: int) -> None:
        devices.append(device)
        ctypes.memmove(target, source, num_bytes)

    staging = slots_module._Staging(torch.device("cpu"))
    monkeypatch.setattr(slots_module, "_staging", lambda device: staging)
    monkeypatch.setattr(slots_module.driver, "copy_to_device", copy)
    send_into(device, np.arange(1, 7).reshape(2, 3), first=3)
    send_into(device, np.array([9]), first=11)
    send_into(device, np.zeros(0, dtype=np.int64), first=12)
    assert memory.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 9]] and devices == [2, 2]
    with pytest.raises(AssertionError):
        send_into(device, np.array([9, 9]), first=11)
    assert memory[3, 2] == 9


def test_values_above_half_of_the_staging_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module._Staging, "_HALF", 256)
    memory, values = torch.zeros(10, 10, dtype=torch.int64), np.arange(90).reshape(9, 10)
    device: Any = SimpleNamespace(is_cuda=True, device=memory.device, view=memory.view)
    send_into(device, values, first=10)
    assert memory[1:].tolist() == values.tolist() and not memory[0].any()
