"""The native kernels of a file's own blocks: exact values, the bytes of the file, equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ggml_blocks import HIDDEN, SHAPES, VOCAB, write_llama
from tests.models.quantized.folders import write
from tests.models.quantized.test_float4 import CASES
from tests.models.quantized.test_packages import BNB, four_bits
from tests.targets.cpu.native.native_checks import check_every_batch, mapped_of, written
from tests.targets.cpu.native.native_contract import promised
from tests.targets.test_conformance import EXACT
from tests.tiny import precision_of, prefill, random_tokens
from tilewright.compiler.driver import compile_model, lower_model, resolve_precision, weight_source
from tilewright.compiler.formats import get_format, stored_format
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.compiler.targets.cpu.native.executable import NativeExecutable
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.cpu.native.program.weights import NativeTensorSpec
from tilewright.compiler.targets.cpu.native.target import NativeTarget
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.program.instructions import Needs
from tilewright.compiler.targets.program.lowering import lower_to_program
from tilewright.models import LoadedModel, load_model

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

STORED = load_precision("stored")
FOLDERS = {"NVFP4 1x16": CASES["nvfp4"][:2], "bitsandbytes nf4": (four_bits, BNB)}
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_XS", *FOLDERS)
TOKENS = random_tokens(11, vocab_size=VOCAB)


def of_type(folder: Path, dtype: str) -> LoadedModel:
    """A model whose every matrix has blocks of one type, and in GGUF the table."""
    if dtype in FOLDERS:
        write(folder / "m", *FOLDERS[dtype], sizes={"vocab_size": VOCAB})
        return load_model(folder / "m")
    types = dict.fromkeys(SHAPES, dtype)
    return load_model(write_llama(folder / f"{dtype}.gguf", types, embedding=dtype))


def run(
    model: LoadedModel, target: str, compute: str, precision: PrecisionConfig = STORED
) -> Executable:
    options = CompileOptions(max_context=32, compute=compute, num_threads=1)
    return compile_model(model, precision, target=target, options=options).executable


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_the_file_s(dtype: str, tmp_path: Path) -> None:
    model = of_type(tmp_path, dtype)
    expected = prefill(run(model, "reference", "exact"), TOKENS)
    executable = run(model, "cpu-native", "exact")
    found = prefill(executable, TOKENS, [7, 1])
    assert float((found - expected).abs().max()) < EXACT * float(expected.abs().max())
    executable.close()


def on(
    model: LoadedModel,
    fidelity: str,
    folder: Path,
    isa: int,
    batch: int = 1,
    kv_cache: str = "bf16",
    context: int = 64,
) -> NativeExecutable:
    """The model on one instruction set, and as many threads as that is far from plain C++."""
    resolved = resolve_precision(model, precision_of("stored", fidelity, kv_cache=kv_cache))
    isa_threads = 2 if isa < 0 else 1 + isa
    target, options = NativeTarget(), CompileOptions(batch, context, num_threads=isa_threads)
    graph_module, _ = lower_model(model, resolved, target.stages(), silent)
    plan = lower_to_program(graph_module, Needs(target="cpu", others="reference"))
    packed = written(plan, weight_source(model), folder)
    contract = target.contract(graph_module, options)
    return NativeExecutable(packed, mapped_of(packed, folder), options, contract, isa=isa)


@pytest.mark.parametrize("fidelity", ["lofi", "hifi4"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_instruction_set_has_the_same_bits(dtype: str, fidelity: str, tmp_path: Path) -> None:
    """And they are near what the contract makes of the values."""
    model = of_type(tmp_path, dtype)
    precision = precision_of("stored", fidelity, kv_cache="fp32")
    expected = prefill(promised(run(model, "reference", "exact", precision)), TOKENS)
    first = None
    for isa in range(library.library().tw_best_isa() + 1):
        executable = on(model, fidelity, tmp_path, isa, kv_cache="fp32")
        whole = prefill(executable, TOKENS)
        first = whole if first is None else first
        assert torch.equal(whole, first)
        assert torch.equal(prefill(executable, TOKENS, [1] * 10), whole)
        executable.close()
    assert first is not None
    assert float((first - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["Q8_0", "IQ4_XS", "NVFP4 1x16"])
def test_many_rows_have_the_bits_of_some_rows(dtype: str, tmp_path: Path) -> None:
    """AVX2 has another kernel from 24 rows on, in chunks of 128 rows.

    Random Q8_0 blocks contain codes of -128, which has no negative byte.
    """
    model, tokens = of_type(tmp_path, dtype), random_tokens(150, vocab_size=VOCAB)
    first = None
    for isa in range(library.library().tw_best_isa() + 1):
        executable = on(model, "lofi", tmp_path, isa, context=160)
        for cuts in ([], [23, 24, 80, 20]):
            whole = prefill(executable, tokens, cuts)
            first = whole if first is None else first
            assert torch.equal(whole, first)
        executable.close()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_s_bits_at_every_batch_and_cut(dtype: str, tmp_path: Path) -> None:
    executable = on(of_type(tmp_path, dtype), "lofi", tmp_path, -1, batch=64)
    check_every_batch(executable, VOCAB)
    executable.close()


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_take_what_the_file_takes(dtype: str) -> None:
    """Of whole blocks of 256, and of rows that fill their panels. IQ4_XS gets bytes for scales."""
    name = stored_format(dtype)
    assert name is not None
    shape = 64, 4 * HIDDEN
    wanted = NativeTensorSpec(WeightRecipe((), shape, name, "in"), name)
    wider_scales = shape[0] * shape[1] // 128 if dtype == "IQ4_XS" else 0
    assert wanted.num_bytes == get_format(name).nbytes(shape) + wider_scales
