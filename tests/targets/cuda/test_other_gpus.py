"""Whole models with the op tables of compute capability 8.9, on any GPU, near the reference."""

from __future__ import annotations

import statistics
from typing import Any, cast

import pytest
import torch

from tests.targets.cuda.test_architectures_cuda import SHAPES as ON_CUDA
from tests.targets.cuda.test_architectures_cuda import SMALL
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, Kept, in_pieces, noise
from tests.targets.cuda.test_steps_experts import LARGER
from tests.tiny import compiled, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.kernels.common.table import ADA, Gpu
from tilewright.compiler.targets.cuda.target import for_gpu
from tilewright.compiler.targets.interface.base import Executable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

DENSE: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "num_heads": 8},
    **{"num_kv_heads": 2, "vocab_size": 8192, "max_positions": 2048},
}
"""Two layers with real sizes."""
EXPERTS: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 512, "num_heads": 8, "num_kv_heads": 2},
    **{"head_dim": 64, "num_experts": 16, "experts_per_token": 4, "expert_size": 256},
    **{"vocab_size": 8192, "max_positions": 2048},
}
EXCEPT = {"kv_cache": "bf16", "embedding": "bf16"}
REAL = {
    "dense": DENSE,
    "experts": EXPERTS,
    "hybrid": {"model_type": "qwen3_5_moe", **ON_CUDA["qwen3_5_moe"], **LARGER},
}


def on_other_gpu(model: Any, name: str, **options: Any) -> CudaExecutable:
    """Return an executable without CUDA C++ kernels."""
    precision, how = precision_of(name, **EXCEPT), {"compute": "fast", **options}
    made = compiled(model, "cuda", precision=precision, **how)
    assert isinstance(made, CudaExecutable)
    found = for_gpu(made, ADA)
    assert not found._steps.is_native and "CUDA C++ kernels, but" in found._steps.kernels()
    assert found.capabilities.invariant == "none"
    return found


def check(model: Any, name: str, length: int, num_decoded: int) -> None:
    """Compare a prompt's last token and decoded tokens with the reference.

    A few rows may differ: rounding changes the selection of experts with almost equal logits.
    """
    vocab_size, num_tokens = model.config.vocab_size, length + num_decoded
    tokens = random_tokens(num_tokens, vocab_size=vocab_size)
    options: Any = {"max_context": max(64, num_tokens)}
    precision = precision_of(name, **EXCEPT)
    expected = prefill(compiled(model, precision=precision, **options), tokens)[length - 1 :]
    executable = on_other_gpu(model, name, **options)
    got = in_pieces(cast(Executable, Kept(executable)), tokens, length)
    found = [noise(*rows) for rows in zip(got, expected, strict=True)]
    assert 0 < statistics.median(found) < 2 * BF16_NOISE and max(found) < 0.5
    executable.close()


@pytest.mark.parametrize("name", ["bf16", "q40", "q80", "fp8"])
def test_a_dense_model_is_near_the_reference(name: str) -> None:
    size = {**SMALL, "intermediate_size": 64} if name != "bf16" else SMALL
    check(tiny_model(std=0.2, hidden_size=16 if name == "bf16" else 64, **size), name, 5, 2)


def test_without_a_compiler_a_note_says_so() -> None:
    """A GPU of another compute capability has no CUDA C++ kernels, so nothing is missing."""
    options: Any = {"precision": precision_of("bf16"), "compute": "fast"}
    made = compiled(tiny_model(hidden_size=16, **SMALL), "cuda", **options)
    assert isinstance(made, CudaExecutable)
    notes = [made.notes]
    reason = "libnvrtc.so: cannot open shared object file"
    for gpu in (ADA, Gpu((9, 0), reason)):
        made = for_gpu(made, gpu)
        notes.append(made.notes)
    assert notes[0] == notes[1]
    assert notes[2] == (*notes[0], f"Triton kernels in place of CUDA C++, slower: {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["llama", *ON_CUDA])
def test_every_architecture_is_near_the_reference(model_type: str) -> None:
    changes = {"hidden_size": 16, **SMALL, **ON_CUDA.get(model_type, {})}
    check(tiny_model(std=0.2, model_type=model_type, **changes), "bf16", 6, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("shape", REAL)
def test_real_sizes_are_near_the_reference(shape: str, name: str) -> None:
    """A prompt of several pages, and decode steps after it."""
    check(tiny_model(std=0.05, **REAL[shape]), name, 150, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_users", [1, 8, 32])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_k": 4}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("shape", REAL)
def test_generated_tokens_are_the_reference_s(
    shape: str, params: dict[str, Any], num_users: int
) -> None:
    """Nine of ten tokens are among the reference's likeliest, through captured steps."""
    model, count, num_likely = tiny_model(std=0.05, **REAL[shape]), 12, params.get("top_k", 1)
    vocab_size, options = model.config.vocab_size, {"max_context": 128, "max_batch": num_users}
    executable = on_other_gpu(model, "bf16", **options)
    requests = [
        RequestState(
            user,
            (*random_tokens(3 + user, vocab_size=vocab_size, seed=user),),
            SamplingParams(max_tokens=count, seed=user, **params),
        )
        for user in range(num_users)
    ]
    EngineLoop(executable).generate(requests)
    executable.close()
    reference, are_likely = compiled(model, precision=precision_of("bf16"), max_context=128), []
    for request in requests[:: max(1, num_users // 4)]:
        tokens = [*request.prompt, *request.output]
        assert len(request.output) == count
        logits = prefill(reference, tokens)[-count - 1 : -1]
        own = logits.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        least = logits.topk(num_likely).values[:, -1]
        are_likely.append(own >= least - 6 * BF16_NOISE * logits.std())
    assert torch.cat(are_likely).float().mean() > 0.9
