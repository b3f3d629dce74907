"""Kernels of `SOURCES` on a device: compiled by NVRTC once in a process, and launched."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine.parts.cuda_products import (
    CHAINED,
    CLUSTER,
    SHARED,
    Attribute,
    Launch,
    _check,
    _nvrtc,
)
from tilewright.compiler.targets.cuda.engine.parts.native_source import SOURCES

Sizes = tuple[int, int, int]


def takes_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `SOURCES` can run on a device, on such values."""
    if device.type != "cuda" or dtype != torch.bfloat16 or _nvrtc() is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def native_launch(
    kernel: tuple[str, str, str],
    arguments: ctypes.Structure,
    *,
    blocks: Sizes,
    threads: int,
    shared: int = 0,
    cluster: Sizes = (1, 1, 1),
    chained: bool,
) -> None:
    """Run a kernel: its source, the line that makes it, its name; ``cluster``: blocks that are
    placed together.
    """
    attributes = [Attribute(CHAINED, (1,))] if chained else []
    attributes += [Attribute(CLUSTER, cluster)] if cluster != (1, 1, 1) else []
    listed = (Attribute * len(attributes))(*attributes)
    stream = torch.cuda.current_stream().cuda_stream
    launch = Launch(blocks, (threads, 1, 1), shared, stream, listed, len(attributes))
    function = _native(*kernel, torch.cuda.current_device())
    places = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    driver = ctypes.CDLL("libcuda.so.1")
    _check(driver.cuLaunchKernelEx(ctypes.byref(launch), function, places, None))


@functools.cache
def _native(source: str, made: str, name: str, device: int) -> Any:
    """A kernel, loaded on a device."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = native_code(source, made, f"sm_{major}{minor}a")
    driver, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.synchronize(device)  # makes the context that the module is loaded into
    _check(driver.cuModuleLoadData(ctypes.byref(module), binary))
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()))
    fixed = ctypes.c_int()
    _check(driver.cuFuncGetAttribute(ctypes.byref(fixed), 1, kernel))  # shared bytes
    _check(driver.cuFuncSetAttribute(kernel, 8, SHARED - fixed.value))  # most to come
    return kernel


@functools.cache
def native_code(source: str, made: str, architecture: str) -> bytes:
    """Machine code of a source with a line that makes one of its kernels."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    headers = [name for name in SOURCES if name.endswith(".cuh")]
    texts = (ctypes.c_char_p * len(headers))(*(SOURCES[name].encode() for name in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    given = b"--std=c++17", b"-DGENERATED", b"-arch=" + architecture.encode()
    options = (ctypes.c_char_p * len(given))(*given)
    text = f"{SOURCES[source]}{made}\n".encode()
    each = ctypes.byref(program), text, source.encode(), len(headers), texts, names
    failed = nvrtc.nvrtcCreateProgram(*each)
    failed = failed or nvrtc.nvrtcCompileProgram(program, len(given), options)
    what = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, found)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"{source}, NVRTC {failed}: {found.value[:500].decode()}")
    return found.raw
