"""The house's rules that a linter does not know: who imports whom, how long, how named.

The checks are functions from a module's name and source to complaints; each is first shown to
complain about a source that breaks its rule.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom to the top; a module imports from its own layer and from those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "registry", "environment", "files", "plain_yaml"),
    ("formats",),
    ("devices",),
    ("precision",),
    ("distributed",),
    ("ops",),
    ("ir",),
    ("tracer",),
    ("passes",),
    ("targets",),
    ("driver",),
    ("artifacts",),
    ("runtime",),
    ("serve",),
    ("bench",),
    ("commands", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODELS_MAY_IMPORT = ("ops", "errors")
SEES_MODELS = ("compiler.commands", "compiler.cli")

# Optional libraries, and the only places that import them.
ONLY_IN = {
    "triton": ("compiler.targets.cuda", "compiler.targets.tenstorrent"),
    "numba": ("compiler.targets.tenstorrent",),
    "llvmlite": ("compiler.targets.tenstorrent",),
    "cuda": ("compiler.targets.cuda",),
    "onnxruntime": ("compiler.targets.cpu",),
    "onnx": ("compiler.targets.cpu",),
    "torch_mlir": ("compiler.ir.mlir",),
    "ttnn": ("compiler.targets.tenstorrent",),
    "transformers": (),
    "matplotlib": ("compiler.bench", "compiler.commands.sweep.report"),
    "textual": ("compiler.commands.sweep",),
    "llama_cpp": ("compiler.bench.peers",),
    "onnxruntime_genai": ("compiler.bench.peers",),
    "openvino_genai": ("compiler.bench.peers",),
}

WITHOUT_TORCH = (
    "compiler",
    "compiler.errors",
    "compiler.registry",
    "compiler.environment",
    "compiler.artifacts.places",
    "compiler.devices",
    "compiler.precision",
    "compiler.bench.cases",
    "compiler.bench.prompts",
    "compiler.bench.results",
    "compiler.bench.perf_md",
    "compiler.commands.options",
    "compiler.commands.sweep.control",
    "compiler.commands.sweep.main",
    "compiler.commands.sweep.options",
    "compiler.commands.sweep.run",
    "compiler.commands.sweep.show",
    "compiler.commands.compile",
    "compiler.commands.compare",
    "compiler.cli",
)

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 49


def source_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of all that is imported, at any depth; relative names start with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{package}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            argument = node.args[0]
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def complaint_about_import(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None where it may."""
    top, _, rest = imported.partition(".")
    if imported.startswith("."):
        return "is relative"
    if top in ONLY_IN and not any(is_within(module, place) for place in ONLY_IN[top]):
        return f"belongs in {ONLY_IN[top] or 'tests'} only"
    if is_within(module, "demo"):
        return None
    if top == "models":
        in_models = is_within(module, "models")
        sees_models = any(is_within(module, place) for place in SEES_MODELS)
        return None if in_models or sees_models else "is the models package"
    if top != "compiler" or imported == "compiler.__version__":
        return None
    layer = rest.partition(".")[0]
    if layer not in LEVEL:
        return "is the root package, or in no layer"
    if is_within(module, "models"):
        return None if layer in MODELS_MAY_IMPORT else f"is not one of {MODELS_MAY_IMPORT}"
    own = module.split(".")[1] if "." in module else None
    if own is None:
        return "from inside the root package"
    if own not in LEVEL:
        return f"but {module} is in no layer"
    return None if LEVEL[layer] <= LEVEL[own] else "is in a layer above"


def import_complaints(module: str, source: str) -> list[str]:
    found = []
    for line, imported in imports(source):
        complaint = complaint_about_import(module, imported)
        if complaint:
            found.append(f"{module}:{line} imports {imported}, which {complaint}")
    return found


def length_complaints(module: str, source: str) -> list[str]:
    num_lines = len(source.splitlines())
    found = []
    if num_lines > MAX_FILE_LINES:
        found.append(f"{module} has {num_lines} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                where = f"{module}:{node.lineno} {node.name}"
                found.append(f"{where} has {length} lines, more than {MAX_FUNCTION_LINES}")
    return found


def name_complaints(module: str) -> list[str]:
    """Parts of a module's name that a standard module has: as a script's folder they shadow it."""
    return [
        f"{module}: {part} is a standard module"
        for part in module.split(".")
        if part in sys.stdlib_module_names
    ]


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("compiler.passes.fuse_x", "from compiler.ir.info import info", True),
        ("compiler.passes.fuse_x", "from compiler import ir", True),
        ("compiler.passes.fuse_x", "from compiler.passes.base import graph_pass", True),
        ("compiler.passes.fuse_x", "import compiler.driver", False),
        ("compiler.ir.info", "def f():\n    from compiler.passes import runner", False),
        ("compiler.ir.info", "if True:\n    import compiler.targets.base as b", False),
        ("compiler.errors", "from compiler.formats.floats import BF16", False),
        ("compiler.ops.dense", "import compiler", False),
        ("compiler.ops.dense", "from compiler import *", False),
        ("compiler.ops.dense", "from compiler import __version__", True),
        ("compiler.ops.dense", "from . import library", False),
        ("compiler.ops.dense", "from ..errors import ConfigError", False),
        ("compiler.unheard_of", "from compiler.errors import ConfigError", False),
        ("compiler.ops.dense", "from compiler.unheard_of import f", False),
        ("compiler", "from compiler.errors import ConfigError", False),
        ("compiler.driver", "from models import load_model", False),
        ("compiler.driver", "importlib.import_module('models.llama')", False),
        ("compiler.commands.demo", "from models import load_model", True),
        ("compiler.cli", "import models", True),
        ("models.llama", "from models.layers import RMSNorm", True),
        ("models.llama", "from compiler import ops", True),
        ("models.llama", "from compiler.errors import CheckpointError", True),
        ("models.llama", "from compiler.formats import BF16", False),
        ("compiler.targets.cuda.kernels.linear", "import triton.language as tl", True),
        ("compiler.ops.dense", "import triton", False),
        ("compiler.targets.cpu.session", "from onnx import helper", True),
        ("compiler.targets.cpu_helpers", "import onnxruntime", False),
        ("compiler.ir.mlir", "from torch_mlir import fx", True),
        ("models.tokenizer", "def f():\n    import transformers", False),
        ("demo.sweep", "import transformers", False),
        ("demo.sweep", "from compiler.cli import main", True),
    ],
)
def test_the_import_check_tells_good_from_bad(module: str, source: str, is_allowed: bool) -> None:
    assert (import_complaints(module, source) == []) is is_allowed


def test_the_length_check_counts_lines() -> None:
    function = "def f():\n" + "    x = 1\n" * 48
    assert length_complaints("m", function) == []
    assert len(length_complaints("m", function + "    x = 2\n")) == 1
    method = "class C:\n    async def f(self):\n" + "        x = 1\n" * 49
    assert len(length_complaints("m", method)) == 1
    assert length_complaints("m", "x = 1\n" * 399) == []
    assert len(length_complaints("m", "x = 1\n" * 400)) == 1


def test_the_name_check_knows_standard_modules() -> None:
    assert name_complaints("compiler.ir.rewrite") == []
    assert len(name_complaints("compiler.ops.operator")) == 1
    assert len(name_complaints("compiler.queue.base")) == 1


def test_the_walk_finds_the_sources() -> None:
    names = {module_name(path) for path in source_files("compiler", "models")}
    assert {"compiler", "compiler.errors", "compiler.bench.cases", "models.llama"} <= names


@pytest.mark.parametrize(
    "path", source_files("compiler", "models", "demo"), ids=lambda path: module_name(path)
)
def test_source_keeps_the_rules(path: Path) -> None:
    module, source = module_name(path), path.read_text(encoding="utf-8")
    complaints = [
        *import_complaints(module, source),
        *length_complaints(module, source),
        *name_complaints(module),
    ]
    assert not complaints, "\n".join(complaints)


def run_python(code: str) -> str:
    """What `code` prints in a fresh interpreter that sees the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    heavy = "{'torch', 'onnxruntime', 'transformers', 'triton'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("module", ["compiler.ops", "compiler.driver", "models"])
def test_initialises_no_device(module: str) -> None:
    code = f"import {module}, torch; print(torch.cuda.is_initialized())"
    assert run_python(code) == "False"
