"""Graph modules that generate their Python code at the first run. Passes change a graph many times,
and most graphs never run as Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

_STACKS = "do_not_emit_stack_traces"


def module_of(graph: Graph) -> GraphModule:
    """Return a module for a graph. Its copies also generate their code at the first run."""
    return _LazyGraphModule(torch.nn.Module(), graph)


def lazy_modules() -> AbstractContextManager[None]:
    """Within it, modules that torch itself makes of graphs are such too."""
    return _use_lazy_graph_module(True)


@contextmanager
def without_stacks() -> Iterator[None]:
    """Disable stack traces on nodes. Nothing reads them, and they take a tenth of the time."""
    config: Any = torch.fx.config
    before = getattr(config, _STACKS, False)
    setattr(config, _STACKS, True)
    try:
        yield
    finally:
        setattr(config, _STACKS, before)
