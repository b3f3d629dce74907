"""A native program and its file: all arguments for the library, except load-time options.

Imports neither graphs nor torch.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.program.mapping import Mapped
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError, NoRoomError, one_line
from tilewright.utils.files import read_regular

PROGRAM = "program.json"
MAX_TOKENS = 512
"""Maximum tokens per library call. Larger batches are split without changing bits."""

_VERSION = 1

_Structure = TypeVar("_Structure", lib.TwInstruction, lib.TwState)
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BundledTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a program.

    Attributes:
        kind: Storage in `library.KINDS`.
        rows: Rows in storage.
        columns: Columns in storage.
        num_bytes: Bytes in the file.
        name: Its first parameter's name.
    """

    kind: str
    rows: _Count
    columns: _Count
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    name: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A program for the library, without weights.

    Attributes:
        tensors: Tensors in file order.
        instructions: Instructions in order.
        states: States by number.
        widths: Buffer widths.
        logits: Number of the logits buffer.
        logit_columns: Logit columns per rank. Empty: every rank has all columns.
    """

    tensors: tuple[BundledTensor, ...]
    instructions: tuple[lib.TwInstruction, ...]
    states: tuple[lib.TwState, ...]
    widths: tuple[int, ...]
    logits: int
    logit_columns: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Return the logits per row over all ranks."""
        return self.widths[self.logits]

    @property
    def hidden_size(self) -> int:
        """Return the output layer's input columns for gathered rows. 0: none."""
        gather, linear = lib.OPS.index("gather"), lib.OPS.index("linear")
        ops = [each.op for each in self.instructions]
        behind = self.instructions[ops.index(gather) :] if gather in ops else ()
        return next((each.x.width for each in behind if each.op == linear), 0)

    @property
    def has_sequence_state(self) -> bool:
        """Return whether a sequence has state besides keys and values."""
        return any(lib.STATES[each.kind] != "keys_values" for each in self.states)

    @property
    def reductions(self) -> list[tuple[int, str]]:
        """Return the columns and the link format of all sums over ranks."""
        op = lib.OPS.index("all_reduce")
        found = (each for each in self.instructions if each.op == op)
        return [(each.x.width, lib.WIRES[each.function]) for each in found]


class _BundleHeader(msgspec.Struct, frozen=True, rename={"logit_columns": "dealt"}):
    interface: int
    sizes: tuple[int, int]
    tensors: tuple[BundledTensor, ...]
    instructions: bytes
    states: bytes
    widths: tuple[_Count, ...]
    logits: _Count
    logit_columns: tuple[_Count, ...]
    version: int = _VERSION


class _Versions(msgspec.Struct):
    version: int
    interface: int


_SIZES = ctypes.sizeof(lib.TwInstruction), ctypes.sizeof(lib.TwState)


def encode(packed: Packed) -> bytes:
    """Encode the program for its file. The hash of this text identifies the weights."""
    file = _BundleHeader(
        interface=lib.VERSION,
        sizes=_SIZES,
        tensors=packed.tensors,
        instructions=b"".join(map(bytes, packed.instructions)),
        states=b"".join(map(bytes, packed.states)),
        widths=packed.widths,
        logits=packed.logits,
        logit_columns=packed.logit_columns,
    )
    return msgspec.json.encode(file)


def digest_of(packed: Packed) -> bytes:
    """Return a program's SHA-256."""
    return hashlib.sha256(encode(packed)).digest()


def write_packed(packed: Packed, folder: Path) -> None:
    """Write a program into ``folder``.

    Raises:
        NoRoomError: The file cannot be written.
    """
    try:
        (folder / PROGRAM).write_bytes(encode(packed))
    except OSError as error:
        raise NoRoomError(
            f"{folder}: the program cannot be written ({error.strerror}); "
            "allowed: a folder with room for it (TMPDIR, TILEWRIGHT_CACHE)"
        ) from None


def read_packed(folder: Path) -> Packed:
    """Read a program from :func:`write_packed`. The library checks every number on opening.

    Raises:
        CheckpointError: The file is missing, invalid or has another version.
    """
    path = folder / PROGRAM
    try:
        data = read_regular(path)
        found = msgspec.json.decode(data, type=_Versions)
        for what, value, own in (
            ("version", found.version, _VERSION),
            ("version of the native library", found.interface, lib.VERSION),
        ):
            if value != own:
                raise CheckpointError(f"{path}: {what} {value}; allowed: {own}; compile it again")
        file = msgspec.json.decode(data, type=_BundleHeader)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CheckpointError(f"{path}: cannot be read ({reason}); compile it again") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        said = one_line(error)
        raise CheckpointError(f"{path}: not a native program ({said}); compile it again") from None
    is_whole = file.sizes == _SIZES and file.logits < len(file.widths)
    is_whole &= all(each.kind in lib.KINDS for each in file.tensors)
    is_whole &= not len(file.instructions) % _SIZES[0] and not len(file.states) % _SIZES[1]
    states = _structures(lib.TwState, file.states) if is_whole else ()
    instructions = _structures(lib.TwInstruction, file.instructions) if is_whole else ()
    is_whole &= all(
        0 <= each.kind < len(lib.STATES) and 0 <= each.cache < len(lib.CACHES) for each in states
    ) and all(
        0 <= each.op < len(lib.OPS)
        and (lib.OPS[each.op] != "all_reduce" or 0 <= each.function < len(lib.WIRES))
        for each in instructions
    )
    if not is_whole:
        raise CheckpointError(f"{path}: not a native program; compile it again")
    return Packed(file.tensors, instructions, states, file.widths, file.logits, file.logit_columns)


def _structures(kind: type[_Structure], data: bytes) -> tuple[_Structure, ...]:
    size = ctypes.sizeof(kind)
    return tuple(kind.from_buffer_copy(data, at) for at in range(0, len(data), size))


def program_of(
    packed: Packed,
    mapped: Mapped,
    options: CompileOptions,
    *,
    isa: int = -1,
    large_pages: bool = False,
) -> lib.TwProgram:
    """Return the structure for opening an engine.

    Args:
        packed: The program.
        mapped: Its weights.
        options: Compile options.
        isa: Index in `library.ISA_NAMES`. -1: best.
        large_pages: Copy weights to large pages, except the embedding.
    """
    tensors = [
        lib.TwTensor(
            kind=lib.KINDS.index(each.kind),
            rows=each.rows,
            columns=each.columns,
            data=mapped.address(index),
            num_bytes=each.num_bytes,
        )
        for index, each in enumerate(packed.tensors)
    ]
    return lib.TwProgram(
        size=ctypes.sizeof(lib.TwProgram),
        version=lib.VERSION,
        instruction_size=ctypes.sizeof(lib.TwInstruction),
        tensor_size=ctypes.sizeof(lib.TwTensor),
        num_threads=options.num_threads or 1,
        isa=isa,
        max_num_seqs=options.max_batch,
        max_context=options.max_context,
        max_tokens=MAX_TOKENS,
        num_instructions=len(packed.instructions),
        num_tensors=len(tensors),
        num_buffers=len(packed.widths),
        num_states=len(packed.states),
        logits=packed.logits,
        large_pages=2 if large_pages else 0,
        instructions=_array(lib.TwInstruction, packed.instructions),
        tensors=_array(lib.TwTensor, tensors),
        widths=(ctypes.c_int32 * len(packed.widths))(*packed.widths),
        states=_array(lib.TwState, packed.states),
    )


_Any = TypeVar("_Any", bound=ctypes.Structure)


def _array(kind: type[_Any], each: Sequence[_Any]) -> ctypes.Array[_Any]:
    return (kind * len(each))(*each)
