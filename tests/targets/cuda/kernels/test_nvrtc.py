"""Parameter structures of CUDA C++ kernels, loading, and error messages."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.collectives import all_reduce
from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_solve as native_delta_prompt
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step as native_delta
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.matmul import (
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemm_swiglu_bf16,
    gemv,
)
from tilewright.errors import CompileError

SOURCES = [
    gemv.source(),
    gemv.coded_source(),
    native_attention.SOURCE,
    native_delta.SOURCE,
    native_delta_prompt.SOURCE,
    native_route.SOURCE,
    native_router.SOURCE,
    native_experts.PRODUCTS,
    native_experts.MOE_SMALL,
    gemm_block.SOURCE,
    gemm_block.CODED_SOURCE,
    gemm_block_e4m3.SOURCE,
    gemm_bf16.SOURCE,
    gemm_swiglu_bf16.SOURCE,
    all_reduce.SOURCE,
]
HEAD = """
#include <cstddef>
#define __device__
#define __forceinline__
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef long long i64; typedef unsigned long long u64; struct uint4; constexpr int PAIRS = 8;
typedef float Value; typedef float Turn; typedef u32 Page;
struct float2 { float x, y; };
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    "path", sorted(Path(nvrtc.__file__).parents[2].rglob("*.cu")), ids=lambda path: path.name
)
def test_every_source_has_known_names_and_types(path: Path) -> None:
    """NVRTC compiles on a machine with a GPU only, so g++ reads every template here."""
    folders = {file.parent for file in Path(nvrtc.__file__).parents[2].rglob("*.cuh")}
    names = Path(__file__).with_name("cuda_syntax.h")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-include", str(names), "-x", "c++"]
    done = subprocess.run(
        [*command, *(f"-I{folder}" for folder in sorted(folders)), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def structures(source: nvrtc.KernelSource) -> str:
    """Return the parameter structures in a source and its headers."""
    files = [source.path, *(nvrtc.header_path(source.path, name) for name in source.headers)]
    text = "\n".join(path.read_text() for path in files)
    found = [
        re.search(rf"^struct (?:alignas\(\d+\) )?{name} {{.*?^}};", text, re.M | re.S)
        for name, _ in source.structures
    ]
    return "\n".join(each[0] for each in found if each)


def compiles(source: nvrtc.KernelSource) -> bool:
    checks = source.text()[len(source.path.read_bytes()) :].decode()
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    text = HEAD + structures(source) + checks
    return subprocess.run(command, input=text.encode(), capture_output=True).returncode == 0


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.path.name)
def test_structures_lie_as_kernels_read_them(source: nvrtc.KernelSource) -> None:
    """Compilation repeats this check. An additional field or another type is an error."""
    assert source.structures and compiles(source)
    (name, twin), *others = source.structures
    (first, kind), *fields = twin._fields_

    class Longer(ctypes.Structure):
        _fields_ = (*twin._fields_, ("more", ctypes.c_void_p))

    class Renamed(ctypes.Structure):
        _fields_ = ((first + "_", kind), *fields)

    for wrong in (Longer, Renamed):
        assert not compiles(
            nvrtc.KernelSource(source.path, (), source.headers, ((name, wrong), *others))
        )


class Driver:
    """Replaces the driver and NVRTC. Records the current device at each module load."""

    def __init__(self) -> None:
        self.current, self.error = 0, 0
        self.loaded: list[int] = []
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=2,
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=3,
        )
        self.nvrtcVersion: Any = lambda: (0, 13, 0)
        self.cuModuleLoadData = self.load
        self.cuModuleGetFunction: Any = lambda module, name: (0, name)
        self.cuFuncGetAttribute: Any = lambda *_: (0, 0)
        self.cuFuncSetAttribute: Any = lambda *_: (0,)

    def load(self, binary: bytes) -> tuple[int, str]:
        self.loaded.append(self.current)
        return self.error, "module"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = bindings.nvrtc = made
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(nvrtc, "_cubin", lambda source, capability: b"")
    yield made
    nvrtc._functions.cache_clear()
    nvrtc._prepared.cache_clear()


SOURCE = nvrtc.KernelSource(Path("some.cu"), ("some",))
CUBIN = nvrtc._cubin


@pytest.mark.parametrize("count", [1, 2, 3])
def test_min_shared_limits_the_blocks_of_a_multiprocessor(count: int) -> None:
    """A multiprocessor has 228 KB and reserves 1 KB per block."""
    each = nvrtc.min_shared(count) + 1024
    assert (228 << 10) // each == count and each - 16 <= (228 << 10) // (count + 1)


def test_kernels_are_loaded_into_the_device_that_asks(driver: Driver) -> None:
    """Regardless of the current device."""
    for index in (1, 0, 3):
        nvrtc.load(torch.device("cuda", index), SOURCE)
    assert driver.loaded == [1, 0, 3] and driver.current == 0


@pytest.mark.parametrize("beside", [False, True])
def test_where_blocks_are_to_lie_beside_others_all_memory_is_shared(
    driver: Driver, beside: bool
) -> None:
    """Otherwise the second kernel would wait for an empty multiprocessor."""
    asked: list[tuple[int, int]] = []
    driver.cuFuncSetAttribute = lambda function, what, value: (asked.append((what, value)), (0,))[1]
    nvrtc.load(torch.device("cuda", 0), dataclasses.replace(SOURCE, beside=beside))
    assert ((3, 100) in asked) == beside and (2, nvrtc.MOST_SHARED) in asked


def test_an_error_of_the_device_is_raised_and_not_kept(driver: Driver) -> None:
    """For example, out of memory does not mean that kernels cannot run."""
    driver.error = 2
    with pytest.raises(RuntimeError, match="CUDA: 2"):
        nvrtc.load(torch.device("cuda", 0), SOURCE)
    driver.error = 0
    nvrtc.load(torch.device("cuda", 0), SOURCE)
    assert driver.loaded == [0, 0]


def test_sources_that_do_not_compile_are_an_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(source: nvrtc.KernelSource, capability: tuple[int, int]) -> bytes:
        raise CompileError("some.cu does not compile")

    monkeypatch.setattr(nvrtc, "_cubin", refuses)
    with pytest.raises(CompileError, match=r"some\.cu"):
        nvrtc.load(torch.device("cuda", 0), SOURCE)


@pytest.mark.parametrize("version, all_cores", [((12, 9), False), ((13, 0), True), ((13, 1), True)])
def test_machine_code_is_kept_by_the_compiler_s_version_and_made_by_all_cores_from_13_on(
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    all_cores: bool,
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    source = nvrtc.KernelSource(tmp_path / "some.cu", ("some",))
    source.path.write_text("")
    compiler: Any = driver
    compiler.nvrtcVersion = lambda: (0, *version)
    asked: list[bytes] = []
    compiler.nvrtcCreateProgram = lambda *_: (0, "program")
    compiler.nvrtcCompileProgram = lambda program, number, options: (asked.extend(options), (0,))[1]
    compiler.nvrtcGetCUBINSize = lambda program: (0, 3)
    compiler.nvrtcGetCUBIN = lambda program, binary: (0,)
    assert len(CUBIN(source, (9, 0))) == 3
    assert (b"--split-compile=0" in asked) == all_cores and b"--gpu-architecture=sm_90a" in asked
    asked.clear()
    assert len(CUBIN(source, (9, 0))) == 3 and not asked, "kept"
    compiler.nvrtcVersion = lambda: (0, version[0], version[1] + 1)
    assert len(CUBIN(source, (9, 0))) == 3 and asked, "another compiler's is not taken"


def test_without_a_compiler_it_says_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int]:
        raise RuntimeError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(driver, "nvrtcVersion", missing)
    assert "libnvrtc.so" in nvrtc.gpu_of(torch.device("cuda", 0)).why_no_cpp


def test_an_error_is_the_first_of_the_log() -> None:
    log = "a.cuh(2): warning #177-D: unused\n  int x;\n\na.cu(72): error: no operator\n\0"
    assert nvrtc._first_error(log) == "a.cu(72): error: no operator"
    assert nvrtc._first_error("") == ""


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("width", ctypes.c_int), ("eps", ctypes.c_float))


def test_launches_share_a_configuration_by_kernel_grid_and_stream(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(config: Any, function: Any, pointers: int, extra: int) -> tuple[int]:
        given = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        width = ctypes.cast(given[int(is_spread)] or 0, ctypes.POINTER(ctypes.c_int))
        calls.append((config, function, width[0 if is_spread else 2]))
        return (driver.error,)

    made: Any = driver
    made.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())
    made.CUlaunchConfig = SimpleNamespace
    made.CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=1
    )
    made.cuLaunchKernelEx = run
    streams = iter((5, 5, 7, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: next(streams), raising=False
    )
    for width, num_blocks, is_spread in (
        (1, 4, False),
        (2, 4, True),
        (3, 8, True),
    ):
        at = nvrtc.Launch((num_blocks, 1, 1), 32, shared=16)
        nvrtc.launch(SOURCE, "some", at=at, arguments=Params(width=width), spread=is_spread)
    (first, function, _), (second, *_), (third, *_) = calls
    assert first is second and function == b"some" and [call[2] for call in calls] == [1, 2, 3]
    assert (first.gridDimX, first.hStream, first.sharedMemBytes) == (4, 5, 16)
    assert (third.gridDimX, third.hStream, third.numAttrs) == (8, 7, 1)
    driver.error = 2
    with pytest.raises(RuntimeError, match="CUDA: 2"):
        nvrtc.launch(SOURCE, "some", at=at, arguments=Params(), spread=True)
