"""The engine: request ids, checks, and the three calls of the contract."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.family import FAMILY
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    EngineError,
    Settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Executor
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights


class Engine:
    """Requests by id with their state. Calls name requests in any order."""

    def __init__(self, executor: Executor, settings: Settings) -> None:
        self._executor, self._settings = executor, settings
        self._sequences: dict[int, Any] = {}

    @torch.no_grad()
    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        """Start or restart requests with whole prompts: last-token logits ``[B, vocab]``.

        Other requests are unchanged. A failed call starts no request.

        Raises:
            ValueError: a doubled id, or a prompt that is empty, too long, or no row of integers.
        """
        self._check(request_ids, len(input_ids), "prompts")
        for request, tokens in zip(request_ids, input_ids, strict=True):
            self._check_prompt(request, tokens)
        if not request_ids:
            return self._no_logits()
        sequences, logits = self._executor.prefill([tokens.long() for tokens in input_ids])
        self.remove(request_ids)
        self._sequences.update(zip(request_ids, sequences, strict=True))
        return logits

    @torch.no_grad()
    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        """Append a token ``[B]`` to each request: logits ``[B, vocab]``.

        Raises:
            KeyError: an unknown id.
            ValueError: a doubled id, an invalid token, or a full request.
        """
        sequences = []
        for request in request_ids:
            if request not in self._sequences:
                raise KeyError(f"request {request!r} is not alive; prefill it first")
            sequences.append(self._sequences[request])
        self._check(request_ids, len(token_ids), "tokens")
        self._check_tokens("token_ids", token_ids)
        for request, sequence in zip(request_ids, sequences, strict=True):
            if sequence.length >= self._settings.max_positions:
                raise EngineError(
                    f"request {request!r} has all {sequence.length} positions that the model allows"
                )
        if not sequences:
            return self._no_logits()
        return self._executor.decode(sequences, token_ids.long())

    def remove(self, request_ids: Sequence[int]) -> None:
        """End requests. Unknown ids are ignored."""
        for request in request_ids:
            sequence = self._sequences.pop(request, None)
            if sequence is not None:
                self._executor.release(sequence)

    def rehearse(self) -> None:
        """Make calls with tokens on both devices, because first calls take longer.

        The device is idle at the end. Later calls queue after no rehearsal.
        """
        for count, length in self._executor.rehearsals():
            for device in ("cpu", self._executor.device):
                prompts, ids = torch.zeros(count, length, device=device).long(), range(count)
                self.prefill(ids, list(prompts))
                for _ in range(2):
                    self.decode(ids, prompts.view(-1)[:count])
                self.remove(ids)
        if self._executor.device.type == "cuda":
            torch.cuda.synchronize(self._executor.device)

    def _no_logits(self) -> Tensor:
        s, device = self._settings, self._executor.device
        return torch.empty(0, s.vocab_size, dtype=s.dtype, device=device)

    def _check(self, request_ids: Sequence[int], count: int, what: str) -> None:
        if len(set(request_ids)) != len(request_ids):
            twice = next(each for each in request_ids if list(request_ids).count(each) > 1)
            raise EngineError(f"request {twice!r} is named twice in one call")
        if count != len(request_ids):
            raise EngineError(f"{len(request_ids)} requests and {count} {what}")

    def _check_prompt(self, request: int, tokens: Tensor) -> None:
        what, most = f"the prompt of request {request!r}", self._settings.max_positions
        self._check_tokens(what, tokens)
        if not 1 <= len(tokens) <= most:
            raise EngineError(f"{what} has {len(tokens)} tokens; allowed: 1 to {most}")

    def _check_tokens(self, what: str, tokens: Tensor) -> None:
        """Check token values without waiting for a device. A GPU reads invalid ids as zeros."""
        if tokens.dim() != 1 or tokens.dtype not in (torch.int64, torch.int32):
            raise EngineError(
                f"{what}: {tokens.dtype} of shape {list(tokens.shape)}; allowed: int64, one axis"
            )
        if tokens.device.type == "cpu" and len(tokens):
            low, high = (int(each) for each in tokens.aminmax())
            last = self._settings.vocab_size - 1
            if low < 0 or high > last:
                wrong = low if low < 0 else high
                raise EngineError(f"{what}: token {wrong}; allowed: 0 to {last}")


def create_engine(
    model_config: Mapping[str, Any], weight_dir: str, device: str | torch.device = "cuda"
) -> Engine:
    """Load a model and prepare all memory and graphs. The memory lives as long as the engine.

    Args:
        model_config: keys of a Hugging Face Llama config.json.
        weight_dir: a directory with ``model.pt``, or another file of weights.
        device: ``cuda``, ``cuda:N`` or ``cpu``.

    Raises:
        EngineError: an invalid configuration, invalid weights, or a missing device.
    """
    place = read_device(device)
    settings = FAMILY.read_settings(model_config, place)
    tensors = load_weights(str(weight_dir), settings)
    executor = FAMILY.on_gpu if place.type == "cuda" else FAMILY.on_cpu
    engine = Engine(executor(tensors, settings, place), settings)
    del tensors  # freeing them after the rehearsal would empty the processor's caches
    engine.rehearse()
    return engine


def read_device(device: str | torch.device) -> torch.device:
    """Return a device by its name. It need not exist."""
    if not re.fullmatch("(cpu|cuda)(:[1-9]?[0-9])?", str(device)):
        raise EngineError(f"device {str(device)!r}; allowed: cuda, cuda:N, cpu")
    return torch.device(device)
