"""Checks for all models on the native cpu backend, with experts and recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.targets.test_conformance import EXACT, assert_near
from tests.tiny import compiled, leave_slot, lowered, prefill, random_tokens, step, take_slot
from tilewright.compiler.driver import weight_source
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.cpu.native.executable import NativeExecutable
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.program.assemble import assemble, pack, rounded_products
from tilewright.compiler.targets.cpu.native.program.bundle import Packed, digest_of, write_packed
from tilewright.compiler.targets.cpu.native.program.mapping import Mapped, map_weights
from tilewright.compiler.targets.cpu.native.program.weights import write_weights
from tilewright.compiler.targets.cpu.native.target import NativeTarget
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.program.instructions import KernelProgram, Needs
from tilewright.compiler.targets.program.lowering import lower_to_program

WIDER = {"kv_cache": "bf16", "embedding": "bf16"}
HELD: list[tuple[str, str, dict[str, str]]] = [
    *((name, "in", {}) for name in ("fp32", "bf16", "fp16", "bfp8", "bfp4")),
    *((name, "in", WIDER) for name in ("q40", "q80", "q41", "fp8")),
    *((name, "out", {}) for name in ("bfp8", "bfp4")),
]


def native(
    model: SimpleNamespace,
    precision: PrecisionConfig,
    folder: Path,
    *,
    compute: str = "fast",
    num_threads: int = 2,
    isa: int = -1,
    batch: int = 1,
    context: int = 64,
) -> NativeExecutable:
    """Return an executable on an instruction set."""
    options = CompileOptions(batch, context, compute=compute, num_threads=num_threads)
    target = NativeTarget()
    graph_module = lowered(model, target="cpu-native", precision=precision)[0]
    plan = lower_to_program(graph_module, Needs(target="cpu", others="reference"))
    exact = compute == "exact"
    rounded = () if exact else rounded_products(graph_module)
    packed = written(plan, weight_source(model), folder, exact=exact, rounded=rounded)
    contract = target.contract(graph_module, options)
    return NativeExecutable(packed, mapped_of(packed, folder), options, contract, isa=isa)


def written(
    plan: KernelProgram,
    source: Callable[[str], torch.Tensor],
    folder: Path,
    *,
    exact: bool = False,
    rounded: Collection[str] = (),
) -> Packed:
    """Return a program. The folder has the program and its weights."""
    assembly = assemble(plan, exact=exact, rounded=rounded)
    packed = pack(plan, assembly)
    write_packed(packed, folder)
    wanted, digest = list(assembly.wanted), digest_of(packed)
    write_weights(wanted, source, folder, lambda *_: None, digest=digest)
    return packed


def mapped_of(packed: Packed, folder: Path) -> Mapped:
    """Return a program's mapped weights."""
    return map_weights([each.num_bytes for each in packed.tensors], digest_of(packed), folder)


def check_exact(
    model: SimpleNamespace, tokens: list[int], precision: PrecisionConfig, cuts: list[int]
) -> None:
    """Compare the exact mode's logits with the reference, with a prompt in chunks."""
    expected = prefill(compiled(model, precision=precision), tokens)
    executable = compiled(model, "cpu-native", precision=precision)
    assert_near(prefill(executable, tokens, cuts), expected, EXACT)
    executable.close()


def check_instruction_sets(
    model: SimpleNamespace, tokens: list[int], precision: PrecisionConfig, folder: Path
) -> None:
    """Bits are equal on all instruction sets, for any thread count and any chunks."""
    first = None
    for isa in range(library.library().tw_best_isa() + 1):
        executable = native(model, precision, folder, isa=isa, num_threads=1 + isa)
        whole = prefill(executable, tokens)
        first = whole if first is None else first
        assert torch.equal(whole, first)
        for cuts in ([1] * 20, [3, 1, 7, 9]):
            assert torch.equal(prefill(executable, tokens, cuts), whole)
        executable.close()


def check_rows_alone(many: Executable, count: int, seed: int) -> None:
    """A row has equal bits with and without other rows, at any position."""
    prompts = [random_tokens(1 + (seed + at) % 9, seed=seed + at) for at in range(count)]
    slots = [take_slot(many, 20) for _ in prompts]
    for slot, prompt in zip(slots, prompts, strict=True):
        step(many, [(slot, prompt, 0)])
    together = step(many, [(h, [7], len(p)) for h, p in zip(slots, prompts, strict=True)])
    for slot in slots:
        leave_slot(many, slot)
    at = seed % count
    assert torch.equal(prefill(many, [*prompts[at], 7], [len(prompts[at])])[-1], together[at])


def check_every_batch(many: NativeExecutable, vocab_size: int) -> None:
    """A row has equal bits among 1 to 64 rows, in decode and in prefill, after any odd chunk."""
    most, prompt = 64, random_tokens(64, vocab_size=vocab_size)
    lengths = [1 + 5 * at % 23 for at in range(most)]
    for at, length in enumerate(lengths):
        forward(many, prompt[-length:], [0], slots=(at,))
    alone = [forward(many, [7], [length], (at,), decodes=True) for at, length in enumerate(lengths)]
    for count in range(1, most + 1):
        chosen = [(at * 37 + count) % most for at in range(count)]
        starts, slots = [lengths[at] for at in chosen], tuple(chosen)
        together = forward(many, [7] * count, starts, slots, decodes=True)
        assert torch.equal(together, torch.cat([alone[at] for at in chosen])), count
    whole = forward(many, prompt, [0])
    assert torch.equal(whole[:1], forward(many, prompt[:1], [0]))
    for count in range(1, most):
        first = forward(many, prompt[:count], [0])
        rest = forward(many, prompt[count:], [count])
        assert torch.equal(torch.cat((first, rest)), whole), count


def forward(
    executable: NativeExecutable,
    tokens: list[int],
    starts: list[int],
    slots: tuple[int, ...] = (0,),
    *,
    decodes: bool = False,
) -> torch.Tensor:
    """Return the logits of all tokens, an equal count per slot, from the positions ``starts``."""
    each = len(tokens) // len(slots)
    positions = np.array([start + at for start in starts for at in range(each)])
    bounds, rows = np.arange(len(slots) + 1) * each, np.arange(len(tokens))
    batch = Batch(np.array(tokens), positions, bounds, rows, tuple(map(Slot, slots)), decodes)
    return torch.as_tensor(executable.forward(batch)).clone()
