"""Writes engine.py: a header and the parts, around a plan.

Unused definitions are omitted, so that the file has only its program's kernels.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.compiler import __version__
from tilewright.compiler.targets.cuda.engine_generator.parts.native import sources
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Choices,
    HybridPlan,
    NativeChoices,
    Plan,
)

_PARTS = Path(__file__).with_name("parts")
_SECTIONS = {
    "plan": "Instructions",
    "generated": "The plan of this engine, made from the typed program",
    "settings": "Configuration",
    "weights": "Weights",
    "steps": "The walk over the plan",
    "torch_steps": "On a CPU",
    "pages": "Memory of requests on a GPU",
    "kernels": "Kernels",
    "cuda_source": "Kernels of products of few rows",
    "products": "Products of few rows",
    "mixer_kernels": "Kernels of mixers",
    "launches": "What an instruction launches",
    "cuda_steps": "On a GPU",
    "../../kernels/attention/split": "How attention is shared out",
    "../../kernels/attention/attention": "What attention's kernel is handed",
    "../../kernels/experts/route": "What a router's kernel is handed",
    "../../kernels/experts/experts": "What kernels of experts are handed",
    "../../kernels/delta_rule/delta_step": "How linear attention is cut into blocks",
    "native": "Kernels in CUDA C++, and what launches them",
    "engine": "The engine",
    "reference": "The reference",
    "family": "The model",
    "self_test": "The check",
}
_NATIVE = {
    "../../kernels/attention/split": ("choose_share", "num_parts", "SHORT_PAGES", "MOST_SPLITS"),
    "../../kernels/attention/attention": ("_AttentionParams", "_shared_bytes", "_WARPS"),
    "../../kernels/experts/route": ("RouteArguments",),
    "../../kernels/experts/experts": ("_ExpertsParams", "_WeightParams"),
    "../../kernels/delta_rule/delta_step": ("_DeltaStep", "columns_of_a_block"),
    "native": (),
}
"""Sections of files with `NativeChoices` only, with the definitions of other modules."""
_NOTED = ("kernels", "mixer_kernels")
"""Sections with the docstrings of their parts."""
_PRODUCTS = {"triton": "TritonProducts", "cuda": "CudaProducts"}
_ROOTS = ("create_engine", "Engine", "main", "PLAN", "CHOICES", "FAMILY")
_CHOICES = "@dataclass(frozen=True)\nclass Choices"
_HEADER = '''"""An engine for {title}.

Written by Tilewright {version}, from the typed program of this model: {layers} layers that
run the instructions of PLAN below in order. It needs torch, and Triton on a GPU. It does not need
Tilewright.

    engine = create_engine(model_config, weight_dir, device="cuda")   # or "cpu"
    logits = engine.prefill([7, 8], [tokens_of_7, tokens_of_8])       # [2, vocab]: last tokens'
    logits = engine.decode([8, 7], torch.tensor([12, 34]))            # one more token each
    engine.remove([7])

It accepts all sizes of a configuration in this form. It computes in float16 (bfloat16 if
``torch_dtype`` requests it) on a GPU and in float32 on a CPU, and rounds as plain torch does.
Compare it with the eager reference at the end of the file:

    python engine.py --self-test [--config model_config.json --weights FOLDER] [--device cpu]
"""
'''


def engine_text(plan: Plan, choices: Choices, *, title: str, num_layers: int) -> str:
    """Return a complete engine.py. ``title``: model name. ``num_layers``: its layers."""
    is_native = isinstance(choices, NativeChoices)
    names = [name for name in _SECTIONS if is_native or name not in _NATIVE]
    texts = {name: (_PARTS / f"{name}.py").read_text(encoding="utf-8") for name in names}
    bodies = {name: _body(text) for name, text in texts.items()}
    for name, taken in _NATIVE.items():
        if taken and name in bodies:
            kept = _reached([piece.text for piece in bodies[name]], taken)
            bodies[name] = [piece for piece in bodies[name] if piece.text in kept]
    bodies = _with_own_names(bodies)
    made = f"PLAN = {_literal(plan)}", f"CHOICES = {_literal(choices)}"
    bodies["generated"] = [_SourceDefinition(made[0], 1), _SourceDefinition(made[1], 1)]
    family = "HYBRID" if isinstance(plan, HybridPlan) else "LLAMA"
    replaced = {"SMALL_M": f"SMALL_M = {_PRODUCTS[choices.products]}()"}
    if isinstance(choices, NativeChoices):
        bases = ", ".join(_bases(family, choices.native))
        replaced["SOURCES ="] = _sources_text(choices.native)
        replaced["class NativeExecutor"] = (
            f'class NativeExecutor({bases}):\n    """Steps on a GPU."""'
        )
        family = f"replace({family}, on_gpu=NativeExecutor)"
    replaced["FAMILY ="] = f"FAMILY = {family}"
    for name, body in bodies.items():
        bodies[name] = [_replaced(piece, replaced) for piece in body]
    kept = _reached([piece.text for body in bodies.values() for piece in body])
    used = "\n".join(kept)
    bodies["plan"] = [_with_fields(piece, choices, used) for piece in bodies["plan"]]
    kept |= {piece.text for piece in bodies["plan"] if piece.text.startswith(_CHOICES)}
    sections = []
    for name in bodies:
        body = [piece for piece in bodies[name] if piece.text in kept]
        if not body:
            continue
        note = _comment(texts[name]) if name in _NOTED else ""
        shown = [replace(piece, text=_first_paragraphs(piece.text)) for piece in body]
        heading = f"# {'-' * 8} {_SECTIONS[name]} ".ljust(100, "-")
        sections.append(f"{heading}{note}{_joined(shown)}")
    imports = _imports(texts.values(), "\n".join(sections))
    ending = 'if __name__ == "__main__":\n    sys.exit(main())\n'
    first, *others = sections
    header = _HEADER.format(title=title, version=__version__, layers=num_layers)
    begin = f"{header}\n{imports}\n\n\n{first}"
    return "\n\n\n".join((begin, *others, ending))


@dataclass(frozen=True)
class _SourceDefinition:
    """A definition with decorators, comments and docstring. ``gap``: empty lines before it."""

    text: str
    gap: int


def _with_own_names(
    bodies: dict[str, list[_SourceDefinition]],
) -> dict[str, list[_SourceDefinition]]:
    """Rename an included module's names if an earlier section binds them too."""
    bound: set[str] = set()
    renamed = {}
    for section, body in bodies.items():
        names = {name for piece in body for name in _defined(ast.parse(piece.text).body)}
        for name in sorted(names & bound):
            assert section in _NATIVE and section != "native", f"{section}: {name} is bound twice"
            own = f"{Path(section).name.upper()}_{name.lstrip('_')}"
            body = [replace(p, text=re.sub(rf"\b{name}\b", own, p.text)) for p in body]
        renamed[section] = body
        bound |= names
    return renamed


def _with_fields(piece: _SourceDefinition, choices: Choices, used: str) -> _SourceDefinition:
    """Return `Choices` without unread fields at their defaults."""
    if not piece.text.startswith(_CHOICES):
        return piece
    usual = {each.name: each.default for each in dataclasses.fields(Choices)}
    unread = [name for name in usual if f"CHOICES.{name}" not in used]
    dropped = tuple(f"    {n}: " for n in unread if getattr(choices, n) == usual[n])
    lines = [line for line in piece.text.splitlines() if not line.startswith(dropped)]
    return _SourceDefinition("\n".join(lines), piece.gap)


def _sources_text(native: tuple[str, ...]) -> str:
    """Return the sources for some choices as a constant."""
    found = (f'    "{name}": r"""\n{text}""",\n' for name, text in sources(native).items())
    return f"SOURCES = {{\n{''.join(found)}}}"


def _bases(family: str, native: tuple[str, ...]) -> tuple[str, ...]:
    """Return the base classes for an executor with the kernels for some choices."""
    known = {
        "attention": "NativeAttention",
        "experts": "NativeExperts",
        "delta": "NativeDelta",
    }
    last = "HybridCudaExecutor" if family == "HYBRID" else "CudaExecutor"
    return (*(each for name, each in known.items() if name in native), last)


def _replaced(piece: _SourceDefinition, texts: Mapping[str, str]) -> _SourceDefinition:
    """Return the replacement for a definition by its beginning, or the definition."""
    text = next((text for begin, text in texts.items() if piece.text.startswith(begin)), piece.text)
    return replace(piece, text=text)


def _body(source: str) -> list[_SourceDefinition]:
    """Return a part's definitions."""
    lines, found = source.splitlines(), list[_SourceDefinition]()
    nodes = ast.parse(source).body
    for index, node in enumerate(nodes):
        if isinstance(node, ast.Import | ast.ImportFrom) or (_is_text(node) and index == 0):
            continue
        stop = node.end_lineno
        if _is_text(node):  # documentation of the name above
            said = "\n".join(lines[node.lineno - 1 : stop])
            found[-1] = _SourceDefinition(f"{found[-1].text}\n{said}", found[-1].gap)
            continue
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        while start > 1 and lines[start - 2].startswith("#"):
            start -= 1
        gap = next(n for n in range(3) if n == 2 or lines[start - 2 - n])
        found.append(_SourceDefinition("\n".join(lines[start - 1 : stop]), gap))
    return found


def _first_paragraphs(text: str) -> str:
    """Cut docstrings after the first paragraph, except in `create_engine`."""
    lines, tree = text.splitlines(), ast.parse(text)
    kinds = ast.ClassDef | ast.FunctionDef
    nodes = [each for each in ast.walk(tree) if isinstance(each, kinds)]
    if not nodes or nodes[0].name == "create_engine":
        return text
    for node in sorted(nodes, key=lambda each: each.lineno, reverse=True):
        said = node.body[0]
        if _is_text(said) and said.end_lineno and "" in lines[said.lineno - 1 : said.end_lineno]:
            stop = lines.index("", said.lineno - 1)
            last = lines[stop - 1] + '"""'
            ending = (
                [last] if len(last) <= 100 else [lines[stop - 1], " " * said.col_offset + '"""']
            )
            lines[stop - 1 : said.end_lineno] = ending
    return "\n".join(lines)


def _joined(body: Iterable[_SourceDefinition]) -> str:
    """Join definitions after a heading, with the formatter's distances."""
    text, was_block = "", False
    for each in body:
        is_block = each.text.startswith(("def ", "class ", "@", "async "))
        gap = 0 if not text else 2 if is_block or was_block else each.gap
        text += "\n" * (gap + 1) + each.text
        was_block = is_block
    return text


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _reached(texts: Iterable[str], roots: Iterable[str] = _ROOTS) -> set[str]:
    """Return the definitions that the roots use, directly or indirectly."""
    by_name: dict[str, list[str]] = {}
    for text in texts:
        for name in _defined(ast.parse(text).body):
            by_name.setdefault(name, []).append(text)
    kept: set[str] = set()
    waiting = [text for root in roots for text in by_name[root]]
    while waiting:
        text = waiting.pop()
        if text not in kept:
            kept.add(text)
            waiting += [other for name in _read(text) for other in by_name.get(name, [])]
    return kept


def _defined(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that top-level statements bind."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Try):
            found |= _defined([*node.body, *(each for h in node.handlers for each in h.body)])
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            inside = (each for each in ast.walk(node) if isinstance(each, ast.comprehension))
            own = {id(x) for each in inside for x in ast.walk(each.target)}
            names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            stored = (each for each in names if isinstance(each.ctx, ast.Store))
            found |= {each.id for each in stored if id(each) not in own}
    return found


def _read(text: str) -> set[str]:
    """Return every name in a definition, with annotations."""
    return {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}


def _comment(source: str) -> str:
    """Return a part's docstring as a comment for its heading."""
    said = ast.get_docstring(ast.parse(source)) or ""
    return "\n" + "\n".join(f"# {line}".rstrip() for line in said.splitlines())


def _imports(sources: Iterable[str], text: str) -> str:
    """Return the parts' used imports, standard library first."""
    used = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
    plain, members = set(), dict[str, set[str]]()
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import):
                plain |= {_import_line(each) for each in node.names if _bound(each) in used}
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("tilewright"):
                names = {each.name for each in node.names if each.name in used}
                members.setdefault(str(node.module), set()).update(names)
    plain.add("import sys")
    members = {name: found for name, found in members.items() if found and name != "__future__"}
    lines = [*sorted(plain), *(f"from {m} import {', '.join(sorted(members[m]))}" for m in members)]
    theirs = sorted((x for x in lines if x.split()[1].startswith("torch")), key=_import_order)
    ours = sorted((x for x in lines if x not in theirs), key=_import_order)
    return "\n".join((*ours, "", *theirs))


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


def _import_line(alias: ast.alias) -> str:
    return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _literal(value: Any, indent: int = 0) -> str:
    """Return a dataclass, or a tuple of them, as source. Default fields are omitted."""
    if dataclasses.is_dataclass(value):
        given = [
            f"{each.name}={_literal(getattr(value, each.name), indent + 4)}"
            for each in dataclasses.fields(value)
            if getattr(value, each.name) != each.default
        ]
        start, items, end = f"{type(value).__name__}(", given, ")"
    elif isinstance(value, tuple):
        start, items, end = "(", [_literal(each, indent + 4) for each in value], ")"
    else:
        return repr(value).replace("'", '"')
    short = start + ", ".join(items) + ("," if start == "(" and len(items) == 1 else "") + end
    if len(short) + indent < 88 and "\n" not in short:
        return short
    inner = " " * (indent + 4)
    return start + "".join(f"\n{inner}{each}," for each in items) + "\n" + " " * indent + end
