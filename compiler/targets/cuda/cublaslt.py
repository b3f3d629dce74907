"""cuBLASLt by its C interface: the algorithms that it proposes for a product, and a product by one
of them. Knows nothing of which is the fastest.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.errors import CompileError

_LIBRARY = "libcublasLt.so.{}"
_FLOAT32, _BFLOAT16 = 0, 14
_TYPES = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_COMPUTE_FLOAT32, _TRANSPOSED = 68, 1
_TRANSPOSE_A, _MOST_WORKSPACE = 3, 1
_ALIGNMENTS = (5, 6, 7, 8)
_MOST_ALIGNED = 256

WORKSPACE = 32 << 20
"""Bytes that a product may use besides its operands."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class RefusedError(Exception):
    """What the library does not run."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_SIGNATURES = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtDestroy": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cublasLtMatmulDescSetAttribute": (_POINTER, ctypes.c_int, _POINTER, _SIZE),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatrixLayoutCreate": (
        *(_POINTER, ctypes.c_int),
        *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    ),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, ctypes.c_int, _POINTER, _SIZE),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_POINTER,) * 7, ctypes.c_int, _POINTER, _POINTER),
    "cublasLtMatmulAlgoCheck": (*(_POINTER,) * 8,),
    "cublasLtMatmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A product as the library sees it: ``out [M, N] = x [M, K] weight [N, K]^T``, added to what
    ``out`` holds or not; how far rows are apart, the results' type, and to what bytes the places
    of x, weight and out are aligned.
    """

    num_rows: int
    num_outputs: int
    num_columns: int
    strides: tuple[int, int, int]
    dtype: torch.dtype
    adds: bool
    aligned: tuple[int, int, int]

    @staticmethod
    def of(out: Tensor, x: Tensor, weight: Tensor, *, adds: bool) -> Shape:
        """The shape of these operands."""
        strides = x.stride(0), weight.stride(0), out.stride(0)
        aligned = _aligned(x), _aligned(weight), _aligned(out)
        return Shape(len(x), len(weight), weight.shape[1], strides, out.dtype, adds, aligned)


def _aligned(operand: Tensor) -> int:
    address = operand.data_ptr()
    return min(_MOST_ALIGNED, address & -address)


def takes(out: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether a product's operands are of the kind that is called for here."""
    is_half = x.dtype == weight.dtype == torch.bfloat16 and out.dtype in _TYPES
    return is_half and out.is_cuda and all(part.stride(1) == 1 for part in (out, x, weight))


class Library:
    """A device's handle of cuBLASLt, with the memory that its products work in.

    One stream uses it at a time.
    """

    def __init__(self, device: torch.device) -> None:
        """Raise CompileError where there is no cuBLASLt."""
        self._calls, self.device = _load(), device
        with torch.cuda.device(device):
            self._handle = _made(self._calls, "cublasLt", "Create", "Destroy", self)
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)

    def product(self, shape: Shape) -> Product:
        """What is needed to run products of a shape."""
        return Product(self, shape)


class Product:
    """Products of a shape."""

    def __init__(self, library: Library, shape: Shape) -> None:
        self._library, self.shape, calls = library, shape, library._calls
        kinds = _COMPUTE_FLOAT32, _FLOAT32
        self._what = _made(calls, "cublasLtMatmulDesc", "Create", "Destroy", self, *kinds)
        _set(calls.cublasLtMatmulDescSetAttribute, self._what, _TRANSPOSE_A, _TRANSPOSED)
        x_stride, weight_stride, out_stride = shape.strides
        # The library counts columns first: out^T = weight x^T.
        sizes = (
            (_BFLOAT16, shape.num_columns, shape.num_outputs, weight_stride),
            (_BFLOAT16, shape.num_columns, shape.num_rows, x_stride),
            (_TYPES[shape.dtype], shape.num_outputs, shape.num_rows, out_stride),
        )
        self._layouts = [
            _made(calls, "cublasLtMatrixLayout", "Create", "Destroy", self, *each) for each in sizes
        ]
        self._one, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(shape.adds))

    def proposals(self, most: int) -> list[bytes]:
        """Up to so many algorithms for it, the likeliest to be fast first."""
        calls = self._library._calls
        wanted = _made(calls, "cublasLtMatmulPreference", "Create", "Destroy", self)
        set_one = calls.cublasLtMatmulPreferenceSetAttribute
        _set(set_one, wanted, _MOST_WORKSPACE, WORKSPACE, ctypes.c_uint64)
        x, weight, out = self.shape.aligned
        for attribute, value in zip(_ALIGNMENTS, (weight, x, out, out), strict=True):
            _set(set_one, wanted, attribute, value, ctypes.c_uint32)
        found, count = (_Proposal * most)(), ctypes.c_int()
        status = calls.cublasLtMatmulAlgoGetHeuristic(
            self._library._handle, self._what, *self._operands(), wanted, most,
            ctypes.addressof(found), ctypes.addressof(count),
        )  # fmt: skip
        usable = [each for each in found[: count.value] if not each.state] if not status else []
        return [bytes(each.algorithm) for each in usable]

    def takes(self, algorithm: bytes) -> bool:
        """Whether an algorithm, proposed for another number of rows, can run this product."""
        given, found = _Algorithm.from_buffer_copy(algorithm), _Proposal()
        status = self._library._calls.cublasLtMatmulAlgoCheck(
            self._library._handle, self._what, *self._operands(),
            ctypes.addressof(given), ctypes.addressof(found),
        )  # fmt: skip
        return not status and found.workspace <= WORKSPACE

    def run(self, algorithm: bytes, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """``out = x weight^T``, or added to it, on the current stream; capturable.

        Raises:
            RefusedError: where the library does not run it.
        """
        library = self._library
        a, b, c = self._layouts
        status = library._calls.cublasLtMatmul(
            library._handle, self._what, ctypes.addressof(self._one),
            weight.data_ptr(), a, x.data_ptr(), b, ctypes.addressof(self._beta),
            out.data_ptr(), c, out.data_ptr(), c, algorithm,
            library._workspace.data_ptr(), WORKSPACE,
            torch.cuda.current_stream(library.device).cuda_stream,
        )  # fmt: skip
        if status:
            raise RefusedError(f"cuBLASLt refused {self.shape}: status {status}")

    def _operands(self) -> tuple[int, int, int, int]:
        a, b, c = self._layouts
        return a, b, c, c


def _made(calls: ctypes.CDLL, what: str, make: str, end: str, owner: object, *given: float) -> int:
    """What the library makes of ``given``, freed with its owner."""
    found = _POINTER()
    status = getattr(calls, what + make)(ctypes.addressof(found), *given)
    if status or found.value is None:
        raise CompileError(f"cuBLASLt: {what}{make} says {status}")
    weakref.finalize(owner, getattr(calls, what + end), found.value)
    return found.value


def _set(
    function: ctypes._NamedFuncPointer,
    where: int,
    attribute: int,
    value: int,
    kind: type[ctypes.c_int | ctypes.c_uint32 | ctypes.c_uint64] = ctypes.c_int,
) -> None:
    held = kind(value)
    if status := function(where, attribute, ctypes.addressof(held), ctypes.sizeof(held)):
        raise CompileError(f"cuBLASLt: attribute {attribute} = {value} says {status}")


def _load() -> ctypes.CDLL:
    name = _LIBRARY.format((torch.version.cuda or "0").split(".")[0])
    try:
        library = ctypes.CDLL(name)  # that torch has loaded
    except OSError:
        raise CompileError(
            f"cuBLASLt is not found ({name}); allowed: a CUDA build of torch"
        ) from None
    for function, arguments in _SIGNATURES.items():
        found = getattr(library, function)
        found.argtypes, found.restype = arguments, ctypes.c_int
    return library
