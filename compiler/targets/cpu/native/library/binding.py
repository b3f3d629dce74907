"""The library's C interface through ctypes. Sizes and its structures' version are checked."""

from __future__ import annotations

import ctypes
import functools
import platform
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)

from tilewright.compiler.targets.cpu.native.library.build import library_path
from tilewright.compiler.targets.cpu.native.library.recipe import ARM
from tilewright.errors import CompileError

VERSION = 13
_ERROR_BYTES = 512

ISA_NAMES = (
    ("scalar", "NEON dot products")
    if platform.machine() in ARM
    else ("scalar", "AVX2", "AVX-512 VNNI BF16")
)
OPS = (
    *("embed", "linear", "attend", "gather", "swiglu", "norm_heads", "norm", "elementwise"),
    *("sigmoid_gate", "route", "experts", "expert_sum", "convolve", "delta_rule"),
    *("all_reduce", "gather_logits", "cross_attend", "add_gated", "read_hidden"),
)
KINDS = (
    *("fp32", "bf16", "fp16", "q80", "q40", "bfp8", "bfp4", "q41", "q50", "q51", "q4_k", "q5_k"),
    *("q6_k", "fp8", "iq4_xs", "nvfp4", "nf4", "vector"),
)
ARITHMETICS = ("fp32", "bf16", "int8")
FUNCTIONS = ("add", "mul", "div", "tanh", "gelu", "gelu_tanh")
WIRES = ("fp32", "bf16", "q80")
STATES = ("keys_values", "window", "matrix")
CACHES = ("fp32", "bf16", "bfp8")
RESIDUAL, PAIRED, INTERLEAVED, RENORMALISE, ROUNDED, NORM_ROUNDED = 1, 2, 4, 8, 16, 32
LINEAR, CROSS = 64, 128
"""Flags of an instruction."""


class TwPlace(Structure):
    """A buffer's columns. Buffer -1: none."""

    _fields_ = (("buffer", c_int32), ("first", c_int32), ("width", c_int32))


class TwInstruction(Structure):
    """An instruction (TwInstruction in source/interface.h)."""

    _fields_ = (
        ("op", c_int32),
        ("flags", c_int32),
        ("arithmetic", c_int32 * 2),
        ("out", TwPlace),
        ("x", TwPlace),
        ("y", TwPlace),
        ("z", TwPlace),
        ("gate", TwPlace),
        ("weight", c_int32),
        ("norm", c_int32),
        ("bias", c_int32),
        ("other", c_int32),
        ("state", c_int32),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("function", c_int32),
        ("num_key_heads", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("factor", c_float),
        ("number", c_float),
    )


class TwTensor(Structure):
    """A weight in panels, or a vector."""

    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("data", c_void_p),
        ("num_bytes", c_uint64),
    )


class TwState(Structure):
    """A layer's keys and values, or per-sequence state."""

    _fields_ = (
        ("kind", c_int32),
        ("cache", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("mantissa_bits", c_int32),
    )


class TwProgram(Structure):
    """Arguments for opening an engine."""

    _fields_ = (
        ("size", c_uint32),
        ("version", c_uint32),
        ("instruction_size", c_uint32),
        ("tensor_size", c_uint32),
        ("num_threads", c_int32),
        ("isa", c_int32),
        ("max_num_seqs", c_int32),
        ("max_context", c_int32),
        ("max_tokens", c_int32),
        ("num_instructions", c_int32),
        ("num_tensors", c_int32),
        ("num_buffers", c_int32),
        ("num_states", c_int32),
        ("logits", c_int32),
        ("large_pages", c_int32),
        ("instructions", POINTER(TwInstruction)),
        ("tensors", POINTER(TwTensor)),
        ("widths", POINTER(c_int32)),
        ("states", POINTER(TwState)),
    )


class TwPeers(Structure):
    """The ranks of a group."""

    _fields_ = (
        ("rank", c_int32),
        ("count", c_int32),
        ("limit_ms", c_int32),
        ("looks", c_int32),
        ("most_looks", c_int32),
        ("sockets", POINTER(c_int32)),
        ("logit_widths", POINTER(c_int32)),
        ("two_hops_from", c_int64),
    )


class TwExchanged(Structure):
    """Statistics about collectives."""

    _fields_ = (
        ("number", c_int64),
        ("num_bytes", c_int64),
        ("nanoseconds", c_int64),
        ("failed", c_int64),
    )


class TwStep(Structure):
    """Tokens of sequences, and their logits' destination."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_rows", c_int32),
        ("decodes", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("bounds", c_void_p),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("hidden", c_void_p),
        ("num_choosable", c_int32),
        ("image_rows", c_void_p),
        ("embeddings", c_void_p),
        ("rotary", c_void_p),
        ("visible", c_void_p),
        ("cross", c_void_p),
        ("cross_rows", c_void_p),
        ("num_images", c_int32),
        ("cross_width", c_int32),
        ("carried", c_void_p),
        ("ends", c_void_p),
        ("cross_bits", c_int32),
    )


@functools.cache
def library(*, every_isa: bool = False) -> ctypes.CDLL:
    """Load the library. If necessary, build the library for this processor or with ``every_isa``.

    Raises:
        CompileError: The library cannot be built or loaded, or has another version.
    """
    path = library_path(every_isa=every_isa)
    try:
        found = ctypes.CDLL(str(path))
        found.tw_version.restype = c_int32
        version = found.tw_version()
    except (OSError, AttributeError) as error:
        raise CompileError(
            f"{path}: the native library cannot be loaded ({error}); allowed: remove it, and it is "
            "built again, or --backend onnxruntime"
        ) from None
    if version != VERSION:
        raise CompileError(f"{path}: version {version} of the native library; allowed: {VERSION}")
    found.tw_best_isa.restype = c_int32
    found.tw_open.restype, found.tw_open.argtypes = (
        c_void_p,
        (POINTER(TwProgram), c_char_p, c_int32),
    )
    found.tw_step.restype, found.tw_step.argtypes = c_int32, (c_void_p, POINTER(TwStep))
    found.tw_join.restype, found.tw_join.argtypes = c_int32, (c_void_p, POINTER(TwPeers))
    found.tw_set_hops.restype, found.tw_set_hops.argtypes = None, (c_void_p, c_int64)
    found.tw_exchanged.restype = None
    found.tw_exchanged.argtypes = (c_void_p, POINTER(TwExchanged))
    found.tw_all_reduce.restype = c_int32
    found.tw_all_reduce.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_int32)
    found.tw_clear.restype, found.tw_clear.argtypes = None, (c_void_p, c_int32)
    found.tw_copy.restype, found.tw_copy.argtypes = None, (c_void_p, c_int32, c_int32, c_int32)
    found.tw_slot_bytes.restype, found.tw_slot_bytes.argtypes = c_int64, (c_void_p, c_int32)
    found.tw_sequence_bytes.restype, found.tw_sequence_bytes.argtypes = c_int64, (c_void_p,)
    for move in (found.tw_save, found.tw_load):
        move.restype, move.argtypes = None, (c_void_p, c_int32, c_void_p)
    found.tw_keep_rows.restype, found.tw_keep_rows.argtypes = None, (c_void_p, c_void_p)
    found.tw_times.restype, found.tw_times.argtypes = None, (c_void_p, c_void_p)
    found.tw_close.restype, found.tw_close.argtypes = None, (c_void_p,)
    return found


def open_engine(program: TwProgram) -> int:
    """Open an engine. The program's arrays are copied, tensor data are not.

    Raises:
        CompileError: The program is inconsistent, or memory is insufficient.
    """
    said = ctypes.create_string_buffer(_ERROR_BYTES)
    engine = library(every_isa=program.isa >= 0).tw_open(ctypes.byref(program), said, _ERROR_BYTES)
    if not engine:
        raise CompileError(f"backend native: {said.value.decode()}")
    return int(engine)
