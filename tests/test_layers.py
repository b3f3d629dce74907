"""Rules without a linter: imports, lengths and names.

A check is a function from a module's name and source to complaints. Each check is first tested with
an invalid source.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Bottom to top. A module imports from its own layer and from lower layers.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("utils",),
    ("images",),
    ("compiler.formats",),
    ("compiler.mesh", "compiler.devices"),
    ("distributed",),
    ("compiler.precision",),
    ("compiler.sampling",),
    ("compiler.ops",),
    ("compiler.ir",),
    ("compiler.repeated_layers",),
    ("compiler.tracer",),
    ("compiler.passes",),
    ("compiler.targets",),
    ("compiler.driver",),
    ("compiler.calibration",),
    ("compiler.artifacts",),
    ("runtime",),
    ("options",),
    ("loading", "api"),
    ("llm",),
    ("evaluate",),
    ("serve",),
    ("batch",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Exceptions: ``files``, because checkpoints are opened as carefully as all files, and ``formats``,
# because stored types are defined there.
MODELS_MAY_IMPORT = ("compiler.ops", "errors", "utils", "images", "compiler.formats")
SEES_MODELS = (
    "tilewright.models",
    "tilewright.options",
    "tilewright.loading",
    "tilewright.api",
    "tilewright.llm",
    "tilewright.cli",
    "bench",
)

# Optional libraries, and the only modules that import them.
ONLY_IN = {
    "triton": (
        "tilewright.compiler.targets.cuda",
        "tilewright.compiler.targets.tenstorrent",
        "bench.kernels",
    ),
    "numba": ("tilewright.compiler.targets.tenstorrent",),
    "llvmlite": ("tilewright.compiler.targets.tenstorrent",),
    "cuda": ("tilewright.compiler.targets.cuda",),
    "onnxruntime": ("tilewright.compiler.targets.cpu",),
    "onnx": ("tilewright.compiler.targets.cpu",),
    "torch_mlir": ("tilewright.compiler.ir.mlir",),
    "ttnn": ("tilewright.compiler.targets.tenstorrent",),
    "transformers": (),
    "matplotlib": (
        "tilewright.evaluate",
        "tilewright.evaluate.sweep",
        "tilewright.cli.sweep.report",
    ),
    "textual": ("tilewright.cli.sweep",),
    "PIL": ("tilewright.images",),
    "aiohttp": ("tilewright.serve", "tilewright.evaluate.load", "demo.serve_ray"),
    "uvloop": ("tilewright.serve",),
    "zmq": ("tilewright.serve",),
    "prometheus_client": ("tilewright.serve",),
    "llguidance": ("tilewright.runtime.grammar.matchers",),
    "pyarrow": ("tilewright.batch.parquet_rows",),
    "ray": ("tilewright.cli.processes.batch_ray", "demo.serve_ray"),
    "gguf": ("bench.baselines",),
    "onnxruntime_genai": ("bench.baselines",),
    "openvino_genai": ("bench.baselines",),
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

UNFORMATTED = {
    f"compiler/targets/cuda/engine_generator/parts/{name}.py": "generated files have a line limit"
    for name in ("kernels", "mixer_kernels")
}
"""Files with calls in a dense form, each with its reason."""
_MARK = "# fmt: " + "skip"


# Import names for the top directories.
PACKAGES = {
    "tilewright": "tilewright",
    "compiler": "tilewright.compiler",
}  # links are not followed
PACKAGES |= {"models": "tilewright.models", "bench": "bench", "demo": "demo"}
PUBLIC_FACE = "tilewright"


GENERATED = ROOT / "demo" / "engine_generator" / "workspace"


def source_files(*folders: str) -> list[Path]:
    found = (
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.resolve() == path
    )
    return sorted(path for path in found if not path.is_relative_to(GENERATED))


def module_name(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[top], *(rest[:-1] if rest[-1] == "__init__" else rest)])


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(found: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return line and full name for all imports at any depth.

    Relative names start with a dot. A directory with computed module names is `folder.*`.
    """
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{package}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in ("import_module", "__import__"):
                yield from ((node.lineno, text) for text in _constant_start(node.args[0]))


def _constant_start(name: ast.expr) -> Iterator[str]:
    if isinstance(name, ast.JoinedStr):
        start = name.values[0]
        if isinstance(start, ast.Constant) and str(start.value).endswith("."):
            yield f"{start.value}*"
    elif isinstance(name, ast.Constant):
        yield str(name.value)


def complaint_about_import(module: str, imported: str) -> str | None:
    """Return the reason against an import of `imported` in `module`, or None."""
    if imported.startswith("."):
        return "is relative"
    top = imported.partition(".")[0]
    if top in ONLY_IN and not any(is_within(module, place) for place in ONLY_IN[top]):
        return f"belongs in {ONLY_IN[top] or 'tests'} only"
    if top in ("compiler", "models", "precision_cfgs"):
        return f"is tilewright.{top}"
    if top == "bench":
        return None if is_within(module, "bench") else "is outside the wheel"
    if top != "tilewright" or is_within(module, "demo") or module == PUBLIC_FACE:
        return None
    if is_within(imported, "tilewright.models"):
        sees = any(is_within(module, place) for place in SEES_MODELS)
        return None if sees else "is the models package"
    if imported == "tilewright.compiler.__version__":
        return None
    layer = layer_of(imported)
    if layer is None:
        return "is the root package, or in no layer"
    if is_within(module, "tilewright.models"):
        return None if layer in MODELS_MAY_IMPORT else f"is not one of {MODELS_MAY_IMPORT}"
    if is_within(module, "bench"):
        return None
    if module == "tilewright.compiler":
        return "from inside the root package"
    own = layer_of(module)
    if own is None:
        return f"but {module} is in no layer"
    return None if LEVEL[layer] <= LEVEL[own] else "is in a layer above"


def layer_of(module: str) -> str | None:
    """Return a module's layer: the longest matching prefix."""
    _, _, rest = module.partition("tilewright.")
    parts = rest.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVEL), None)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source, computed once for all checks."""
    return tuple(ast.walk(ast.parse(source)))


def nodes_at_runtime(source: str) -> Iterator[ast.AST]:
    """Exclude nodes under `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [ast.parse(source)] if "TYPE_CHECKING" in source else []
    yield from nodes(source) if not waiting else ()
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.orelse if is_for_types(node) else ast.iter_child_nodes(node)


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    if not isinstance(node, ast.If):
        return False
    name = node.test.attr if isinstance(node.test, ast.Attribute) else node.test
    return (name.id if isinstance(name, ast.Name) else name) == "TYPE_CHECKING"


def import_complaints(module: str, source: str) -> list[str]:
    found = []
    for line, imported in imports(nodes(source)):
        complaint = complaint_about_import(module, imported)
        if complaint:
            found.append(f"{module}:{line} imports {imported}, which {complaint}")
    return found


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the imports among `sources` at run time, in functions and in tables of names.

    Includes parent packages, except the module's own.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found: set[str] = set()
        run = list(nodes_at_runtime(source))
        named = {node.value for node in run if isinstance(node, ast.Constant)}
        for name in [*(name for _, name in imports(run)), *(named & sources.keys())]:
            if name.endswith(".*"):
                found |= {other for other in sources if other.rpartition(".")[0] == name[:-2]}
            while name:
                if name in sources and not is_within(module, name):
                    found.add(name)
                name = name.rpartition(".")[0]
        graph[module] = found
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return import cycles."""
    left = {module: set(others) for module, others in graph.items()}
    while ends := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others - ends for module, others in left.items() if module not in ends}
    reached: dict[str, set[str]] = {}
    for module in left:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            new = left[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[module] = seen
    return sorted(
        {
            tuple(sorted(other for other in seen if module in reached[other]))
            for module, seen in reached.items()
            if module in seen
        }
    )


def length_complaints(module: str, source: str) -> list[str]:
    num_lines = len(source.splitlines())
    found = []
    if num_lines > MAX_FILE_LINES:
        found.append(f"{module} has {num_lines} lines, more than {MAX_FILE_LINES}")
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                where = f"{module}:{node.lineno} {node.name}"
                found.append(f"{where} has {length} lines, more than {MAX_FUNCTION_LINES}")
    return found


def name_complaints(module: str) -> list[str]:
    """Return parts of a module's name that shadow a standard module."""
    return [
        f"{module}: {part} is a standard module"
        for part in module.split(".")
        if part in sys.stdlib_module_names
    ]


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("~.passes.fuse_x", "from ~.ir.info import info", True),
        ("~.passes.fuse_x", "from ~ import ir", True),
        ("~.passes.fuse_x", "from ~.passes.base import graph_pass", True),
        ("~.passes.fuse_x", "import ~.driver", False),
        ("~.ir.info", "def f():\n    from ~.passes import runner", False),
        ("~.ir.info", "if True:\n    import ~.targets.base as b", False),
        ("tilewright.errors", "from ~.formats.floats import BF16", False),
        ("~.ops.dense", "import ~", False),
        ("~.ops.dense", "from ~ import *", False),
        ("~.ops.dense", "from ~ import __version__", True),
        ("~.ops.dense", "from . import library", False),
        ("~.ops.dense", "from ..errors import ConfigError", False),
        ("~.unheard_of", "from tilewright.errors import ConfigError", False),
        ("~.ops.dense", "from ~.unheard_of import f", False),
        ("~", "from tilewright.errors import ConfigError", False),
        ("~.driver", "from tilewright.models import load_model", False),
        ("~.driver", "importlib.import_module('tilewright.models.architectures.llama')", False),
        ("tilewright.cli.commands.demo", "from tilewright.models import load_model", True),
        ("tilewright.cli", "import tilewright.models", True),
        (
            "tilewright.models.architectures.llama",
            "from tilewright.models.architectures.layers import RMSNorm",
            True,
        ),
        ("tilewright.models.architectures.llama", "from ~ import ops", True),
        (
            "tilewright.models.architectures.llama",
            "from tilewright.errors import CheckpointError",
            True,
        ),
        ("tilewright.models.checkpoints.gguf.checkpoint", "from ~.formats import BF16", True),
        ("tilewright.models.architectures.llama", "from ~.precision import MIXED", False),
        ("~.targets.cuda.kernels.linear", "import triton.language as tl", True),
        ("~.ops.dense", "import triton", False),
        ("~.targets.cpu.session", "from onnx import helper", True),
        ("~.targets.cpu_helpers", "import onnxruntime", False),
        ("~.ir.mlir", "from torch_mlir import fx", True),
        ("tilewright.models.tokenizer.tokenizer", "def f():\n    import transformers", False),
        ("demo.sweep", "import transformers", False),
        ("demo.sweep", "from tilewright.cli.main import main", True),
    ],
)
def test_the_import_check_tells_good_from_bad(module: str, source: str, is_allowed: bool) -> None:
    module, source = (text.replace("~", "tilewright.compiler") for text in (module, source))
    assert (import_complaints(module, source) == []) is is_allowed


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"p.table": "NAMES = {'a': 'p.a'}", "p.a": "import p.table"}, "p.a p.table"),
        ({"p.a": "import p.b", "p.b": "def f():\n    from p import a"}, ("p.a", "p.b")),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": "from p.a import x"}, "p.a p.b p.c"),
        (
            {"p": "from p import a", "p.a": "import q", "q": "from p.b import x", "p.b": ""},
            "p p.a q",
        ),
        ({"p.a": "import_module(f'p.q.{name}')", "p.q.b": "from p.a import x"}, "p.a p.q.b"),
        ({"p.a": "import p.b", "p.b": "if TYPE_CHECKING:\n    import p.a"}, ()),
        ({"p": "from p import a", "p.a": "from p.b import x", "p.b": ""}, ()),
    ],
)
def test_the_circle_check_finds_one(sources: dict[str, str], circle: str | tuple[str, ...]) -> None:
    expected = tuple(circle.split()) if isinstance(circle, str) else circle
    assert circles(import_graph(sources)) == ([expected] if expected else [])


def test_the_package_is_one_folder() -> None:
    """The top directories are links in the package. All else is real."""
    links = {
        path.name: path.readlink() for path in (ROOT / "tilewright").iterdir() if path.is_symlink()
    }
    assert links == {
        **{name: Path("..", name) for name in ("compiler", "models", "precision_cfgs")},
        "sample_prompts": Path("../demo/sample_prompts"),
    }


def test_no_modules_import_each_other() -> None:
    sources = {module_name(path): path.read_text("utf-8") for path in source_files(*PACKAGES)}
    found = circles(import_graph(sources))
    assert not found, "\n".join("a circle: " + ", ".join(each) for each in found)


def test_the_length_check_counts_lines() -> None:
    function = "def f():\n" + "    x = 1\n" * 59
    assert length_complaints("m", function) == []
    assert len(length_complaints("m", function + "    x = 2\n")) == 1
    method = "class C:\n    async def f(self):\n" + "        x = 1\n" * 60
    assert len(length_complaints("m", method)) == 1
    assert length_complaints("m", "x = 1\n" * 600) == []
    assert len(length_complaints("m", "x = 1\n" * 601)) == 1


def test_the_name_check_knows_standard_modules() -> None:
    assert name_complaints("tilewright.compiler.ir.rewrite") == []
    assert len(name_complaints("tilewright.compiler.ops.operator")) == 1
    assert len(name_complaints("tilewright.compiler.queue.base")) == 1


def test_the_walk_finds_the_sources() -> None:
    names = {module_name(path) for path in source_files("compiler", "models", "tilewright")}
    assert {
        "tilewright.compiler",
        "tilewright.errors",
        "tilewright.evaluate.cases.cases",
        "tilewright.models.architectures.llama",
    } <= names


def test_sources_keep_the_rules() -> None:
    complaints = []
    for path in source_files(*PACKAGES):
        module, source = module_name(path), path.read_text(encoding="utf-8")
        complaints += import_complaints(module, source)
        complaints += length_complaints(module, source)
        complaints += name_complaints(module)
    assert not complaints, "\n".join(complaints)


def test_only_listed_files_have_marks_against_the_formatter() -> None:
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in source_files(*PACKAGES, "tests")
        if _MARK in path.read_text(encoding="utf-8")
    }
    assert marked == set(UNFORMATTED)
