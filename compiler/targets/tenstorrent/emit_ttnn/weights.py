"""Header, constants and weight table for an emitted ttnn file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from tilewright.compiler import __version__
from tilewright.compiler.devices import get_device
from tilewright.compiler.formats import FIDELITIES
from tilewright.compiler.mesh import ROWS, Split
from tilewright.compiler.targets.tenstorrent.emit_ttnn.lines import (
    DTYPES,
    Marks,
    SourceLine,
    mark_of,
    quoted,
)
from tilewright.compiler.targets.tenstorrent.emit_ttnn.ops import rotation_of
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    CausalConv,
    ComputeConfig,
    DeviceProgram,
    ExpertMatmul,
    Matmul,
    RmsNorm,
    Rotate,
    TtAttention,
    TtDeltaRule,
    TtEmbedding,
    TtWeight,
)
from tilewright.compiler.targets.tenstorrent.program.product_blocks import step_blocks

_TRACE_BYTES = 50_000_000

Lines = dict[int | None, tuple[Marks, list[SourceLine]]]
Merge = Callable[[Sequence[int], list[Marks], list[list[SourceLine]]], list[str]]


def header(prefill: DeviceProgram, decode: DeviceProgram, title: str) -> str:
    """Return the header in ASCII: a docstring, and comment lines with the model and the mesh."""
    mesh = f"{decode.mesh.columns} x {decode.mesh.rows}"
    facts = [
        f"mesh {mesh} of {decode.device}, {decode.batch} users of {decode.context} positions",
        f"prompts run {prefill.length} tokens at a time",
    ]
    shown = "".join(each if " " <= each <= "~" else "?" for each in title)
    made = [f"# {line}" for line in ([shown] if shown else []) + facts]
    return "\n".join(
        [
            f'"""A language model as operators of ttnn 0.81, written by Tilewright {__version__}.',
            "",
            "  --run-on-device --tokens '1 2 3'   continues a prompt on the board",
            '"""',
            "",
            *made,
        ]
    )


def constants(prefill: DeviceProgram, decode: DeviceProgram, prefix: str) -> str:
    """Return the file's constants. ``prefix`` is the common name prefix in layer 0."""
    cache = decode.caches[0]
    rotate = next(op for op in decode.instructions if isinstance(op, Rotate))
    num_layers = len({op.layer for op in decode.instructions} - {None})
    pages = cache.num_pages // decode.batch
    chips = decode.mesh.num_chips
    is_ring = decode.mesh.columns == 1 and chips > 2
    rotations = (op for op in decode.instructions if isinstance(op, Rotate))
    facts = dict.fromkeys(rotation_of(op) for op in rotations)
    shown = ", ".join(f"({quoted(name)}, {count}, {factor!r})" for name, count, factor in facts)
    lines = [
        f"MESH = ({decode.mesh.columns}, {decode.mesh.rows})  # chips, as ttnn counts them",
        f"FABRIC = ttnn.FabricConfig.FABRIC_1D{'_RING' if is_ring else ''}",
        f"TOPOLOGY = ttnn.Topology.{'Ring' if is_ring else 'Linear'}",
        f"NUM_BANKS = {get_device(decode.device).num_banks}  # of DRAM, on a chip",
        f"TRACE_BYTES = {_TRACE_BYTES:_}",
        f"NUM_LAYERS = {num_layers}",
        f"NUM_KV_HEADS = {cache.num_heads}  # on a chip",
        f"HEAD_DIM = {cache.head_dim}",
        f"VOCAB = {decode.vocab_size}",
        f"BATCH = {decode.batch}",
        f"LENGTH = {prefill.length}  # tokens of a prompt at a time",
        f"PAGE = {cache.page}  # positions",
        f"PAGES = {pages}  # of a user",
        f"CAPACITY = {pages * cache.page}  # positions of a user",
        f"LAYER = {quoted(prefix.replace('.0.', '.{}.'))}",
        f"ROTATIONS = ({shown},)  # frequencies, count, factor",
        f"STATES = {_states_text(decode)}  # by layer: window and memory of a user",
        f"INTERLEAVED = {rotate.interleaved}",
    ]
    return "\n".join(lines)


def _states_text(decode: DeviceProgram) -> str:
    """Return the states' shapes by layer. Layers without states have a cache."""
    states: dict[int | None, list[tuple[int, ...]]] = {}
    for op in decode.instructions:
        if isinstance(op, CausalConv | TtDeltaRule):
            state = op.window if isinstance(op, CausalConv) else op.memory
            states.setdefault(op.layer, []).append(state.shape)
    return "{" + ", ".join(f"{layer}: {tuple(shapes)}" for layer, shapes in states.items()) + "}"


def fidelities(*programs: DeviceProgram) -> str:
    """Return a compute configuration for every fidelity in use."""
    computes = (getattr(i, "compute", None) for p in programs for i in p.instructions)
    used = {each.name for each in computes if isinstance(each, ComputeConfig)}
    lines = []
    for name in FIDELITIES:
        if name in used:
            spec = FIDELITIES[name]
            math = "LoFi" if spec.num_phases == 1 else f"HiFi{spec.num_phases}"
            lines.append(
                f"{name.upper()} = fidelity(ttnn.MathFidelity.{math}, approx={spec.approx}, "
                f"fp32_dest={spec.fp32_dest}, l1_acc={spec.packer_l1_acc})"
            )
    return "\n".join(lines)


def owned_weights(program: DeviceProgram) -> Iterator[tuple[int | None, TtWeight]]:
    """Yield every weight once with its layer. Weights without a layer are first."""
    owner: dict[TtWeight, int | None] = {}
    for op in program.instructions:
        for name in ("table", "weight", "bias", "frequencies", "sinks", "a_log", "dt_bias"):
            weight = getattr(op, name, None)
            if isinstance(weight, TtWeight):
                shared = isinstance(op, Rotate) or weight in owner
                owner[weight] = None if shared else op.layer
    pairs = [(layer, weight) for weight, layer in owner.items()]
    return iter(sorted(pairs, key=lambda pair: -1 if pair[0] is None else pair[0]))


def weight_lines(
    prefill: DeviceProgram, decode: DeviceProgram, prefix_of: Callable[[int], str]
) -> tuple[Lines, dict[Split, str]]:
    """Return the lines for every layer's weights, and the uneven split names."""
    kinds, pieces = _kinds(decode), _pieces(prefill, decode)
    shares: dict[Split, str] = {}
    by_layer: Lines = {}
    for layer, weight in owned_weights(decode):
        if kinds[weight] == "frequencies":
            continue
        marks, lines = by_layer.setdefault(layer, (Marks(), []))
        tail = weight.name.removeprefix("" if layer is None else prefix_of(layer))
        dtype = marks.put(f"{tail}.dtype", DTYPES[weight.format])
        named = _over(weight, shares)
        if kinds[weight] == "matrix" and weight.name in pieces:
            named += f", pieces={pieces[weight.name]}"
        if weight.num_experts:
            named += f", experts={weight.num_experts}"
        fields = f"{quoted(kinds[weight])}, {weight.rows}, {weight.columns}, {dtype}{named}"
        lines.append(SourceLine(f"    {quoted(tail)}: Weight({fields}),"))
    for layer, cache in _cache_layers(decode):
        marks, lines = by_layer[layer]
        marks.put(f"{cache[0]}.dtype", DTYPES[cache[1]])
    return by_layer, shares


def outside_text(lines: list[str], shares: dict[Split, str]) -> str:
    """Return the source text for ``SHARES`` and ``OUTSIDE``, the weights outside the layers."""
    text = f"OUTSIDE = {{\n{_joined(lines)}\n}}\n"
    if shares:
        runs = "\n".join(f"{name} = {_runs_text(split)}" for split, name in shares.items())
        text = f"# by chip: runs of the whole axis (start, count); from None: zeros\n{runs}\n{text}"
    return text


def layer_weights_text(groups: Sequence[Sequence[int]], by_layer: Lines, merge: Merge) -> str:
    """Return the source text for the functions with layer weights.

    ``groups`` are the layers with equal lines.
    """
    names = [SourceLine(mark_of(f"{kind}.dtype")) for kind in ("k", "v")]
    bodies: list[list[str]] = []
    cached: list[tuple[Sequence[int], list[str]]] = []
    for group in groups:
        marks = [by_layer[layer][0] for layer in group]
        bodies.append(merge(group, marks, [by_layer[layer][1] for layer in group]))
        if "k.dtype" in marks[0].found:
            cached.append((group, merge(group, marks, [names] * len(group))))
    return _layer_functions(groups, bodies, cached)


def kinds_text(rows: dict[int, dict[str, str]], num_layers: int) -> str:
    """Return the source text for ``TABLE``: the differences between layers. Equal layers share an
    entry.
    """
    if not rows:
        return ""
    found: list[dict[str, str]] = []
    order = []
    for layer in range(num_layers):
        entry = rows.get(layer, {})
        if entry not in found:
            found.append(entry)
        order.append(found.index(entry))
    kinds = []
    for entry in found:
        inner = "\n".join(f"        {quoted(name)}: {value}," for name, value in entry.items())
        kinds.append(f"    {{\n{inner}\n    }},")
    return (
        "# what layers differ in: each kind of layer once, then the kind of every layer\n"
        "KINDS = [\n" + "\n".join(kinds) + "\n]\n"
        f"TABLE = [KINDS[kind] for kind in {order}]"
    )


def _layer_functions(
    groups: Sequence[Sequence[int]],
    bodies: Sequence[list[str]],
    cached: Sequence[tuple[Sequence[int], list[str]]],
) -> str:
    prologue = "    t = TABLE[layer]\n"
    weights = []
    for group, body in zip(groups, bodies, strict=True):
        lines = "\n".join(f"    {line}" for line in body)
        if len(groups) > 1:
            lines = textwrap.indent(f"    return {{\n{lines}\n    }}", "    ")
            weights.append(f"    if layer in {shown_layers(group)}:\n{lines}\n")
        else:
            weights.append(f"    return {{\n{lines}\n    }}\n")
    if len(groups) > 1:
        weights.append("    raise IndexError(layer)\n")
    caches = "".join(
        (f"    if layer in {shown_layers(group)}:\n    " if len(cached) > 1 else "")
        + f'    return {{"k": {names[0]}, "v": {names[1]}}}[kind]\n'
        for group, names in cached
    )
    if len(cached) > 1:
        caches += "    raise IndexError(layer)\n"
    inner = "".join(weights)
    return (
        "def layer_weights(layer: int) -> dict[str, Weight]:\n"
        + (prologue if "t[" in inner else "")
        + inner
        + "\n\ndef cache_dtype(layer: int, kind: str):\n"
        + (prologue if "t[" in caches else "")
        + caches
    )


def shown_layers(group: Sequence[int]) -> str:
    """Return a tuple or a layer range as source text."""
    step = group[1] - group[0] if len(group) > 1 else 1
    if len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1, step)):
        return f"range({group[0]}, {group[-1] + 1}" + (f", {step})" if step > 1 else ")")
    return f"({', '.join(map(str, group))},)"


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


def _kinds(program: DeviceProgram) -> dict[TtWeight, str]:
    """Return every weight's role in its operator."""
    kinds = {}
    for op in program.instructions:
        if isinstance(op, TtEmbedding):
            kinds[op.table] = "table"
        elif isinstance(op, RmsNorm):
            kinds[op.weight] = "norm"
        elif isinstance(op, Rotate):
            kinds[op.frequencies] = "frequencies"
        elif isinstance(op, Matmul | ExpertMatmul):
            is_plain = isinstance(op, Matmul)
            kinds[op.weight] = "matrix" if is_plain else "experts"
            if op.bias is not None:
                kinds[op.bias] = "bias" if is_plain else "experts"
        elif isinstance(op, CausalConv):
            kinds[op.weight] = "taps"
        elif isinstance(op, TtDeltaRule):
            kinds |= {op.a_log: "bias", op.dt_bias: "bias"}
        elif isinstance(op, TtAttention) and op.sinks is not None:
            kinds[op.sinks] = "sinks"
    return kinds


def _pieces(*programs: DeviceProgram) -> dict[str, int]:
    """Return the matmul count for the LM head, whose blocks fit L1 in both phases."""
    pieces: dict[str, int] = {}
    for program in programs:
        for op in program.instructions:
            if isinstance(op, Matmul) and op.group == "lm_head":
                blocks = step_blocks(op)
                pieces[op.weight.name] = max(pieces.get(op.weight.name, 1), blocks.num_pieces)
    return pieces


def _cache_layers(program: DeviceProgram) -> Iterator[tuple[int | None, tuple[str, str]]]:
    for op in program.instructions:
        if isinstance(op, TtAttention):
            for cache in (op.keys, op.values):
                yield op.layer, (cache.kind, cache.format)


def _over(weight: TtWeight, shares: dict[Split, str]) -> str:
    """Return source text for a weight's sharding arguments."""
    text = ""
    for name, over, split, axis in (
        ("experts_over", weight.expert_over, weight.expert_split, 0),
        ("rows_over", weight.in_over, weight.in_split, -1),
        ("columns_over", weight.out_over, weight.out_split, _out_axis(weight)),
    ):
        if over and split is not None:
            count = len(split.shares)
            even = _is_even(split, weight.recipe.shape[axis])
            how = str(count) if even else shares.setdefault(split, f"SHARES_{len(shares) + 1}")
            text += f", {name}=({1 if over == ROWS else 0}, {how})"
    return text


def _out_axis(weight: TtWeight) -> int:
    """Return the outputs' axis in the recipe: ``[out, in]``, or a convolution's channels."""
    return 0 if weight.transposed else -1


def _is_even(split: Split, size: int) -> bool:
    """Return whether the shards have equal sizes and are consecutive."""
    runs = [_merged(share) for share in _pairs(split)]
    expected = [[(rank * split.size, split.size)] for rank in range(len(runs))]
    return runs == expected and size == split.size * len(runs)


def _pairs(split: Split) -> list[list[tuple[int | None, int]]]:
    return [[(run.start, run.count) for run in share] for share in split.shares]


def _merged(share: list[tuple[int | None, int]]) -> list[tuple[int | None, int]]:
    """Return a shard with consecutive runs merged."""
    found: list[tuple[int | None, int]] = []
    for start, count in share:
        if found:
            last, size = found[-1]
            if (last is None and start is None) or (last is not None and start == last + size):
                found[-1] = (last, size + count)
                continue
        found.append((start, count))
    return found


def _runs_text(split: Split) -> str:
    rows = "".join(f"    {tuple(_merged(share))},\n" for share in _pairs(split))
    return f"(\n{rows})"
