"""CUDA C++ kernels: compilation by NVRTC, cache by source hash, and launch.

Excludes the kernels' computation.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewright.compiler.targets.cuda.kernels.common.table import INTERPRETER, MADE_FOR, Gpu
from tilewright.errors import CompileError, one_line
from tilewright.utils.files import cache_dir, replace_file

MOST_SHARED = 227 * 1024
"""Maximum shared memory of a block in bytes, static and dynamic."""
RESERVED = 1024
"""Bytes that a multiprocessor reserves per block. It has so much more than a block may have."""


def min_shared(max_blocks: int) -> int:
    """Return the dynamic shared memory in bytes that limits a multiprocessor to ``max_blocks``
    blocks.

    Blocks start on multiprocessors with free memory, while the previous kernel ends. Without a
    limit, some multiprocessors would have more blocks than others.
    """
    return (MOST_SHARED + RESERVED) // (max_blocks + 1) - RESERVED + 16


_PLACE_OF = """
#ifdef __CUDACC_RTC__
#define PLACE_OF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define PLACE_OF(type, field) __builtin_offsetof(type, field)
#endif
"""
"""Offset of a field. NVRTC does not support C's offsetof."""


_HEADERS = {each.name: each for each in Path(__file__).parents[1].rglob("*.cuh")}
"""All headers by file name. Names are unique."""


def header_path(path: Path, name: str) -> Path:
    """Return the path of a header included by ``path``: in the same directory, or by its unique
    name.
    """
    beside = path.with_name(name)
    return beside if beside.is_file() else _HEADERS[name]


@dataclass(frozen=True, slots=True, eq=False)
class KernelSource:
    """A CUDA C++ file.

    Attributes:
        path: The file.
        names: Kernels.
        headers: Names of all included headers, also indirect.
        structures: C++ parameter structures by name, with their ctypes mirrors.
        beside: Another kernel's blocks must fit concurrently, so multiprocessors use all of their
            memory as shared memory.
        large_clusters: Kernels with clusters of sixteen blocks.
    """

    path: Path
    names: tuple[str, ...]
    headers: tuple[str, ...] = ()
    structures: tuple[tuple[str, type[ctypes.Structure]], ...] = ()
    beside: bool = False
    large_clusters: tuple[str, ...] = ()

    def text(self) -> bytes:
        """Return the text to compile: the file, and assertions on its structures' layout.

        A field that differs from its ctypes mirror fails to compile.
        """
        return self.path.read_bytes() + "".join(self._checks()).encode()

    def _checks(self) -> Iterator[str]:
        yield _PLACE_OF
        for name, twin in self.structures:
            yield _is(f"sizeof({name})", ctypes.sizeof(twin), name)
            for field in (each[0] for each in twin._fields_):
                place = getattr(twin, field).offset
                yield _is(f"PLACE_OF({name}, {field})", place, f"{name}.{field}")


class Launch(NamedTuple):
    """Launch configuration. A tuple, because its hash selects the prepared launch.

    Attributes:
        blocks: Grid size along x, y and z.
        num_threads: Threads in a block.
        shared: Dynamic shared memory in bytes.
        cluster: Cluster size in blocks along x, y and z. Blocks in a cluster access their peers'
            shared memory.
    """

    blocks: tuple[int, int, int]
    num_threads: int
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)


def launch(
    source: KernelSource,
    name: str,
    *,
    at: Launch,
    arguments: ctypes.Structure,
    spread: bool = False,
) -> None:
    """Launch a kernel on the current stream. It may start before the previous kernel ends (PDL).

    Args:
        spread: Each field is a separate kernel parameter. False: the structure is the only
            parameter.
    """
    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    run, config, function = _prepared(source, name, at, device, stream)
    address = ctypes.addressof(arguments)
    offsets = _field_offsets(type(arguments)) if spread else (0,)
    pointers = (ctypes.c_void_p * len(offsets))(*[address + offset for offset in offsets])
    check(run(config, function, ctypes.addressof(pointers), 0))


@functools.cache
def _field_offsets(structure: type[ctypes.Structure]) -> tuple[int, ...]:
    return tuple(getattr(structure, field[0]).offset for field in structure._fields_)


@functools.lru_cache(maxsize=4096)
def _prepared(
    source: KernelSource, name: str, at: Launch, device: int, stream: int
) -> tuple[Callable[..., Any], Any, Any]:
    """Return the driver's launch function, a configuration and a kernel for a stream.

    A configuration takes longer to make than a launch. It is never changed, so threads share it.
    """
    from cuda.bindings import driver

    behind = driver.CUlaunchAttribute()
    behind.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    behind.value.programmaticStreamSerializationAllowed = 1
    config = _config(at, behind)
    config.hStream = stream
    return driver.cuLaunchKernelEx, config, _functions(source, device)[name]


@functools.cache
def clusters_at_once(source: KernelSource, name: str, at: Launch, device: int) -> int:
    """Return the maximum resident cluster count on the current device."""
    from cuda.bindings import driver

    function = _functions(source, device)[name]
    return int(check(driver.cuOccupancyMaxActiveClusters(function, _config(at))))


def _config(at: Launch, *attributes: Any) -> Any:
    """Return the driver's launch configuration without a stream."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = at.blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = at.num_threads, 1, 1
    config.sharedMemBytes = at.shared
    attrs = list(attributes)
    if at.cluster != (1, 1, 1):
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        together.value.clusterDim.x, together.value.clusterDim.y = at.cluster[:2]
        together.value.clusterDim.z = at.cluster[2]
        attrs.append(together)
    config.attrs, config.numAttrs = attrs, len(attrs)
    return config


def _is(what: str, value: int, name: str) -> str:
    return f'\nstatic_assert({what} == {value}, "{name} is not what the host hands over");\n'


def gpu_of(device: torch.device) -> Gpu:
    """Return a device's description for the op tables."""
    if device.type != "cuda":
        return INTERPRETER
    capability = torch.cuda.get_device_capability(device)
    return Gpu(capability, MADE_FOR if capability[0] != 9 else _missing())


def load(device: torch.device, *sources: KernelSource) -> None:
    """Compile sources and load them on a device. A CPU needs nothing.

    Raises:
        CompileError: NVRTC does not compile a source.
        RuntimeError: The device reports an error.
    """
    for source in sources if device.type == "cuda" else ():
        _functions(source, device.index or 0)


def _missing() -> str:
    """Return the reason why NVRTC is missing. Empty: NVRTC is available."""
    try:
        from cuda.bindings import nvrtc

        check(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # runtimeError: the library is missing
        return one_line(error)
    return ""


@functools.cache
def _functions(source: KernelSource, device: int) -> dict[str, Any]:
    """Return all kernels of a source, loaded on the device."""
    from cuda.bindings import driver

    binary = _cubin(source, torch.cuda.get_device_capability(device))
    with torch.cuda.device(device):  # the driver loads into the current context
        torch.zeros(1, device=f"cuda:{device}")  # creates the context
        module = check(driver.cuModuleLoadData(binary))
    fixed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    found = {}
    for name in source.names:
        found[name] = check(driver.cuModuleGetFunction(module, name.encode()))
        left = MOST_SHARED - check(driver.cuFuncGetAttribute(fixed, found[name]))
        check(driver.cuFuncSetAttribute(found[name], most, left))
        if source.beside:
            share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check(driver.cuFuncSetAttribute(found[name], share, 100))  # percent
        if name in source.large_clusters:
            large = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check(driver.cuFuncSetAttribute(found[name], large, 1))
    return found


def _cubin(source: KernelSource, capability: tuple[int, int]) -> bytes:
    """Return the machine code for a compute capability. Compile it if the cache does not have it.

    Raises:
        CompileError: Contains the first error of NVRTC's log.
    """
    from cuda.bindings import nvrtc

    path, text = source.path, source.text()
    names = [name.encode() for name in source.headers]
    headers = [header_path(path, name).read_bytes() for name in source.headers]
    check(parts := nvrtc.nvrtcVersion())
    version = tuple(parts[1:])  # major, minor
    options = [b"--std=c++17", b"--gpu-architecture=sm_%d%da" % capability]
    options.append(b"--device-as-default-execution-space")  # for lambdas with `auto` arguments
    if version >= (13, 0):
        options.append(b"--split-compile=0")  # Uses all cores. The machine code is the same.
    key = hashlib.sha256(repr((text, names, headers, options, version)).encode()).hexdigest()[:32]
    kept = cache_dir() / "kernels" / f"{path.stem}-{key}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    name = path.name.encode()
    program = check(nvrtc.nvrtcCreateProgram(text, name, len(names), headers, names))
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error):
        log = b" " * int(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CompileError(
            f"{path.name} does not compile: {_first_error(log.decode(errors='replace'))}"
        )
    binary = b" " * int(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, binary)
    except OSError:
        pass  # the next process compiles again, which takes seconds
    return binary


def _first_error(log: str) -> str:
    """Return the line of NVRTC's log with the first error, else the first line."""
    lines = log.strip("\0 \n").splitlines() or [""]
    return next((line for line in lines if "error" in line), lines[0])[:300]


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver or NVRTC call.

    Raises:
        RuntimeError: The call failed. Names the error.
    """
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error!r}")
    return values[0] if values else None
