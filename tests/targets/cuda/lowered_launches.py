"""Lower recorded launches of Triton kernels for a GPU without a device, and print the failures.

The first launch of a kernel for coded weights is lowered with all tiles. ``--all-tiles`` lowers
every launch with all tiles. With ``--compile``, compile the launches to machine code, and compare
their shared memory with the GPU's.

The interpreter runs Python, so it accepts kernels that do not compile: a value with different
types in two branches, or an argument that must be a constant. Run it in a separate process,
because the interpreter replaces the compiler for a whole process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.targets.cuda.recorded import (
    CUDA,
    FORMATS,
    LAYERS,
    plan_of,
    recorded_gpu,
    runs,
    steps_of,
)
from tests.tiny import precision_of
from tilewright.compiler.targets.cuda.kernels.matmul import coded_cut_triton
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import CodedLayout, layout_of
from tilewright.compiler.targets.cuda.kernels.sampling.cutoff import SearchScratch
from tilewright.compiler.targets.cuda.kernels.sampling.sample import draw
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOK, CODED_TILES, FLOAT4
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES

HOPPER, ADA = (9, 0), (8, 9)
CASES = (
    ("llama-3.1-8b", "bf16", HOPPER, (1, 17, 65), (65, 2049)),
    ("qwen3.5-35b-a3b", "bf16", HOPPER, (1, 17, 65), (65, 2049)),
    ("qwen3.5-35b-a3b", "bfp4", ADA, (1, 17, 65), (65, 2049)),
    ("tiny-hybrid", "bfp8", ADA, (1, 17), (65,)),
    ("llama-3.1-8b", "q40", ADA, (1,), (65,)),
)
OF_ADA = (
    *((*case[:2], ADA, *case[3:]) for case in CASES[:2]),
    *(case for case in CASES if case[2] == ADA),
)
MAX_SHARED = {HOPPER: 227 << 10, ADA: 99 << 10}
"""Shared memory of a block in bytes."""
CODED = {"kv_cache": "bf16", "activation": "bf16"}
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_WAITS = ("griddepcontrol.wait", "grid_dependency_wait")
"""Names of the wait in Triton 3.6 and 3.9."""
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")

Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]


def type_of(value: object) -> str:
    """Return Triton's type of an argument."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, bool):
        return "u1"
    return "fp32" if isinstance(value, float) else "i32"


class _Driver:
    """The active driver of a GPU without a device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target


def lower(
    kernel: JITFunction[Any],
    args: tuple[Any, ...],
    settings: dict[str, Any],
    *,
    capability: tuple[int, int],
    compiles: bool,
) -> None:
    """Lower a launch to Triton's IR for a compute capability. Compile it if ``compiles``."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | settings
    signature, constants = {}, {}
    for position, param in enumerate(kernel.params):
        value = bound.get(param.name, param.default)
        if param.is_constexpr or value is None:
            signature[param.name], constants[(position,)] = "constexpr", value
        else:
            signature[param.name] = type_of(value)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = _Driver(capability).target
    backend = make_backend(target)
    chosen = {name: settings[name] for name in _OPTIONS if settings.get(name) is not None}
    if compiles:
        shared = compile(source, target=target, options=chosen).metadata.shared
        assert shared <= MAX_SHARED[capability], f"{shared} bytes of shared memory"
        return
    options = backend.parse_options(chosen | dict(source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    is_chained = capability >= (9, 0) and settings["CHAINED"]
    waits = any(word in str(module) for word in _WAITS)
    assert options.launch_pdl == is_chained == waits


def of_all_tiles(launch: Launch) -> list[Launch]:
    """Return a launch for every code tile format, or the launch itself without a tile."""
    kernel, args, settings = launch
    if not isinstance(settings.get("LAYOUT"), CodedLayout):
        return [launch]
    found, place = [], kernel.arg_names.index("floats_ptr") + 1
    if kernel.arg_names[place] == "second_scales_ptr":  # a kernel without free values
        for tile in filter(coded_cut_triton.takes_tile, CODED_TILES.values()):
            factors = torch.empty(16, dtype=torch.float64) if tile.values == FLOAT4 else None
            operands = (*args[:place], factors, *args[place + 1 :])
            found.append((kernel, operands, {**settings, "LAYOUT": layout_of(tile)}))
        return found
    type_of_values = torch.int32 if kernel.arg_names[place] == "pairs_ptr" else torch.float32
    for tile in CODED_TILES.values():
        is_float4 = tile.values == FLOAT4
        has_values = tile.values == CODEBOOK or (is_float4 and type_of_values == torch.float32)
        values = torch.empty(256, dtype=type_of_values) if has_values else None
        factors = torch.empty(16, dtype=torch.float64) if is_float4 else None
        operands = (*args[:place], values, factors, *args[place + 2 :])
        found.append((kernel, operands, {**settings, "LAYOUT": layout_of(tile)}))
    return found


Key = tuple[tuple[int, int], str, str, str]


def launches_of(patch: pytest.MonkeyPatch, cases: Sequence[Any]) -> dict[Key, Launch]:
    """Return the launches by compute capability, module, kernel and constants."""
    launches: dict[Key, Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        constants = [settings.get(each.name) for each in self.params if each.is_constexpr]
        key = capability, self.__module__, self.__name__, repr(constants)
        launches.setdefault(key, (self, args, settings))

    for model, kind, capability, *sizes in cases:
        config = config_of_hf({**SHAPES[model], **LAYERS[model]}, where=model)
        plan = plan_of(config, precision_of(kind, **FORMATS.get(kind, CODED)))
        with recorded_gpu(patch, capability), patch.context() as inner:
            inner.setattr(JITFunction, "run", run)
            for _, _, call in runs(steps_of(plan, max_rows=256, max_context=8192), *sizes):
                call()
            logits, words = torch.empty(8, 5000, device=CUDA), torch.empty(8, 5, device=CUDA).long()
            tokens, why, positions = words[:, 0].clone(), words[:, 0].clone(), words[:, 0].clone()
            scratch = SearchScratch.empty(8, 5000, CUDA)
            draw(tokens, why, logits, words, positions, end_tokens=words, scratch=scratch)
    return launches


def main() -> int:
    """Lower the launches. Return 1 after an error."""
    failed, compiles = 0, "--compile" in sys.argv
    has_all_tiles = "--all-tiles" in sys.argv
    seen: set[tuple[tuple[int, int], str]] = set()
    with pytest.MonkeyPatch.context() as patch:
        launches = launches_of(patch, OF_ADA if compiles else CASES)
    for (capability, module, name, constants), launch in launches.items():
        driver.set_active(_Driver(capability))
        is_whole = has_all_tiles or not (compiles or (capability, name) in seen)
        seen.add((capability, name))
        for each in of_all_tiles(launch) if is_whole else [launch]:
            try:
                lower(*each, capability=capability, compiles=compiles)
            except Exception as error:
                failed += 1
                print(f"{module}.{name} {constants}: {error}: {error.__cause__}")
    print(*sorted({name for _, _, name, _ in launches}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
