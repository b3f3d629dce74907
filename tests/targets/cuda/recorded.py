"""A GPU without a device: kernels of whole steps are recorded, not run.

Tensors have no memory. Every launch leaves its kernel, its tuning values and its grid.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.tiny import lowered
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.cuda.kernels.attention.rope import rotate_and_store
from tilewright.compiler.targets.cuda.kernels.common import launch, nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_bf16, gemm_block
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import TileLayout
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import ChunkLayout, TokenBatch
from tilewright.compiler.targets.cuda.steps import attention as steps_attention
from tilewright.compiler.targets.cuda.steps import matmul as steps_matmul
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.cuda.weights.experts import packed_sizes
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import (
    CudaTensorSpec,
    Placed,
    Weights,
    wanted_by,
)
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram
from tilewright.models.architectures.table import architecture_of
from tilewright.models.config import ModelConfig

CUDA = torch.device("cuda")
_META = torch.device("meta")

LAYERS = {
    "llama-3.1-8b": {"num_hidden_layers": 1},
    "llama-3.2-1b": {"num_hidden_layers": 1},
    "qwen3-8b": {"num_hidden_layers": 1},
    "qwen3.5-35b-a3b": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3-30b-a3b": {"num_hidden_layers": 1},
    "tiny": {"num_hidden_layers": 1},
    "tiny-hybrid": {"num_hidden_layers": 2, "full_attention_interval": 2},
}
FORMATS = {
    "bf16": {},
    "bfp8": {"kv_cache": "bfp8"},
    "bfp4": {"kv_cache": "bfp8", "fidelity": "lofi", "wqkv": "bfp8"},
}
_SHOWN = (
    *("num_warps", "num_stages", "maxnreg", "BLOCK", "ROWS", "TOKENS", "PAIRS", "COLUMNS", "R"),
    *("SPLITS", "SPLIT_PAGES", "HEADS", "WHOLE", "CHUNK", "TILE", "PRECISION", "PART", "P"),
    *("KIND", "PIECES", "DIAGONAL"),
)
"""Tuning values of Triton kernels in the text. The checksum contains all."""


class Launches:
    """The launches so far: kernels with their tuning values, and a checksum of all operands."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.checksum = 0

    def clear(self) -> None:
        """Forget the launches."""
        self.kernels.clear()
        self.checksum = 0

    def add(self, kernel: str, *operands: object) -> None:
        """Record a launch."""
        self.kernels.append(kernel)
        self.checksum = zlib.crc32(repr((kernel, operands)).encode(), self.checksum)

    def shown(self) -> str:
        """Return the launches. Equal neighbors are counted."""
        found: list[tuple[str, int]] = []
        for kernel in self.kernels:
            if found and found[-1][0] == kernel:
                found[-1] = kernel, found[-1][1] + 1
            else:
                found.append((kernel, 1))
        return ", ".join(kernel + f" x{count}" * (count > 1) for kernel, count in found)


def _native(launches: Launches) -> Any:
    def launched(source: Any, name: str, *, at: Any, arguments: Any, spread: bool = False) -> None:
        memory = ctypes.string_at(ctypes.addressof(arguments), ctypes.sizeof(arguments))
        launches.add(f"{source.path.stem}:{name}", at, zlib.crc32(memory), spread)

    return launched


def _triton(launches: Launches) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        sizes = {key: each for key, each in kwargs.items() if isinstance(each, int | float | str)}
        if isinstance(layout := kwargs.get("LAYOUT"), TileLayout):
            sizes["KIND"] = layout.name
        shown = [f"{key}={sizes[key]}" for key in _SHOWN if key in sizes]
        name = self.fn.__name__.strip("_").removesuffix("_kernel")
        numbers = [each for each in args if isinstance(each, int | float)]
        missing = [each is None for each in args]
        launches.add(f"{name}({' '.join(shown)})", grid, sorted(sizes.items()), numbers, missing)

    return run


@contextmanager
def recorded_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> Iterator[Launches]:
    """A GPU with a compute capability and 132 multiprocessors. Its launches are recorded."""
    launches = Launches()
    with monkeypatch.context() as patch:
        properties = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "Stream", lambda device=None: None)
        launch.num_processors.cache_clear()
        launch.capability_of.cache_clear()
        patch.setattr(nvrtc, "_missing", lambda: "")
        patch.setattr(nvrtc, "_functions", lambda source, device: {})
        patch.setattr(nvrtc, "launch", _native(launches))
        patch.setattr(nvrtc, "clusters_at_once", lambda *_: 16)
        patch.setattr(gemm_bf16, "_map", _map)
        patch.setattr(gemm_block, "_map", _map)
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", _triton(launches))
        _patch_library(patch, launches)
        _patch_tensors(patch)
        try:
            yield launches
        finally:
            launch.num_processors.cache_clear()
            launch.capability_of.cache_clear()


def _patch_tensors(patch: pytest.MonkeyPatch) -> None:
    """Let tensors of the GPU have no memory, and such tensors be on the GPU."""
    device_of: Any = torch.Tensor.device

    def on_gpu(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") == CUDA:
                kwargs["device"] = _META
            found: Tensor = make(*args, **kwargs)
            return found

        return made

    def device(tensor: Tensor) -> torch.device:
        found: torch.device = device_of.__get__(tensor)
        return CUDA if found == _META else found

    for name in (
        "empty",
        "empty_permuted",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "tensor",
        "arange",
    ):
        patch.setattr(torch, name, on_gpu(getattr(torch, name)))
    patch.setattr(torch.Tensor, "device", property(device))
    patch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device == CUDA))


def _map(*sizes: object) -> gemm_bf16.TensorMap:
    checksum = zlib.crc32(repr(sizes[1:]).encode())
    return gemm_bf16.TensorMap((ctypes.c_uint64 * 16)(checksum))


def _patch_library(patch: pytest.MonkeyPatch, launches: Launches) -> None:
    def product(name: str, result: Any = None) -> Any:
        def run(*operands: Any) -> Any:
            launches.add(
                f"cublas {name}", *(each.shape for each in operands if hasattr(each, "shape"))
            )
            return None if result is None else result(*operands)

        return run

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        launches.add("cudnn attention", q.shape, k.shape)
        return torch.empty(len(q), math.prod(q.shape[1:]), dtype=q.dtype, device=q.device)

    patch.setattr(steps_matmul, "store_product", product("store"))
    patch.setattr(steps_matmul, "add_product", product("add"))
    patch.setattr(torch, "mm", product("mm", lambda x, w: x.new_empty(len(x), w.shape[1])))
    patch.setattr(steps_attention, "attend_from_start", attend)
    patch.setattr(steps_attention, "rotate_and_store", rotate_and_store)


def plan_of(config: ModelConfig, precision: PrecisionConfig) -> KernelProgram:
    """Return a plan without weights."""
    with _META:
        module: Any = architecture_of(config.model_type).model(config)
    model: Any = SimpleNamespace(name=config.name, config=config, module=module, checkpoint=None)
    return lower_to_program(lowered(model, target="cuda", precision=precision)[0])


def _weights(plan: KernelProgram) -> Weights:
    return Weights({wanted: _placed(wanted) for wanted in wanted_by(plan)})


def _placed(wanted: CudaTensorSpec) -> Placed:
    if wanted.kind == "fp32":
        return torch.empty(wanted.recipe.shape, device=CUDA)
    num_experts, rows, columns = packed_sizes(wanted.recipe, paired=wanted.is_paired)
    given = wanted.kind, rows, columns
    rest = wanted.is_paired, 1.0, num_experts
    empty = PackedWeight(*given, torch.empty(0), *rest)
    data = torch.empty(empty.data_shape, dtype=empty.data_type, device=CUDA)
    return PackedWeight(*given, data, *rest)


def steps_of(plan: KernelProgram, *, max_rows: int, max_context: int, **how: Any) -> StepRunner:
    """Return the steps of a plan whose tensors have no memory."""
    compute = "exact" if how.get("exact") else "fast"
    options = CompileOptions(max_batch=max_rows, max_context=max_context, compute=compute)
    state = PagedState(
        plan.states, options, CUDA, num_pages=64, sequence_specs=plan.sequence_states, num_marks=2
    )
    how = {"exact": False, **how}
    steps = StepRunner(plan, _weights(plan), state, max_rows=max_rows, **how)
    steps._last_mixer = None  # the layers before the last, whose prefill computes all rows
    return steps


def rows_of(num_rows: int) -> TokenBatch:
    """Return padding rows."""
    return TokenBatch.padding(num_rows, CUDA)


def runs(
    steps: StepRunner, decodes: Sequence[int], prompts: Sequence[int]
) -> Iterator[tuple[str, int, Any]]:
    """Yield all steps. A step is a name, a row count and a function."""
    for reach in steps.attention.reaches:
        for count in decodes:
            call = lambda n=count, r=reach: steps.decode(rows_of(n), reach=r, captured=True)  # noqa: E731
            yield f"decode {reach}", count, call
    last = torch.zeros(1, dtype=torch.int64, device=CUDA)
    for start in (True, False):
        for count in prompts:
            yield (
                "from start" if start else "prompt",
                count,
                lambda n=count, s=start: steps.prefill(rows_of(n), logit_rows=last, from_start=s),
            )
    for count in (128, 1024):
        starts = torch.zeros(3, dtype=torch.int64, device=CUDA)
        decoding = slice(count, count + 8)
        yield (
            "mixed",
            count,
            lambda n=count, s=starts, r=decoding: steps.prefill(
                rows_of(n + 8), logit_rows=last, layout=ChunkLayout(s, True, r)
            ),
        )
