"""Lower recorded launches of Triton kernels for a GPU without a device, and print the failures.

The interpreter runs Python, so it accepts kernels that do not compile: a value with different
types in two branches, or an argument that must be a constant. Run it in a process of its own,
because the interpreter replaces the compiler for a whole process.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.targets.cuda.recorded import CUDA, plan_of, recorded_gpu, steps_of
from tests.targets.cuda.test_op_tables import FORMATS, LAYERS, runs
from tests.tiny import precision_of
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import CodedLayout, layout_of
from tilewright.compiler.targets.cuda.kernels.sampling.cutoff import SearchScratch
from tilewright.compiler.targets.cuda.kernels.sampling.sample import draw
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOK, CODED_TILES
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


def lower(kernel: JITFunction[Any], args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    """Lower a launch to Triton's IR of sm_90."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | settings
    signature, constants = {}, {}
    for position, param in enumerate(kernel.params):
        value = bound.get(param.name, param.default)
        if param.is_constexpr or value is None:
            signature[param.name], constants[(position,)] = "constexpr", value
        else:
            signature[param.name] = type_of(value)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    chosen = {name: settings[name] for name in _OPTIONS if settings.get(name) is not None}
    options = backend.parse_options(chosen | dict(source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(target, options, functions, backend.get_module_map(), context)


def of_all_tiles(launch: Launch) -> list[Launch]:
    """Return a launch for every code tile format, or the launch itself without a tile."""
    kernel, args, settings = launch
    if not isinstance(settings.get("LAYOUT"), CodedLayout):
        return [launch]
    found, place = [], kernel.arg_names.index("floats_ptr") + 1
    type_of_values = torch.int32 if kernel.arg_names[place] == "pairs_ptr" else torch.float32
    for tile in CODED_TILES.values():
        values = torch.empty(256, dtype=type_of_values) if tile.values == CODEBOOK else None
        operands = (*args[:place], values, *args[place + 1 :])
        found.append((kernel, operands, {**settings, "LAYOUT": layout_of(tile)}))
    return found


def launches_of(patch: pytest.MonkeyPatch) -> dict[tuple[str, str, str], Launch]:
    """Return the launches by module, kernel and constants."""
    launches: dict[tuple[str, str, str], Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        constants = [settings.get(each.name) for each in self.params if each.is_constexpr]
        launches.setdefault(
            (self.__module__, self.__name__, repr(constants)), (self, args, settings)
        )

    for model, kind, capability, *sizes in CASES:
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
    failed = 0
    with pytest.MonkeyPatch.context() as patch:
        launches = launches_of(patch)
    for (module, name, constants), launch in launches.items():
        for each in of_all_tiles(launch):
            try:
                lower(*each)
            except Exception as error:
                failed += 1
                print(f"{module}.{name} {constants}: {error}: {error.__cause__}")
    print(*sorted({name for _, name, _ in launches}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
