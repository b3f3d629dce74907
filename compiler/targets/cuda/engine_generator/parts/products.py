"""Small matmuls in Triton and in CUDA C++. NVRTC compiles once per process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_source import PRODUCTS
from tilewright.compiler.targets.cuda.engine_generator.parts.generated import CHOICES
from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import power, product_kernel
from tilewright.compiler.targets.cuda.engine_generator.parts.pages import call
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound

INSIDE, APART = "inside", "apart"
"""Names of matmuls, with the norm inside or after the matmul."""


class TritonProducts:
    """Matmuls for up to 16 rows. A single program reads each weight, once."""

    def ways(self, each: Bound, num_rows: int) -> tuple[str, ...]:
        """Return the possible names, most probable first."""
        if num_rows > 16:
            return ()
        return (INSIDE,) if each.norm is None else (INSIDE, APART)

    def run(self, of: Any, way: str, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run `Linear` for the executor ``of``."""
        weight, norm = each.weight, each.norm if way == INSIDE else None
        assert weight is not None
        if norm is None and each.norm is not None:
            x = of.normed(each, x)
        outputs, width = weight.shape[0] // (2 if each.does.swiglu else 1), x.shape[1]
        out = x.new_empty(len(x), outputs) if residual is None else residual
        rows = 1 if len(x) == 1 else max(8, 1 << (len(x) - 1).bit_length())
        block = CHOICES.one_outputs if rows == 1 else CHOICES.outputs
        columns = CHOICES.columns * 16 // max(16, rows)
        if width <= max(columns, CHOICES.whole):
            columns = power(width)
        of.launch(
            product_kernel,
            (-(-outputs // block),),
            *(out, x, weight, weight if norm is None else norm),
            *(len(x), outputs, of.settings.eps),
            WIDTH=width,
            ROWS=rows,
            OUTPUTS=block,
            COLUMNS=columns,
            PARTS=min(CHOICES.parts, columns // 16),
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            SWIGLU=each.does.swiglu,
            num_warps=CHOICES.warps,
        )
        return out


STREAMED = "streamed"
"""Name of the matmul with weights in shared memory."""

STEP = 128
SHARED = 227 * 1024
"""Maximum shared memory per block in bytes."""

Sizes = tuple[int, int, int]

UNCUT_TILES = 1024
"""Minimum 16-row tiles of a weight without column slices."""


class CudaProducts:
    """Matmuls for up to 32 rows, on devices with concurrent kernels."""

    def ways(self, each: Bound, num_rows: int) -> tuple[str, ...]:
        """Return the possible name, or nothing."""
        weight = each.weight
        assert weight is not None
        outputs, columns = weight.shape
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] < 9:
            return ()
        whole = columns % STEP == 0 and (not each.does.swiglu or outputs % 32 == 0)
        most = 16384 if each.norm is None or num_rows > 1 else 8192
        fits = whole and num_rows <= 32 and columns <= most and _nvrtc() is not None
        return (STREAMED,) if fits else ()

    def run(self, of: Any, way: str, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run `Linear` for the executor ``of``."""
        weight, norm, swiglu = each.weight, each.norm, each.does.swiglu
        assert weight is not None
        if norm is not None and len(x) > 1:
            x, norm = of.normed(each, x), None
        width = weight.shape[0] // (2 if swiglu else 1)
        out = x.new_empty(len(x), width) if residual is None else residual
        how = {"epilogue": 2 if swiglu else int(residual is not None), "chained": of.chained}
        cuda_product(out, x, weight, norm, of.settings.eps, **how)
        return out


def cuda_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    *,
    epilogue: int,
    chained: bool,
) -> None:
    """Compute ``x weight^T``. ``epilogue``: 0 store, 1 add, 2 SwiGLU of gates and ups."""
    num_tiles, num_steps = -(-weight.shape[0] // 16), weight.shape[1] // STEP
    num_slices = 1 if num_tiles >= UNCUT_TILES else 8
    places = (each if each is None else each.data_ptr() for each in (weight, x, norm, out))
    sizes = len(x), out.shape[1], num_steps, num_tiles, num_slices, epilogue
    is_float = norm is not None and norm.dtype == torch.float32
    given = struct.pack("@4P7if", *(place or 0 for place in places), *sizes, is_float, eps)
    if len(x) == 1:
        depth = 3 if num_steps <= 54 else 2  # so that two blocks fit
        found = torch.cuda.get_device_properties(weight.device)
        grid = min(num_tiles, 2 * found.multi_processor_count), 1, 1
        name, threads, shared = f"one_row_{depth}", 256, num_steps * 256 + depth * 32768
    else:
        eights, tiles, warps, depth = _shape_of(len(x), num_tiles)
        grid = -(-num_tiles // (warps * tiles)), num_slices, 1
        name, threads = f"some_rows_{eights}_{tiles}_{depth}", 32 * warps
        shared = depth * (eights * 8 * (STEP + 8) * 2 + warps * tiles * 4096)
    kernel = _kernels(weight.device.index, weight.dtype)[name]
    how: dict[str, Any] = {"shared": shared, "cluster": (1, grid[1], 1), "chained": chained}
    launch(kernel, ctypes.create_string_buffer(given), grid, threads, **how)


def launch(
    kernel: Any,
    arguments: Any,
    blocks: Sizes,
    threads: int,
    *,
    shared: int = 0,
    cluster: Sizes = (1, 1, 1),
    chained: bool,
) -> None:
    """Run a kernel. ``cluster``: blocks with common memory. ``chained``: early launch."""
    wanted = [(6, 1, 0, 0)] * chained + [(4, *cluster)] * (cluster != (1, 1, 1))
    attributes = b"".join(struct.pack("@Q3I52x", *each) for each in wanted)  # CUlaunchAttribute
    array, stream = ctypes.create_string_buffer(attributes), torch.cuda.current_stream().cuda_stream
    sizes = *blocks, threads, 1, 1, shared, stream, ctypes.addressof(array), len(wanted)
    config = ctypes.create_string_buffer(struct.pack("@7I2PI4x", *sizes))  # CUlaunchConfig
    places = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    call("cuLaunchKernelEx", config, kernel, places, None)


def _shape_of(num_rows: int, num_tiles: int) -> tuple[int, int, int, int]:
    """Return row groups of eight, tiles per warp, warps per block, and pipeline steps."""
    if num_rows > 16:
        return (4, 2, 7, 3) if num_tiles >= UNCUT_TILES else (4, 1, 6, 2)
    if num_rows > 8 or num_tiles <= 300:
        return (2 if num_rows > 8 else 1), 1, 7, 2
    return 1, 1, 7, 4 if num_tiles >= UNCUT_TILES else 3


@functools.cache
def _kernels(device: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the loaded kernels of `PRODUCTS` for an operand type, by name."""
    made = re.findall(r"(ONE_ROW|SOME_ROWS)\((\d.*?)\)", PRODUCTS)
    names = [f"{kind.lower()}_{numbers.replace(', ', '_')}" for kind, numbers in made]
    major, minor = torch.cuda.get_device_capability(device)
    options = f"-DHALF={int(dtype == torch.float16)}", f"-arch=sm_{major}{minor}"
    return load_kernels(machine_code("products.cu", PRODUCTS, {}, *options), names, device)


@functools.cache
def _nvrtc() -> Any:
    """Return the compiler, or None. CUDA builds of torch contain it."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    for path in (*Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"), name):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


def machine_code(name: str, text: str, headers: Mapping[str, str], *options: str) -> bytes:
    """Compile a source to machine code. ``headers``: included texts by name."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    texts, names, given = (
        (ctypes.c_char_p * len(each))(*(one.encode() for one in each))
        for each in (headers.values(), headers, ("--std=c++17", *options))
    )
    new = ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names
    failed = nvrtc.nvrtcCreateProgram(*new) or nvrtc.nvrtcCompileProgram(program, len(given), given)
    what = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, found)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"{name}, NVRTC {failed}: {found.value[:500].decode()}")
    return found.raw


def load_kernels(binary: bytes, names: Iterable[str], device: int) -> dict[str, Any]:
    """Load kernels by name, with the shared memory maximum."""
    module, found = ctypes.c_void_p(), {}
    torch.cuda.synchronize(device)  # creates the module's context
    call("cuModuleLoadData", ctypes.byref(module), binary)
    for name in names:
        kernel, fixed = ctypes.c_void_p(), ctypes.c_int()
        call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        call("cuFuncGetAttribute", ctypes.byref(fixed), 1, kernel)  # shared bytes
        call("cuFuncSetAttribute", kernel, 8, SHARED - fixed.value)  # maximum dynamic bytes
        found[name] = kernel
    return found
