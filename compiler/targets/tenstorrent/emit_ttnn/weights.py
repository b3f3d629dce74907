"""Header, constants and weight table for an emitted ttnn file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    ComputeConfig,
    DeviceProgram,
    Matmul,
    RmsNorm,
    Rotate,
    TtAttention,
    TtEmbedding,
    TtWeight,
)
from tilewright.compiler.targets.tenstorrent.program.product_blocks import step_blocks

_TRACE_BYTES = 50_000_000

Merge = Callable[[list[Marks], list[list[SourceLine]]], list[str]]


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
    rotate = next(each for each in decode.instructions if isinstance(each, Rotate))
    num_layers = sum(isinstance(each, TtAttention) for each in decode.instructions)
    pages = cache.num_pages // decode.batch
    chips = decode.mesh.num_chips
    is_ring = decode.mesh.columns == 1 and chips > 2
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
        f"FREQUENCIES = {quoted(rotate.frequencies.name)}",
        f"INTERLEAVED = {rotate.interleaved}",
    ]
    return "\n".join(lines)


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
    for each in program.instructions:
        for name in ("table", "weight", "bias", "frequencies"):
            weight = getattr(each, name, None)
            if isinstance(weight, TtWeight):
                shared = isinstance(each, Rotate) or weight in owner
                owner[weight] = None if shared else each.layer
    pairs = [(layer, weight) for weight, layer in owner.items()]
    return iter(sorted(pairs, key=lambda pair: -1 if pair[0] is None else pair[0]))


def weight_tables(
    prefill: DeviceProgram, decode: DeviceProgram, prefix_of: Callable[[int], str], merge: Merge
) -> tuple[str, str]:
    """Return the source text for ``SHARES`` with ``OUTSIDE``, and for the functions with layer
    weights.
    """
    kinds, pieces = _kinds(decode), _pieces(prefill, decode)
    shares: dict[Split, str] = {}
    by_layer: dict[int | None, tuple[Marks, list[SourceLine]]] = {}
    for layer, weight in owned_weights(decode):
        if kinds[weight] == "frequencies":
            continue
        marks, lines = by_layer.setdefault(layer, (Marks(), []))
        tail = weight.name.removeprefix("" if layer is None else prefix_of(layer))
        dtype = marks.put(f"{tail}.dtype", DTYPES[weight.format])
        named = _over(weight, shares)
        if kinds[weight] == "matrix" and weight.name in pieces:
            named += f", pieces={pieces[weight.name]}"
        fields = f"{quoted(kinds[weight])}, {weight.rows}, {weight.columns}, {dtype}{named}"
        lines.append(SourceLine(f"    {quoted(tail)}: Weight({fields}),"))
    for layer, cache in _cache_layers(decode):
        marks, lines = by_layer[layer]
        marks.put(f"{cache[0]}.dtype", DTYPES[cache[1]])
    outside = by_layer.pop(None)
    layers = [by_layer[layer] for layer in sorted(by_layer, key=lambda layer: layer or 0)]
    marks_of = [marks for marks, _ in layers]
    body = merge(marks_of, [lines for _, lines in layers])
    names = [mark_of(f"{kind}.dtype") for kind in ("k", "v")]
    cached = merge(marks_of, [[SourceLine(name) for name in names]] * len(layers))
    text = f"OUTSIDE = {{\n{_joined(merge([outside[0]], [outside[1]]))}\n}}\n"
    if shares:
        runs = "\n".join(f"{name} = {_runs_text(split)}" for split, name in shares.items())
        text = f"# by chip: runs of the whole axis (start, count); from None: zeros\n{runs}\n{text}"
    return text, _layer_functions(body, cached)


def kinds_text(rows: dict[int, dict[str, str]], num_layers: int) -> str:
    """Return the source text for ``TABLE``: the differences between layers. Equal layers share an
    entry.
    """
    if not rows:
        return ""
    found: list[dict[str, str]] = []
    order = []
    for layer in range(num_layers):
        if rows[layer] not in found:
            found.append(rows[layer])
        order.append(found.index(rows[layer]))
    kinds = []
    for row in found:
        inner = "\n".join(f"        {quoted(name)}: {value}," for name, value in row.items())
        kinds.append(f"    {{\n{inner}\n    }},")
    return (
        "# what layers differ in: each kind of layer once, then the kind of every layer\n"
        "KINDS = [\n" + "\n".join(kinds) + "\n]\n"
        f"TABLE = [KINDS[kind] for kind in {order}]"
    )


def _layer_functions(body: list[str], cached: list[str]) -> str:
    prologue = "    t = TABLE[layer]\n"
    weights = "\n".join(f"    {line}" for line in body)
    caches = f'    return {{"k": {cached[0]}, "v": {cached[1]}}}[kind]\n'
    return (
        "def layer_weights(layer: int) -> dict[str, Weight]:\n"
        + (prologue if "t[" in weights else "")
        + f"    return {{\n{weights}\n    }}\n\n\n"
        + "def cache_dtype(layer: int, kind: str):\n"
        + (prologue if "t[" in caches else "")
        + caches
    )


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


def _kinds(program: DeviceProgram) -> dict[TtWeight, str]:
    """Return every weight's role in its operator."""
    kinds = {}
    for each in program.instructions:
        if isinstance(each, TtEmbedding):
            kinds[each.table] = "table"
        elif isinstance(each, RmsNorm):
            kinds[each.weight] = "norm"
        elif isinstance(each, Rotate):
            kinds[each.frequencies] = "frequencies"
        elif isinstance(each, Matmul):
            kinds[each.weight] = "matrix"
            if each.bias is not None:
                kinds[each.bias] = "bias"
    return kinds


def _pieces(*programs: DeviceProgram) -> dict[str, int]:
    """Return the number of matmuls for the LM head, whose blocks fit L1 in both phases."""
    found: dict[str, int] = {}
    for program in programs:
        for each in program.instructions:
            if isinstance(each, Matmul) and each.group == "lm_head":
                blocks = step_blocks(each)
                found[each.weight.name] = max(found.get(each.weight.name, 1), blocks.num_pieces)
    return found


def _cache_layers(program: DeviceProgram) -> Iterator[tuple[int | None, tuple[str, str]]]:
    for each in program.instructions:
        if isinstance(each, TtAttention):
            for cache in (each.keys, each.values):
                yield each.layer, (cache.kind, cache.format)


def _over(weight: TtWeight, shares: dict[Split, str]) -> str:
    """Return source text for the sharding arguments of a weight."""
    text = ""
    for name, over, split, axis in (
        ("rows_over", weight.in_over, weight.in_split, -1),
        ("columns_over", weight.out_over, weight.out_split, 0 if weight.transposed else -1),
    ):
        if over and split is not None:
            count = len(split.shares)
            even = _is_even(split, weight.recipe.shape[axis])
            how = str(count) if even else shares.setdefault(split, f"SHARES_{len(shares) + 1}")
            text += f", {name}=({1 if over == ROWS else 0}, {how})"
    return text


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
