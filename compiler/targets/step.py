"""What a step takes and gives, and how the next decode step is made of the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NewType

import torch
from torch import Tensor

from tilewright.compiler.ops import SamplingBatch, sample
from tilewright.compiler.ops.sample import likeliest

StateHandle = NewType("StateHandle", int)
"""Names one sequence's state inside an executable, which alone knows where it is kept."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Work of one step: T tokens of N sequences, flat, sequence after sequence.

    ``tokens [T]`` and ``positions [T]`` int64 (positions of a sequence are consecutive and follow
    what its state holds); ``cu_seqlens [N + 1]`` cuts them into sequences; ``logit_rows [R]``
    names the tokens whose logits are wanted; ``states``: one handle a sequence, all different.
    ``sampling``: one row per logit row, None when no token is to be chosen.

    An input made by :meth:`ahead` leaves the sums to the device: ``previous`` is the output whose
    ``token_ids`` are this step's tokens, maybe still being computed; ``positions`` and
    ``sampling.positions`` are ``advanced`` behind, and ``tokens`` is not to be read.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    logit_rows: Tensor
    states: tuple[StateHandle, ...]
    sampling: SamplingBatch | None = None
    want_logits: bool = False
    previous: StepOutput | None = None
    advanced: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.states)

    def following(self, token_ids: Tensor) -> StepInput:
        """The decode step after this one of the same sequences: the tokens just chosen, one
        position on. What stays the same is the same object, which targets may look for.
        """
        sampling = self.sampling
        if sampling is not None:
            sampling = replace(sampling, positions=sampling.positions + 1)
        return replace(self, tokens=token_ids, positions=self.positions + 1, sampling=sampling)

    def ahead(self, output: StepOutput) -> StepInput:
        """As :meth:`following`, without a new tensor, and before ``output`` has been computed.

        Only for executables that run ahead. Everything but ``previous`` and ``advanced`` is the
        same object.
        """
        return StepInput(
            self.tokens,
            self.positions,
            self.cu_seqlens,
            self.logit_rows,
            self.states,
            self.sampling,
            self.want_logits,
            output,
            self.advanced + 1,
        )

    def continues(self, last: StepInput | None) -> bool:
        """Whether :meth:`ahead` made this of ``last``: then, where ``last`` was the executable's
        last step, its device has every tensor of this one already.
        """
        return (
            last is not None
            and self.advanced == last.advanced + 1
            and self.cu_seqlens is last.cu_seqlens
        )

    def settled(self) -> StepInput:
        """This input with nothing left to the device; waits for ``previous``."""
        if self.previous is None:
            return self
        token_ids, _ = self.previous.read()
        sampling = self.sampling
        if sampling is not None:
            sampling = replace(sampling, positions=sampling.positions + self.advanced)
        return replace(
            self,
            tokens=torch.tensor(token_ids),
            positions=self.positions + self.advanced,
            sampling=sampling,
            previous=None,
            advanced=0,
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """``token_ids [R]`` and ``finished [R]`` (an end token was chosen) on the device, where
    sampling was asked for; ``logits [R, vocab]`` float32 where they were.

    The tensors hold until the executable's next step. ``arrived`` waits for this step alone and
    gives ``token_ids`` and ``finished`` as lists; it can be asked twice, and while one later step
    is under way. Executables that run ahead have it.
    """

    token_ids: Tensor | None = None
    finished: Tensor | None = None
    logits: Tensor | None = None
    arrived: Callable[[], tuple[list[int], list[bool]]] | None = None

    def read(self) -> tuple[list[int], list[bool]]:
        """Token ids and finished flags, once they are there: not those of later steps."""
        if self.arrived is not None:
            return self.arrived()
        assert self.token_ids is not None and self.finished is not None
        return self.token_ids.tolist(), self.finished.tolist()


def finish_step(logits: Tensor, inputs: StepInput) -> StepOutput:
    """The end of a step where tokens are chosen on the host: ``logits [R, vocab]`` float32."""
    batch = inputs.sampling
    token_ids = finished = None
    if batch is not None and batch.is_greedy:
        token_ids = likeliest(logits)
    elif batch is not None:
        token_ids = sample.reference(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.seeds, batch.positions
        )
    if batch is not None and token_ids is not None:
        finished = (token_ids.unsqueeze(-1) == batch.end_tokens).any(-1)
    return StepOutput(token_ids, finished, logits if inputs.want_logits else None)
