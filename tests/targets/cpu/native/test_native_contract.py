"""The native backend's arithmetic equals its contract for all fidelities and mixtures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from tests.targets.cpu.native.native_checks import WIDER, check_every_batch, native
from tests.targets.cpu.native.native_contract import promised
from tests.tiny import compiled, leave_slot, precision_of, prefill, random_tokens, take_slot
from tests.tiny import tiny_model as made
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.cpu.native import memory as room
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.cpu.native.program.assembly import Assembly, place_of
from tilewright.compiler.targets.cpu.native.program.panels import code_panels, value_panels
from tilewright.compiler.targets.cpu.onnxruntime.codes import signed_codes
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import PrefillChunk, Step
from tilewright.compiler.targets.program.instructions import BufferView

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

MODEL = made(std=0.2, hidden_size=64, intermediate_size=96)
FLOAT = {"kv_cache": "fp32", "embedding": "bf16"}
TOKENS = random_tokens(30)


def run(target: str, precision: PrecisionConfig) -> Executable:
    return compiled(MODEL, target, precision=precision, compute="fast")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "fidelity", "activation"),
    [
        ("bfp8", "lofi", "mixed"),
        ("bfp4", "hifi2", "mixed"),
        ("q80", "hifi2na", "mixed"),
        ("q41", "lofi", "mixed"),
        ("bfp8", "hifi3", "mixed"),
        ("bf16", "hifi4", "mixed"),
        ("bf16", "hifi4fp32", "bf16"),
        ("fp16", "hifi4", "bf16"),
        ("bfp8", "lofi", "bf16"),
        ("q80", "hifi4", "bf16"),
    ],
)
def test_products_are_what_the_contract_says(name: str, fidelity: str, activation: str) -> None:
    """The result is nearer to the contract than to float.

    An operand may round to the next value. ``activation: bf16`` rounds every output.
    """
    precision = precision_of(name, fidelity, **FLOAT | {"activation": activation})
    executable = run("cpu-native", precision)
    found = prefill(executable, TOKENS, [11, 1])
    executable.close()
    expected = prefill(promised(run("reference", precision)), TOKENS, [11, 1])
    plain = prefill(compiled(MODEL, precision=precision), TOKENS)
    assert distance(found, expected) < 0.34 * distance(expected, plain)


def test_exact_rounds_no_activation() -> None:
    precision = precision_of("bf16", "hifi4", **FLOAT | {"activation": "bf16"})
    executable = compiled(MODEL, "cpu-native", precision=precision)
    assert distance(prefill(executable, TOKENS), prefill(compiled(MODEL), TOKENS)) > 0
    expected = prefill(compiled(MODEL, precision=precision), TOKENS)
    assert distance(prefill(executable, TOKENS), expected) < 1e-5
    executable.close()


def test_every_float16_is_itself() -> None:
    """Lookups as float on every instruction set, with tiny values and both zeros."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    table = every[every.isfinite()].view(62, 1024)
    panels = value_panels(pad(table.float(), (0, 0, 0, 2)), "fp16").contiguous()
    assert panels.nbytes == 2 * 64 * 1024
    check_lookup(panels, "fp16", table.float())


@pytest.mark.parametrize("name", ["q40", "q80", "bfp4", "bfp8"])
def test_an_embedding_in_blocks_has_the_values_of_its_format(name: str) -> None:
    """Lookups decode a table's codes bit for bit, except that a negative zero becomes positive."""
    table = torch.randn(62, 1024, generator=torch.Generator().manual_seed(5)) * 0.1
    codes = signed_codes(pad(table, (0, 0, 0, 2)), name)
    expected = get_format(name).round_trip(table) + 0.0
    check_lookup(code_panels(codes, name, "table"), name, expected)


def check_lookup(panels: torch.Tensor, kind: str, expected: torch.Tensor) -> None:
    """Compare a table's rows with ``expected [62, 1024]`` on every instruction set."""
    assembly = Assembly(exact=False)
    places = [BufferView(at, 1024) for at in range(3)]
    assembly.append("embed", places[0], weight=0)
    assembly.append("gather", places[1], x=place_of(places[0]))
    times = library.FUNCTIONS.index("mul")
    assembly.append("elementwise", places[2], x=place_of(places[1]), number=1.0, function=times)
    panels = panels.contiguous()
    data, size = panels.data_ptr(), panels.nbytes
    tensor = library.TwTensor(library.KINDS.index(kind), 62, 1024, data, size)
    for isa in range(library.library().tw_best_isa() + 1):
        found = looked_up(assembly, tensor, isa)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def looked_up(assembly: Assembly, tensor: library.TwTensor, isa: int) -> torch.Tensor:
    """Return all rows of a table through a program with a lookup only."""
    program = library.TwProgram(
        size=ctypes.sizeof(library.TwProgram),
        version=library.VERSION,
        instruction_size=ctypes.sizeof(library.TwInstruction),
        tensor_size=ctypes.sizeof(library.TwTensor),
        num_threads=1,
        isa=isa,
        max_num_seqs=1,
        max_context=64,
        max_tokens=64,
        num_instructions=len(assembly.instructions),
        num_tensors=1,
        num_buffers=3,
        logits=2,
        instructions=(library.TwInstruction * 3)(*assembly.instructions),
        tensors=(library.TwTensor * 1)(tensor),
        widths=(ctypes.c_int32 * 3)(1024, 1024, 1024),
    )
    engine, logits = library.open_engine(program), torch.empty(62, 1024)
    every, bounds = torch.arange(62, dtype=torch.int32), torch.tensor([0, 62], dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int32)
    step = library.TwStep(
        num_tokens=62,
        num_sequences=1,
        num_rows=62,
        tokens=every.data_ptr(),
        positions=every.data_ptr(),
        bounds=bounds.data_ptr(),
        slots=slots.data_ptr(),
        rows=every.data_ptr(),
        logits=logits.data_ptr(),
    )
    assert library.library().tw_step(engine, ctypes.byref(step)) == 0
    library.library().tw_close(engine)
    return logits


UNEQUAL = {
    "phases": {
        **{f"li_{group}_prefill": "lofi" for group in ("qkv", "o", "ff1_3", "ff2")},
        **{f"li_{group}_decode": "hifi4fp32" for group in ("qkv", "o", "ff1_3", "ff2")},
    },
    "the_other_way": {
        **{f"li_{group}_prefill": "hifi3" for group in ("qkv", "o", "ff1_3", "ff2")},
        **{f"li_{group}_decode": "lofi" for group in ("qkv", "o", "ff1_3", "ff2")},
    },
    "layers": {"layers": "0: {li_ff1_3: lofi, li_qkv_decode: hifi4fp32}, 1: {li_ff2: hifi2}"},
}


@pytest.mark.parametrize("unequal", UNEQUAL)
def test_unequal_fidelities_in_one_step(unequal: str) -> None:
    """A step decodes a sequence and prefills another from the same packed weights.

    Each phase and each layer has its own arithmetic.
    """
    precision = precision_of("bfp8", "hifi4fp32", **FLOAT | UNEQUAL[unequal])
    expected = mixed(promised(run("reference", precision)))
    executable = run("cpu-native", precision)
    found = mixed(executable)
    executable.close()
    num_other = 0
    for fidelity in ("lofi", "hifi3", "hifi4fp32"):  # everywhere
        others = mixed(promised(run("reference", precision_of("bfp8", fidelity, **FLOAT))))
        for rows, right, other in zip(found, expected, others, strict=True):
            if not torch.equal(other, right):
                num_other += 1
                assert distance(rows, right) < 0.34 * distance(other, right)
    assert num_other >= 5


def mixed(executable: Executable) -> list[torch.Tensor]:
    """Return the logits for a decoded row and a prompt in the same step."""
    decoding, reading = take_slot(executable, 30), take_slot(executable, 30)
    whole = PrefillChunk(decoding, 0, tuple(TOKENS[:12]), chooses=True)
    executable.step(Step(prompts=(whole,), want_logits=True))
    prompt = PrefillChunk(reading, 0, tuple(TOKENS[12:]), chooses=False, echoes=True)
    given = Step(decode=(decoding,), forced={decoding: 5}, prompts=(prompt,), want_logits=True)
    output = executable.step(given)
    rows = [part.logits() for part in output.parts if part.logits is not None]
    for slot in (decoding, reading):
        leave_slot(executable, slot)
    return rows


KINDS = [
    *(("fp32", "hifi4"), ("fp16", "hifi4"), ("bf16", "hifi4"), ("q41", "lofi"), ("q41", "hifi4")),
    *(
        (name, fidelity)
        for name in ("bfp8", "bfp4", "q80", "q40")
        for fidelity in ("lofi", "hifi3")
    ),
    *((name, "hifi4fp32") for name in ("bfp8", "bfp4", "q40")),
]


@pytest.fixture(params=[*KINDS, ("packed", "hifi4")], ids="-".join)
def many(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Executable]:
    """An executable for 64 sequences. ``packed``: bfloat16 in 12 bits, as on large pages."""
    name, fidelity = request.param
    if name == "packed":
        monkeypatch.setattr(room, "_WORTH_COPYING", 0)
        monkeypatch.setattr(room, "_SPARE", 0)
        if not room.are_large_pages_worth(1):
            pytest.skip("the system gives no large pages")
        name = "bf16"
    cache = "bfp8" if fidelity == "lofi" else "bf16"
    precision = precision_of(name, fidelity, **WIDER | {"kv_cache": cache, "activation": "bf16"})
    model = made(std=0.2, num_layers=1, hidden_size=40, intermediate_size=24)
    executable = native(model, precision, tmp_path, batch=64)
    yield executable
    executable.close()


def test_a_row_s_bits_at_every_batch_and_cut(many: Executable) -> None:
    check_every_batch(many, 61)
