"""A float forward over a calibration text, layer by layer.

Only the weights of one segment (a layer, or what is before or after the layers) are loaded at a
time. Values that later segments read are kept for all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import INPUT, info
from tilewright.compiler.ir.recipe import WeightRecipe, load_dense
from tilewright.compiler.ops.library import OPERATORS

PRODUCTS = (ops.linear.overload, ops.expert_linear.overload)
_BY_SEQUENCE = (
    ops.attention.overload,
    ops.causal_conv1d.overload,
    ops.gated_delta_rule.overload,
)
_CPU_TOKENS, _GPU_TOKENS = 2048, 8192

Weights: TypeAlias = Mapping[Node, Tensor]
Watch: TypeAlias = Callable[[Node, tuple[Any, ...]], None]
"""A function with two parameters: a product's node and its arguments."""


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """Consecutive nodes: a layer, or the nodes before or after all layers.

    ``live``: values of this and earlier segments, and inputs, that later segments read.
    """

    name: str
    nodes: tuple[Node, ...]
    weights: tuple[Node, ...]
    live: frozenset[Node]

    @property
    def products(self) -> tuple[Node, ...]:
        """The matmuls with a weight."""
        return tuple(node for node in self.nodes if node.target in PRODUCTS)


def segments_of(graph_module: GraphModule) -> tuple[LayerSegment, ...]:
    """Cut a matched graph into segments, in order."""
    nodes = [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    layers = [info(node).layer for node in nodes]
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    starts = [layers.index(layer) for layer in range(num_layers)]
    last = max((i for i, layer in enumerate(layers) if layer is not None), default=-1) + 1
    bounds = [0, *starts, last, len(nodes)] if num_layers else [0, 0, len(nodes)]
    names = ["embedding", *(f"layer {layer}" for layer in range(num_layers)), "head"]
    values = {n for n in graph_module.graph.nodes if info(n).role == INPUT}
    found = []
    for name, start, end in zip(names, bounds, bounds[1:], strict=False):
        part = nodes[start:end]
        later = set(nodes[end:])
        weights = {a: None for n in part for a in n.all_input_nodes if a.op == "placeholder"}
        values.update(part)
        live = {n for n in values if any(u in later or u.op == "output" for u in n.users)}
        found.append(LayerSegment(name, tuple(part), tuple(weights), frozenset(live)))
    return tuple(found)


class LayeredForward:
    """A graph run over sequences with equal lengths, segment after segment.

    Args:
        graph_module: A graph after the stages that match ops.
        get_weight: Source of tensors by name.
        tokens_ST: Token ids, a sequence a row.
        device: The arithmetic's device.
        weight_of: Values of a weight's recipe; by default the checkpoint's own.
        group_tokens: Maximum tokens in a group. None: chosen for the device.

    Attributes:
        num_tokens: Token count of all sequences.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        tokens_ST: Tensor,
        device: torch.device,
        *,
        weight_of: Callable[[WeightRecipe, Callable[[str], Tensor]], Tensor] = load_dense,
        exact: bool = False,
        group_tokens: int | None = None,
    ) -> None:
        self.segments = segments_of(graph_module)
        self._get, self._weight_of, self._device = get_weight, weight_of, device
        self._length, self.num_tokens = tokens_ST.shape[1], tokens_ST.numel()
        self._dtype = torch.float32 if exact else product_dtype(device)
        most = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
        step = max(1, (group_tokens or most) // self._length)
        inputs = [n for n in graph_module.graph.nodes if info(n).role == INPUT]
        self.groups: list[dict[Node, Tensor]] = []
        for part_ST in tokens_ST.split(step):
            positions = torch.arange(self._length).repeat(part_ST.shape[0])
            values = {"tokens": part_ST.flatten(), "positions": positions}
            self.groups.append({n: values[str(n.target)].to(device) for n in inputs})

    def load(self, segment: LayerSegment) -> dict[Node, Tensor]:
        """Load a segment's weights and constants."""
        found = {}
        for node in segment.weights:
            recipe = info(node).recipe
            if recipe is not None:
                with torch.device(self._device):  # for random weights
                    values = self._weight_of(recipe, self._get)
                found[node] = values.to(self._device)
        return found

    def run(
        self, segment: LayerSegment, weights: Weights, watch: Watch, *, skip: frozenset[Node]
    ) -> Iterator[int]:
        """Run a segment on all groups. Yield the finished group count.

        Products call ``watch`` first. Products in ``skip`` are not computed.
        """
        cast = self.cast(segment, weights, skip)
        for index, group in enumerate(self.groups):
            self.groups[index] = self.step(segment, cast, group, watch, skip=skip)
            yield index + 1

    def cast(self, segment: LayerSegment, weights: Weights, skip: frozenset[Node]) -> Weights:
        """Return the weights, with product weights in the product type."""
        products = {node.args[1] for node in segment.products if node not in skip}
        return {n: w.to(self._dtype) if n in products else w for n, w in weights.items()}

    def step(
        self,
        segment: LayerSegment,
        weights: Weights,
        group: Mapping[Node, Tensor],
        watch: Watch,
        *,
        skip: frozenset[Node],
        has_gradients: bool = False,
    ) -> dict[Node, Tensor]:
        """Run a segment on one group's values. Return the values for later segments.

        Args:
            has_gradients: Whether torch records the operations.
        """
        values: dict[Node, Any] = {**weights, **group}
        with torch.set_grad_enabled(has_gradients):
            for node in segment.nodes:
                arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
                if node.target not in PRODUCTS:
                    values[node] = self._call(node, arguments)
                    continue
                watch(node, arguments)
                if node not in skip:
                    values[node] = self._product(node, arguments)
        return {n: v for n, v in values.items() if n in segment.live}

    @property
    def num_groups(self) -> int:
        """Sequence group count."""
        return len(self.groups)

    def _product(self, node: Node, arguments: tuple[Any, ...]) -> Tensor:
        x, weight, *rest = arguments
        if node.target is ops.expert_linear.overload:
            found: Tensor = ops.expert_linear.reference(x.to(self._dtype), weight, *rest)
            return found.to(x.dtype)
        bias = rest[0] if rest else None
        product = torch.nn.functional.linear(x.to(self._dtype), weight).to(x.dtype)
        return product if bias is None else product + bias

    def _call(self, node: Node, arguments: tuple[Any, ...]) -> Any:
        target: Any = node.target
        call = OPERATORS[target].reference if target in OPERATORS else target
        kwargs = dict(node.kwargs)
        if "device" in kwargs:
            kwargs["device"] = self._device
        if target not in _BY_SEQUENCE:
            return call(*arguments, **kwargs)
        if target is ops.attention.overload and (fast := self._attention(*arguments)) is not None:
            return fast
        is_rows = [isinstance(a, Tensor) and a.shape[0] % self._length == 0 for a in arguments]
        count = arguments[0].shape[0] // self._length
        is_rows = [
            r and a.shape[0] == arguments[0].shape[0]
            for r, a in zip(is_rows, arguments, strict=True)
        ]
        parts = []
        for index in range(count):
            rows = slice(index * self._length, (index + 1) * self._length)
            own = [a[rows] if r else a for r, a in zip(is_rows, arguments, strict=True)]
            parts.append(call(*own, **kwargs))
        return torch.cat(parts)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor | None:
        """Return the attention output for all sequences. None: torch has no kernel for it."""
        if soft_cap or 0 < window < self._length:
            return None

        def heads(each: Tensor) -> Tensor:
            whole = each.view(-1, self._length, *each.shape[1:])
            return whole.transpose(1, 2).to(self._dtype)

        is_grouped = q.shape[1] != k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            heads(q), heads(k), heads(v), is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2).reshape(q.shape).to(q.dtype)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the fast product type: bfloat16 with matrix units, else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    has_tiles: Callable[[], bool] | None = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.bfloat16 if has_tiles is not None and has_tiles() else torch.float32


@contextmanager
def rounded_inputs(device: torch.device) -> Iterator[None]:
    """Round inputs of float32 matmuls to the product type of a CPU. Sums stay float32.

    Second moments then are exactly those of the inputs of the products.
    """
    library: Any = torch.backends.mkldnn
    backend = library.matmul
    before = backend.fp32_precision
    if device.type == "cpu" and product_dtype(device) is torch.bfloat16:
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


class Moments:
    """Sums of x x^T over inputs, or the diagonal only: ``[D, D]`` or ``[D]``, float32.

    Experts have separate sums: ``[E, D, D]`` or ``[E, D]``.
    """

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self._sums: dict[Node, Tensor] = {}
        self._counts: dict[Node, Tensor] = {}
        self._owners: dict[Node, Node] = {}

    def add(self, node: Node, arguments: tuple[Any, ...]) -> None:
        """Add a product's inputs. Products with a shared input count once."""
        source, x = node.args[0], arguments[0]
        assert isinstance(source, Node)
        if self._owners.setdefault(source, node) is not node:
            return
        if node.target is ops.expert_linear.overload:
            self._add_experts(source, x, arguments[1].shape[0], arguments[2])
        else:
            self._add(source, x.reshape(-1, x.shape[-1]).float(), None)

    def merge(self, other: Moments) -> None:
        """Add the sums of further tokens."""
        for source, sums in other._sums.items():
            if source in self._sums:
                self._sums[source] += sums
                self._counts[source] += other._counts[source]
            else:
                self._sums[source], self._counts[source] = sums, other._counts[source]

    def of(self, node: Node) -> tuple[Tensor, Tensor]:
        """Return a product's mean moments and the token count."""
        source = node.args[0]
        assert isinstance(source, Node)
        sums, counts = self._sums[source], self._counts[source]
        shape = (*counts.shape, *[1] * (sums.dim() - counts.dim()))
        return sums / counts.clamp(min=1).view(shape), counts

    def _add_experts(self, source: Node, x: Tensor, num_experts: int, experts_TK: Tensor) -> None:
        wide = x.unsqueeze(1).expand(-1, experts_TK.shape[1], -1) if x.dim() == 2 else x
        for expert in range(num_experts):
            chosen = experts_TK == expert
            self._add(source, wide[chosen].float(), (expert, num_experts))

    def _add(self, source: Node, x_TD: Tensor, place: tuple[int, int] | None) -> None:
        size = x_TD.shape[1]
        shape = (size, size) if self.full else (size,)
        if source not in self._sums:
            outer = () if place is None else (place[1],)
            self._sums[source] = x_TD.new_zeros((*outer, *shape))
            self._counts[source] = x_TD.new_zeros(outer)
        sums, counts = self._sums[source], self._counts[source]
        if place is not None:
            sums, counts = sums[place[0]], counts[place[0]]
        counts += x_TD.shape[0]
        if not self.full:
            sums += x_TD.square().sum(0)
        else:
            add_products(sums, x_TD)


def add_products(sums_DD: Tensor, x_TD: Tensor) -> None:
    """Add x^T x; panels below the diagonal are copied."""
    size = x_TD.shape[1]
    panel = max(256, math.ceil(size / 6 / 64) * 64)
    for start in range(0, size, panel):
        end = min(start + panel, size)
        sums_DD[start:end, start:].addmm_(x_TD[:, start:end].T, x_TD[:, start:])
        sums_DD[end:, start:end] = sums_DD[start:end, end:].T


def sequences(tokens: Sequence[int], length: int, most: int) -> Tensor:
    """Cut at most ``most`` token ids into whole sequences: ``[S, length]``."""
    count = min(len(tokens), most) // length
    return torch.tensor(tokens[: count * length]).view(count, length)
