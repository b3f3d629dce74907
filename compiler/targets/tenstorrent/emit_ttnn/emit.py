"""Emission of a prefill and a decode program as one Python file for `ttnn` 0.81.

Layers with different formats and fidelities share one function, with a table of the differences.
The file contains no text from a checkpoint or tokenizer. Its weights are separate files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.ir.recipe import load_dense
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.tenstorrent.emit_ttnn.lines import (
    Marks,
    SourceLine,
    mark_of,
    quoted,
)
from tilewright.compiler.targets.tenstorrent.emit_ttnn.mixer_text import helpers
from tilewright.compiler.targets.tenstorrent.emit_ttnn.ops import InstructionLines
from tilewright.compiler.targets.tenstorrent.emit_ttnn.steps import MAIN, STEPS
from tilewright.compiler.targets.tenstorrent.emit_ttnn.text import (
    IMPORTS,
    PLACES,
    WEIGHT_CLASS,
    WEIGHTS,
)
from tilewright.compiler.targets.tenstorrent.emit_ttnn.weights import (
    Lines,
    constants,
    fidelities,
    header,
    kinds_text,
    layer_weights_text,
    outside_text,
    owned_weights,
    weight_lines,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    PREFILL,
    DeviceProgram,
    Rotate,
    TtAttention,
)
from tilewright.compiler.targets.tenstorrent.program.placement import PAGE, key_chunk
from tilewright.errors import CompileError


def emit_ttnn(prefill: DeviceProgram, decode: DeviceProgram, *, title: str = "") -> str:
    """Return the source text for a ttnn file with both programs.

    ``title`` becomes a comment in the file.

    Raises:
        CompileError: ttnn does not support the programs. Prompts must be whole chunks, and sizes
            must be tile multiples.
    """
    assert (prefill.phase, decode.phase) == (PREFILL, DECODE)
    _check(prefill, decode)
    tables = _Tables()
    stacks = [_Stack(program) for program in (prefill, decode)]
    weights, shares = weight_lines(prefill, decode, lambda layer: _prefix(decode, layer))
    groups = _equal_layers(*(stack.layers for stack in stacks), _by_number(weights))
    steps = [_functions(stack, groups, tables) for stack in stacks]
    outside = outside_text(_Tables().merge([0], *_columns([weights[None]])), shares)
    layers = layer_weights_text(groups, weights, tables.merge)
    num_layers = sum(map(len, groups))
    parts = [
        header(prefill, decode, title),
        IMPORTS + "\n" + constants(prefill, decode, _prefix(decode, 0)),
        PLACES,
        fidelities(prefill, decode),
        WEIGHT_CLASS,
        outside,
        kinds_text(tables.rows, num_layers),
        layers,
        WEIGHTS,
        STEPS,
        helpers("".join(steps)),
        *steps,
        MAIN,
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts if part)


def prompt_length(context: int) -> int:
    """Return the prompt tokens in a prefill step, for users with ``context`` positions.

    The result is at most four attention chunks. If possible, the pages contain a whole number of
    prefill steps.
    """
    chunk = key_chunk(context)
    room = -(-context // PAGE) * PAGE
    fitting = [count for count in (4, 3, 2) if room % (count * chunk) == 0]
    return chunk * (fitting[0] if fitting else 1)


def write_weights(decode: DeviceProgram, get: Callable[[str], Tensor], folder: Path) -> None:
    """Write the weights that the file reads: unsharded ``[in, out]`` tensors, one safetensors file
    a layer.

    The type is bfloat16 if exact, else float32. Only the emitted file rounds to block formats.

    Raises:
        CheckpointError: ``get`` cannot read a tensor.
        NoRoomError: The directory cannot be written.
    """
    for layer, group in itertools.groupby(owned_weights(decode), key=lambda each: each[0]):
        tensors = {}
        for _, weight in group:
            dense = load_dense(weight.recipe, get)
            if dense.ndim == 3 and not weight.num_experts:
                dense = dense.squeeze(1)  # a convolution
            dense = dense.mT.contiguous() if weight.transposed else dense
            narrow = dense.to(torch.bfloat16)
            tensors[weight.name] = narrow if torch.equal(narrow.float(), dense) else dense
        stem = "outside" if layer is None else f"layer_{layer:03}"
        save_tensors(tensors, folder / f"{stem}.safetensors")


# -- checks ------------------------------------------------------------------------------------


def _check(prefill: DeviceProgram, decode: DeviceProgram) -> None:
    assert decode.batch <= TILE, "a decode step is one tile of rows"
    attention = next(each for each in prefill.instructions if isinstance(each, TtAttention))
    chunk = max(attention.k_chunk, attention.keys.page)
    if prefill.length % chunk or prefill.length <= TILE:
        raise CompileError(
            f"prompts of {prefill.length} tokens at a time; allowed in a ttnn file: multiples of "
            f"{chunk} above {TILE}"
        )
    if prefill.length > _capacity(decode):
        raise CompileError(
            f"prompts of {prefill.length} tokens at a time and a cache of {_capacity(decode)}; "
            "allowed in a ttnn file: at most the cache's"
        )
    rotations = [each for each in decode.instructions if isinstance(each, Rotate)]
    for each in rotations:
        width = 2 * each.frequencies.columns
        if width != each.head_dim and each.interleaved:
            raise CompileError(
                f"{each.fqn}: {width} of {each.head_dim} channels of a head turn by neighbors; "
                "allowed in a ttnn file: all"
            )
        unit = TILE if each.interleaved or width == TILE else 2 * TILE
        if width % unit or each.head_dim % TILE:
            raise CompileError(
                f"{each.fqn}: heads of {each.head_dim}, of which {width} turn; allowed in a ttnn "
                f"file: 32, or multiples of {unit}"
            )
    if {w.name: w.format for w in prefill.weights} != {w.name: w.format for w in decode.weights}:
        raise AssertionError("both programs read the same weights")


def _capacity(decode: DeviceProgram) -> int:
    """Return the position count in a user's pages."""
    cache = decode.caches[0]
    return cache.num_pages // decode.batch * cache.page


# -- layers ------------------------------------------------------------------------------------


class _Tables:
    """Differences between layers: ``TABLE[layer][name]``. Equal text has no entry."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, str]] = {}

    def merge(
        self,
        layers: Sequence[int],
        marks: Sequence[Marks],
        lines: Sequence[Sequence[SourceLine]],
    ) -> list[str]:
        """Return common lines for ``layers``, with marks filled in."""
        needed = [any(each[i].is_needed for each in lines) for i in range(len(lines[0]))]
        kept = [line.text for line, is_needed in zip(lines[0], needed, strict=True) if is_needed]
        return [self._filled(text, layers, marks) for text in kept]

    def _filled(self, text: str, layers: Sequence[int], marks: Sequence[Marks]) -> str:
        for name in marks[0].found:
            mark = mark_of(name)
            if mark not in text:
                continue
            found = [each.found[name] for each in marks]
            if len(set(found)) == 1:
                text = text.replace(mark, found[0])
                continue
            text = text.replace(mark, f"t[{quoted(name)}]")
            for layer, value in zip(layers, found, strict=True):
                self.rows.setdefault(layer, {})[name] = value
        return text


def _sections(program: DeviceProgram) -> list[tuple[int | None, list[int]]]:
    """Return consecutive instruction indices by layer. The layer is None outside the layers."""
    found: list[tuple[int | None, list[int]]] = []
    for index, each in enumerate(program.instructions):
        if found and found[-1][0] == each.layer:
            found[-1][1].append(index)
        else:
            found.append((each.layer, [index]))
    layers = [layer for layer, _ in found if layer is not None]
    if layers != list(range(len(layers))) or found[0][0] is not None or found[-1][0] is not None:
        raise CompileError("layers are not one behind the other; allowed in a ttnn file: a stack")
    return found


def _layer_prefix(fqn: str, layer: int) -> str:
    """Return the common name prefix in a layer, for example ``model.layers.3.``."""
    parts = fqn.split(".")
    return ".".join(parts[: parts.index(str(layer)) + 1]) + "."


def _prefix(program: DeviceProgram, layer: int) -> str:
    fqn = next(each.fqn for each in program.instructions if each.layer == layer)
    return _layer_prefix(fqn, layer)


class _Stack:
    """Lines before the layers, for every layer, and after the layers."""

    def __init__(self, program: DeviceProgram) -> None:
        writer = InstructionLines(program)
        self.phase = program.phase
        self.before: list[str] = []
        self.after: list[str] = []
        self.layers: list[tuple[Marks, list[SourceLine]]] = []
        for layer, indices in _sections(program):
            writer.start("" if layer is None else _prefix(program, layer))
            for index in indices:
                writer.write(index)
            if indices[-1] + 1 < len(program.instructions):
                writer.end()
            if layer is not None:
                self.layers.append((writer.marks, writer.lines))
            else:
                text = _Tables().merge([0], [writer.marks], [writer.lines])
                (self.after if self.layers else self.before).extend(text)
        self.result = writer.result()


def _equal_layers(*lines: Sequence[tuple[Marks, list[SourceLine]]]) -> list[list[int]]:
    """Return groups of layers with equal lines. Marks may differ."""
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for layer in range(len(lines[0])):
        text = tuple(tuple(line.text for line in each[layer][1]) for each in lines)
        groups.setdefault(text, []).append(layer)
    return list(groups.values())


def _by_number(lines: Lines) -> list[tuple[Marks, list[SourceLine]]]:
    return [lines[layer] for layer in sorted(each for each in lines if each is not None)]


def _columns(
    lines: Sequence[tuple[Marks, list[SourceLine]]],
) -> tuple[list[Marks], list[list[SourceLine]]]:
    return [marks for marks, _ in lines], [text for _, text in lines]


def _functions(stack: _Stack, groups: Sequence[Sequence[int]], tables: _Tables) -> str:
    """Return the source for ``prefill`` or ``decode`` and its layer functions."""
    step = "DecodeStep" if stack.phase == DECODE else "PromptStep"
    name = stack.phase
    whose = "the next tokens of all users" if name == DECODE else "LENGTH tokens of one user"
    names = [f"{name}_layer"]
    if len(groups) > 1:
        names = [f"{name}_layer_{number}" for number in range(len(groups))]
    made = []
    for group, function in zip(groups, names, strict=True):
        body = tables.merge(group, *_columns([stack.layers[layer] for layer in group]))
        prologue = ["t = TABLE[layer]"] if any("t[" in line for line in body) else []
        title = f'"""One layer over {whose}."""'
        made.append(
            f"def {function}(layer: int, w: dict, caches: dict, x: ttnn.Tensor, step: {step}):\n"
            + _indented([title, *prologue, *body, "return x"], 1)
        )
    run, choice = names[0], []
    if len(groups) > 1:
        order = {layer: number for number, group in enumerate(groups) for layer in group}
        run, kinds = "run", [order[layer] for layer in sorted(order)]
        choice = [f"    run = ({', '.join(names)})[{kinds}[layer]]"]
    body = [
        f'"""Logits [1, 1, 32, VOCAB and padding] behind {whose}."""',
        "w = model.outside",
        *stack.before,
        "for layer in range(NUM_LAYERS):",
        *choice,
        f"    x = {run}(layer, model.layers[layer], model.caches[layer], x, step)",
        *stack.after,
        f"return {stack.result}",
    ]
    made.append(f"def {name}(model: Model, step: {step}) -> ttnn.Tensor:\n" + _indented(body, 1))
    return "\n\n".join(made)


def _indented(lines: list[str], depth: int) -> str:
    inner = "\n".join(lines).split("\n")
    return "".join(f"{'    ' * depth}{line}\n" if line else "\n" for line in inner)
