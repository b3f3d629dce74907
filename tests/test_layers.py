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
    ("bench",),
    ("sweep",),
    ("serve",),
    ("commands", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Of the compiler: ``files``, because a checkpoint's files are opened as carefully as all others.
MODELS_MAY_IMPORT = ("ops", "errors", "files")
SEES_MODELS = (
    "tilewright.models",
    "tilewright.compiler.commands",
    "tilewright.compiler.cli",
    "bench",
)

# Optional libraries, and the only places that import them.
ONLY_IN = {
    "triton": ("tilewright.compiler.targets.cuda", "tilewright.compiler.targets.tenstorrent"),
    "numba": ("tilewright.compiler.targets.tenstorrent",),
    "llvmlite": ("tilewright.compiler.targets.tenstorrent",),
    "cuda": ("tilewright.compiler.targets.cuda",),
    "onnxruntime": ("tilewright.compiler.targets.cpu",),
    "onnx": ("tilewright.compiler.targets.cpu",),
    "torch_mlir": ("tilewright.compiler.ir.mlir",),
    "ttnn": ("tilewright.compiler.targets.tenstorrent",),
    "transformers": (),
    "matplotlib": (
        "tilewright.compiler.bench",
        "tilewright.compiler.sweep",
        "tilewright.compiler.commands.sweep.report",
    ),
    "textual": ("tilewright.compiler.commands.sweep",),
    "llama_cpp": ("bench.peers",),
    "onnxruntime_genai": ("bench.peers",),
    "openvino_genai": ("bench.peers",),
}

WITHOUT_TORCH = (
    "tilewright",
    "tilewright.compiler",
    "tilewright.compiler.errors",
    "tilewright.compiler.registry",
    "tilewright.compiler.environment",
    "tilewright.compiler.artifacts.places",
    "tilewright.compiler.devices",
    "tilewright.compiler.precision",
    "tilewright.compiler.bench.cases",
    "tilewright.compiler.bench.prompts",
    "tilewright.compiler.bench.results",
    "tilewright.compiler.bench.perf_md",
    "tilewright.compiler.commands.options",
    "tilewright.compiler.commands.sweep.control",
    "tilewright.compiler.commands.sweep.main",
    "tilewright.compiler.commands.sweep.options",
    "tilewright.compiler.commands.sweep.run",
    "tilewright.compiler.commands.sweep.show",
    "tilewright.compiler.commands.compile",
    "bench.peers.command",
    "tilewright.compiler.cli",
)

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 49


# Import names of the folders at the top of the tree.
PACKAGES = {"tilewright": "tilewright", "compiler": "tilewright.compiler"}
PACKAGES |= {"models": "tilewright.models", "bench": "bench", "demo": "demo"}
PUBLIC_FACE = "tilewright"


def source_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[top], *(rest[:-1] if rest[-1] == "__init__" else rest)])


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
    if imported.startswith("."):
        return "is relative"
    top = imported.partition(".")[0]
    if top in ONLY_IN and not any(is_within(module, place) for place in ONLY_IN[top]):
        return f"belongs in {ONLY_IN[top] or 'tests'} only"
    if top in ("compiler", "models"):
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
    layer = [*imported.split("."), "", ""][2]
    if not is_within(imported, "tilewright.compiler") or layer not in LEVEL:
        return "is the root package, or in no layer"
    if is_within(module, "tilewright.models"):
        return None if layer in MODELS_MAY_IMPORT else f"is not one of {MODELS_MAY_IMPORT}"
    if is_within(module, "bench"):
        return None
    if module == "tilewright.compiler":
        return "from inside the root package"
    own = module.split(".")[2]
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
        ("tilewright.compiler.passes.fuse_x", "from tilewright.compiler.ir.info import info", True),
        ("tilewright.compiler.passes.fuse_x", "from tilewright.compiler import ir", True),
        (
            "tilewright.compiler.passes.fuse_x",
            "from tilewright.compiler.passes.base import graph_pass",
            True,
        ),
        ("tilewright.compiler.passes.fuse_x", "import tilewright.compiler.driver", False),
        (
            "tilewright.compiler.ir.info",
            "def f():\n    from tilewright.compiler.passes import runner",
            False,
        ),
        (
            "tilewright.compiler.ir.info",
            "if True:\n    import tilewright.compiler.targets.base as b",
            False,
        ),
        (
            "tilewright.compiler.errors",
            "from tilewright.compiler.formats.floats import BF16",
            False,
        ),
        ("tilewright.compiler.ops.dense", "import tilewright.compiler", False),
        ("tilewright.compiler.ops.dense", "from tilewright.compiler import *", False),
        ("tilewright.compiler.ops.dense", "from tilewright.compiler import __version__", True),
        ("tilewright.compiler.ops.dense", "from . import library", False),
        ("tilewright.compiler.ops.dense", "from ..errors import ConfigError", False),
        (
            "tilewright.compiler.unheard_of",
            "from tilewright.compiler.errors import ConfigError",
            False,
        ),
        ("tilewright.compiler.ops.dense", "from tilewright.compiler.unheard_of import f", False),
        ("tilewright.compiler", "from tilewright.compiler.errors import ConfigError", False),
        ("tilewright.compiler.driver", "from tilewright.models import load_model", False),
        (
            "tilewright.compiler.driver",
            "importlib.import_module('tilewright.models.architectures.llama')",
            False,
        ),
        ("tilewright.compiler.commands.demo", "from tilewright.models import load_model", True),
        ("tilewright.compiler.cli", "import tilewright.models", True),
        (
            "tilewright.models.architectures.llama",
            "from tilewright.models.architectures.layers import RMSNorm",
            True,
        ),
        ("tilewright.models.architectures.llama", "from tilewright.compiler import ops", True),
        (
            "tilewright.models.architectures.llama",
            "from tilewright.compiler.errors import CheckpointError",
            True,
        ),
        (
            "tilewright.models.architectures.llama",
            "from tilewright.compiler.formats import BF16",
            False,
        ),
        ("tilewright.compiler.targets.cuda.kernels.linear", "import triton.language as tl", True),
        ("tilewright.compiler.ops.dense", "import triton", False),
        ("tilewright.compiler.targets.cpu.session", "from onnx import helper", True),
        ("tilewright.compiler.targets.cpu_helpers", "import onnxruntime", False),
        ("tilewright.compiler.ir.mlir", "from torch_mlir import fx", True),
        ("tilewright.models.tokenizer.tokenizer", "def f():\n    import transformers", False),
        ("demo.sweep", "import transformers", False),
        ("demo.sweep", "from tilewright.compiler.cli import main", True),
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
    assert name_complaints("tilewright.compiler.ir.rewrite") == []
    assert len(name_complaints("tilewright.compiler.ops.operator")) == 1
    assert len(name_complaints("tilewright.compiler.queue.base")) == 1


def test_the_walk_finds_the_sources() -> None:
    names = {module_name(path) for path in source_files("compiler", "models")}
    assert {
        "tilewright.compiler",
        "tilewright.compiler.errors",
        "tilewright.compiler.bench.cases",
        "tilewright.models.architectures.llama",
    } <= names


@pytest.mark.parametrize(
    "path",
    source_files(*PACKAGES),
    ids=lambda path: module_name(path),
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


@pytest.mark.parametrize(
    "module", ["tilewright.compiler.ops", "tilewright.compiler.driver", "models"]
)
def test_initialises_no_device(module: str) -> None:
    code = f"import {module}, torch; print(torch.cuda.is_initialized())"
    assert run_python(code) == "False"
