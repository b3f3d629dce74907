"""Mixers on a GPU. What sequences remember of linear attention lies by their seats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import (
    QUERIES,
    CudaExecutor,
    CudaSequence,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.hybrid_settings import (
    LENGTH_EPS,
    HybridSettings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import power
from tilewright.compiler.targets.cuda.engine_generator.parts.launches import BLOCK, Tokens
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_kernels import (
    convolve_token_kernel,
    delta_kernel,
    expert_product_kernel,
    expert_sum_kernel,
    gate_kernel,
    norm_heads_kernel,
    order_kernel,
    route_kernel,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_steps import (
    BoundMixer,
    MixedExecutor,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Values

FEW_PAIRS = 64
"""Pairs of a row and an expert up to which each reads its expert's weights by itself."""

WARMING, MOST_WARMING = (1, 12, 200, 1100), 2048
"""Tokens of prompts that are run once so that their kernels are compiled; the most of others."""


class HybridCudaExecutor(MixedExecutor, CudaExecutor):
    """``windows [seats, linear layers, channels, taps - 1]`` and ``memories [seats, linear layers,
    heads, K, V]``, float32. Prompts are launched, not captured: their sequences differ in number.
    """

    settings: HybridSettings
    prompt_sizes = ()
    _spans: Tensor

    def trial_sizes(self) -> Iterable[int]:
        return (*WARMING, *(min(self._rows_of(each), MOST_WARMING) for each in QUERIES))

    def _make_seats(self, state_bytes: int = 0) -> None:
        s = self.settings
        window = s.num_linear, s.mixed_width, s.taps - 1
        memory = s.num_linear, s.value_heads, s.key_dim, s.value_dim
        super()._make_seats(4 * (math.prod(window) + math.prod(memory)))
        self._windows = self._seats.tensor(window, torch.float32)
        self._memories = self._seats.tensor(memory, torch.float32)

    def _prompts(self, sequences: Sequence[CudaSequence], prompts: Sequence[Tensor]) -> Tensor:
        counts = [len(prompt) for prompt in prompts]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        seats = [each.seat for each in sequences]
        self._spans = self._send(torch.tensor([firsts, counts, seats]))
        return super()._prompts(sequences, prompts)

    def gated_attend(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        x = values[each.does.x]
        s, width = self.settings, x.shape[1]
        qkv = x.new_empty(len(x), s.qkv_heads * s.head_dim)
        norms = each.tensors["q_norm"], each.tensors["k_norm"]
        given = qkv, x, *norms, width, s.eps
        self.launch(norm_heads_kernel, (len(x), s.qkv_heads), *given, **self._heads())
        heads = self.attended(each, qkv, batch)
        out, size = torch.empty_like(heads), heads.shape[1]
        grid = len(x), -(-size // BLOCK)
        gates = x[:, width - size :]
        self.launch(gate_kernel, grid, out, heads, gates, size, width, BLOCK=BLOCK)
        return out

    def delta_rule(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        x = values[each.does.x]
        s, place = self.settings, self.settings.place_of(each.layer)
        if batch.starts is None:
            mixed = self._convolve_tokens(each, x, batch, place)
            positions, seats = batch.positions, batch.seats
            assert positions is not None and seats is not None
            firsts = counts = positions
        else:
            mixed = self._convolve_prompts(each, x, batch.starts, place)
            firsts, counts, seats = self._spans
        out = x.new_empty(len(x), s.value_heads * s.value_dim)
        names = "a_log", "dt_bias", "norm"
        size = s.key_dim * s.value_dim * s.value_heads
        self.launch(
            delta_kernel,
            (len(seats), s.value_heads),
            *(out, mixed, x, *(each.tensors[name] for name in names), self._memories),
            *(seats, firsts, counts, x.shape[1], self._memories.stride(0), place * size),
            *(s.eps, LENGTH_EPS),
            H=s.value_heads,
            G=s.key_heads,
            K=s.key_dim,
            V=s.value_dim,
            KEYS=power(s.key_dim),
            VALUES=power(s.value_dim),
            FRESH=batch.starts is not None,
            num_warps=8 if s.key_dim * s.value_dim > 4096 else 4,
        )
        return out

    def _convolve_tokens(self, each: BoundMixer, x: Tensor, batch: Tokens, place: int) -> Tensor:
        s, width = self.settings, self.settings.mixed_width
        mixed = torch.empty(len(x), width, device=self.device)
        self.launch(
            convolve_token_kernel,
            (len(x), -(-width // BLOCK)),
            *(mixed, x, each.tensors["convolution"], self._windows, batch.seats, batch.positions),
            *(width, x.shape[1], self._windows.stride(0), place * width * (s.taps - 1)),
            TAPS=s.taps,
            BLOCK=BLOCK,
        )
        return mixed

    def _convolve_prompts(self, each: BoundMixer, x: Tensor, starts: Tensor, place: int) -> Tensor:
        """``[T, channels]``; before a prompt lie zeros, and its last columns are its window."""
        s = self.settings
        own, weight = x[:, : s.mixed_width].float(), each.tensors["convolution"][:, 0]
        row, total = torch.arange(len(x), device=self.device), own * weight[:, -1]
        for back in range(1, s.taps):
            source = row - back
            seen = own[source.clamp(min=0)].where((source >= starts)[:, None], 0.0)
            total += seen * weight[:, -1 - back]
        firsts, counts, seats = self._spans
        backs = torch.arange(s.taps - 1, 0, -1, device=self.device)
        source = (firsts + counts)[:, None] - backs
        kept = own[source.clamp(min=0)].where((source >= firsts[:, None])[..., None], 0.0)
        self._windows[seats, place] = kept.transpose(1, 2)
        return F.silu(total)

    def experts(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        does = each.does
        out, x = values[does.out], values[does.x]
        logits, shared = values[does.logits], values[does.shared]
        s, num_pairs = self.settings, len(x) * self.settings.num_chosen
        shares = torch.empty(len(x), s.num_chosen, device=self.device)
        chosen = torch.empty_like(shares, dtype=torch.int32)
        self.launch(
            route_kernel,
            (len(x),),
            *(shares, chosen, logits, batch.positions, s.num_experts, logits.shape[1]),
            C=s.num_chosen,
            EXPERTS=power(s.num_experts),
            CHOICES=power(s.num_chosen),
        )
        order = starts = chosen
        if num_pairs > FEW_PAIRS:
            order = torch.empty_like(chosen)
            starts = chosen.new_empty(s.num_experts + 1)
            made = order, starts, chosen, num_pairs
            block = min(4096, power(num_pairs)) if batch.starts is None else 4096
            self.launch(order_kernel, (s.num_experts + 1,), *made, BLOCK=block)
        inner = x.new_empty(num_pairs, s.expert_size)
        products = x.new_empty(num_pairs, s.hidden_size)
        pairs = chosen, order, starts
        self._expert_product(inner, x, each.tensors["gates_ups"], pairs, is_first=True)
        self._expert_product(products, inner, each.tensors["downs"], pairs, is_first=False)
        grid = len(x), -(-s.hidden_size // BLOCK)
        given = out, products, shares, chosen, shared, logits
        sizes = s.hidden_size, s.num_experts, logits.shape[1]
        self.launch(expert_sum_kernel, grid, *given, *sizes, C=s.num_chosen, BLOCK=BLOCK)
        return out

    def _expert_product(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        pairs: tuple[Tensor, Tensor, Tensor],
        *,
        is_first: bool,
    ) -> None:
        """Of gates and ups, where it ``is_first``, or of what comes of them."""
        alone, width = len(out) <= FEW_PAIRS, x.shape[1]
        outputs = 8 if alone else 32
        groups = len(out) if alone else self.settings.num_experts
        self.launch(
            expert_product_kernel,
            (-(-out.shape[1] // outputs), groups),
            *(out, x, weight, *pairs, out.shape[1]),
            WIDTH=width,
            C=self.settings.num_chosen,
            OWN=not is_first,
            PAIRS=1 if alone else 16 if len(x) <= 1024 else 64,
            OUTPUTS=outputs,
            COLUMNS=min(512 if alone else 128, power(width)),
            SWIGLU=is_first,
            ALONE=alone,
            num_warps=4,
        )
