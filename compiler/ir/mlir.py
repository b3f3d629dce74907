"""Export of a stateless graph as MLIR text, through torch-mlir. Weights are function arguments.

torch-mlir rejects custom operators, so they are first replaced with their eager references. A JSON
description of the arguments comes with the text.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilewright.compiler.ir.info import CONSTANT, INPUT, STATE, info
from tilewright.compiler.ir.lazy import without_stacks
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ops import OPERATORS
from tilewright.errors import CompileError, ConfigError, allowed

DIALECTS = ("torch", "linalg")
FUNCTION = "main"

_PIPELINES = {
    "torch": ("torchdynamo-export-to-torch-backend-pipeline",),
    "linalg": (
        "torchdynamo-export-to-torch-backend-pipeline",
        "torch-backend-to-linalg-on-tensors-backend-pipeline",
    ),
}
_HEADER = """\
// A language model without state: tokens [T], positions [T], weights to logits [T, vocabulary].
// Arguments are named after the checkpoint tensors whose float32 values they take.
"""
_EXAMPLE_LENGTH = 7  # above 1: torch.export makes a length of 1 a constant


@dataclass(frozen=True, slots=True)
class MlirArgument:
    """An argument of the function: a step input, a weight or a constant.

    Attributes:
        name: Name in the text.
        role: Role from NodeInfo.
        shape: Sizes. None: the dynamic length.
        dtype: torch dtype name.
        recipe: Source in the checkpoint. ``load_dense(recipe, get)`` returns the float32 values,
            ``load_values`` returns values in the recipe's format. None for step inputs.
    """

    name: str
    role: str
    shape: tuple[int | None, ...]
    dtype: str
    recipe: WeightRecipe | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the checkpoint tensors, stacked along the first axis. Step inputs have none."""
        return () if self.recipe is None else self.recipe.names


@dataclass(frozen=True, slots=True)
class MlirModule:
    """The text of a module. Its function ``main`` maps ``arguments`` to logits."""

    dialect: str
    text: str
    arguments: tuple[MlirArgument, ...]
    result: MlirArgument

    def arguments_json(self) -> str:
        """Return the arguments in order and the result as JSON, with a line each."""
        lines = [
            json.dumps({"index": index, **_described(argument)})
            for index, argument in enumerate(self.arguments)
        ]
        head = f'{{"dialect": "{self.dialect}", "function": "{FUNCTION}", "arguments": ['
        tail = f'], "result": {json.dumps(_described(self.result))}}}'
        return "\n".join((head, ",\n".join(lines), tail)) + "\n"


def _described(argument: MlirArgument) -> dict[str, Any]:
    """Return an argument's JSON fields.

    ``segments`` appears if tensors are not used unchanged. It has half-open ranges of rows, and
    offsets.
    """
    segments = [] if argument.recipe is None else argument.recipe.segments
    taken = {}
    if any(each.rows or each.offset for each in segments):
        taken["segments"] = [
            {"tensor": each.name, "rows": each.rows, "offset": each.offset} for each in segments
        ]
    return {
        "name": argument.name,
        "role": argument.role,
        "shape": ["length" if size is None else size for size in argument.shape],
        "dtype": argument.dtype,
        "tensors": list(argument.tensors),
        **taken,
    }


def emit_mlir(
    graph_module: GraphModule,
    dialect: str = "linalg",
    *,
    length: int | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> MlirModule:
    """Emit an fp32 function from ``tokens [T]``, ``positions [T]`` and weights to ``logits [T,
    vocab]``.

    Args:
        graph_module: A traced and matched graph (targets/pipeline.MATCH) without state. Not
            modified.
        dialect: A name in DIALECTS.
        length: T in the emitted function. None: dynamic.
        constants: Values for buffers outside checkpoints, embedded in the text. Other buffers
            become
            arguments. Weights are always arguments. A tied weight is a single argument.

    Raises:
        ConfigError: The dialect is unknown, or the length is below 1.
        CompileError: torch-mlir is missing, or cannot lower an operator.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"dialect {dialect!r} is not emitted; {allowed(DIALECTS)}")
    if length is not None and length < 1:
        raise ConfigError(f"length of {length} tokens; allowed: 1 or more, or none for any")
    _require_torch_mlir()
    # Generate the code immediately: torch.export reads the argument names.
    plain = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    _call_references(plain)
    _share_equal_arguments(plain)
    _embed_constants(plain, constants or {})
    inputs = [node for node in plain.graph.nodes if node.op == "placeholder"]
    arguments = tuple(_argument(node, length) for node in inputs)
    (output,) = plain.graph.find_nodes(op="output")
    result = _argument(output.args[0], length, name="logits", role="output")
    program = _export(plain, inputs, length)
    text = _HEADER + _lower(program, dialect, [argument.name for argument in arguments])
    return MlirModule(dialect, text, arguments, result)


def _require_torch_mlir() -> None:
    try:
        import torch_mlir.fx  # noqa: F401
    except ImportError as error:
        raise CompileError(
            f"MLIR needs torch-mlir, which cannot be imported ({error}); install it with: "
            "pip install torch-mlir (Linux)"
        ) from None


def _call_references(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        assert info(node).role != STATE, f"{node.name}: MLIR is made of graphs without state"
        if node.op == "call_function" and node.target in OPERATORS:
            node.target = OPERATORS[node.target].reference
    graph_module.recompile()


def _share_equal_arguments(graph_module: GraphModule) -> None:
    """Merge placeholders with equal recipes: a tied weight is passed once."""
    first: dict[WeightRecipe, Node] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        recipe = info(node).recipe
        if recipe is not None and first.setdefault(recipe, node) is not node:
            node.replace_all_uses_with(first[recipe])
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _embed_constants(graph_module: GraphModule, constants: Mapping[str, Tensor]) -> None:
    graph = graph_module.graph
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        facts = info(node)
        if facts.role != CONSTANT or facts.fqn not in constants:
            continue
        value = constants[facts.fqn]
        assert value.shape == node.meta["val"].shape, f"{facts.fqn}: shape {list(value.shape)}"
        name = f"constant_{index}"
        graph_module.register_buffer(name, value.to(node.meta["val"].dtype))
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            node.replace_all_uses_with(graph.get_attr(name))
        graph.erase_node(node)
    graph_module.recompile()


def _argument(node: Node, length: int | None, *, name: str = "", role: str = "") -> MlirArgument:
    """Describe a node in the function's signature. Its recipe must not be padded."""
    facts, fake = info(node), node.meta["val"]
    if facts.recipe is not None:
        assert not facts.recipe.pad_rows, facts.fqn
    return MlirArgument(
        name=name or facts.fqn or str(node.target),
        role=role or facts.role,
        shape=tuple(size if isinstance(size, int) else length for size in fake.shape),
        dtype=str(fake.dtype).removeprefix("torch."),
        recipe=facts.recipe,
    )


def _export(graph_module: GraphModule, inputs: list[Node], length: int | None) -> Any:
    """Export the reference graph as an ExportedProgram. Fake arguments need no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = length or _EXAMPLE_LENGTH
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = [node.meta["val"] for node in inputs]
        shapes = [[d if isinstance(d, int) else size for d in fake.shape] for fake in fakes]
        examples = tuple(
            torch.empty(shape, dtype=fake.dtype) for shape, fake in zip(shapes, fakes, strict=True)
        )
    any_length = torch.export.Dim("length", min=2, max=1 << 24)
    dynamic = tuple({0: any_length} if info(node).role == INPUT else None for node in inputs)
    try:
        with _quiet(), without_stacks():
            return torch.export.export(
                graph_module, examples, dynamic_shapes=None if length else dynamic, strict=False
            )
    except Exception as error:  # torch.export raises whatever a reference stumbles over
        where = _reference_in(error) or "the graph"
        raise CompileError(f"{where} has no MLIR: {_first_line(error)}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output: torch.export prints whole graphs before it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _reference_in(error: Exception) -> str | None:
    """Return the operator's name with the failed reference."""
    names = {entry.reference.__code__: entry.name for entry in OPERATORS.values()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in names:
            return f"operator {names[trace.tb_frame.f_code]!r}"
        trace = trace.tb_next
    return None


def _mutates(program: Any) -> bool:
    """Return whether the program must be made functional. That traces again and is 5 times
    slower.
    """
    schemas = [getattr(node.target, "_schema", None) for node in program.graph.nodes]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _lower(program: Any, dialect: str, names: list[str]) -> str:
    """Import the program and run the dialect's pipelines. Diagnostics become the error text."""
    from torch_mlir import fx, ir
    from torch_mlir.passmanager import PassManager

    problems: list[str] = []

    def note(diagnostic: Any) -> bool:
        if diagnostic.severity == ir.DiagnosticSeverity.ERROR:
            problems.append(diagnostic.message)
        return True  # handled: nothing is printed

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, when it copies a program
            module = fx.export_and_import(
                program,
                output_type="raw",
                func_name=FUNCTION,
                decomposition_table=None if _mutates(program) else {},
            )
        with module.context as context:
            handler = context.attach_diagnostic_handler(note)
            context.emit_error_diagnostics = True  # else a pass that reports and succeeds aborts
            for pipeline in _PIPELINES[dialect]:
                PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
            handler.detach()
    except Exception as error:  # torch-mlir raises whatever it stumbles over
        problems.append(_first_line(error))
    if problems:
        culprit = _culprit(problems[0])
        raise CompileError(f"torch-mlir cannot lower {culprit} to dialect {dialect!r}")
    (function,) = module.body.operations
    with module.context:
        for argument, name in zip(function.arguments, names, strict=True):
            argument.set_location(ir.Location.name(name))
    return str(module.operation.get_asm(use_name_loc_as_prefix=True))


def _culprit(reason: str) -> str:
    """Return the operator named in a diagnostic, or the diagnostic's first words."""
    named = re.search(r'name = "(?:torch\.)?([\w.]+)"', reason)
    named = named or re.search(r"operation '([\w.]+)'", reason)
    return named.group(1) if named else f"the graph ({reason.strip()[:200]})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
