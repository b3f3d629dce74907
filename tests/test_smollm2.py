"""The default model: reference against transformers, CPU against reference, limits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.tiny import compiled, lowered, prefill
from tilewright.compiler.ir.info import info
from tilewright.compiler.precision import load_precision
from tilewright.compiler.precision.auto import SMALL
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cpu.native.library.build import find_compiler
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.cases.prompts import bench_text, sample_prompts
from tilewright.evaluate.measure.accuracy import divergence
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import loads
from tilewright.llm import LLM
from tilewright.models import LoadedModel, load_model
from tilewright.runtime.engine import Engine
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

pytestmark = pytest.mark.weights

ROOT = Path(__file__).parents[1]
CONTEXT = 512
NUM_LAYERS = 30


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """A single torch thread, fixtures included: on a busy machine two threads are much slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def tokens(model: LoadedModel) -> list[int]:
    return model.tokenizer.encode(bench_text("accuracy.txt"))[:320]


@pytest.fixture(scope="module")
def reference(model: LoadedModel) -> Executable:
    """``--precision reference --target reference``."""
    return build(model, "reference", "reference", max_batch=5)


def build(
    model: LoadedModel, target: str, precision: str, *, compute: str = "exact", max_batch: int = 1
) -> Executable:
    return compiled(
        model,
        target,
        precision=load_precision(precision),
        compute=compute,
        max_batch=max_batch,
        max_context=CONTEXT,
        num_threads=2,
    )


@pytest.fixture(scope="module")
def theirs(model: LoadedModel) -> transformers.LlamaForCausalLM:
    """transformers' Llama with its rope, and dequantized tensors from the file."""
    config = model.config
    assert config.rope.scaling is None
    found = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            attn_implementation="eager",
        )
    )
    tensors = {name: model.checkpoint.get(name) for name, _ in model.module.named_parameters()}
    left = found.load_state_dict(tensors, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    found.tie_weights()
    return found.eval()


def test_the_reference_is_transformers(
    reference: Executable, theirs: transformers.LlamaForCausalLM, tokens: list[int]
) -> None:
    """The error over 320 positions is 5.5e-5, for logits up to 30. Half of them are computed."""
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens[:160]])).logits[0]
    difference = (prefill(reference, tokens[:160], [128]) - expected).abs().max()
    assert expected.std() > 1
    assert float(difference) <= 1e-4


def chats(model: LoadedModel, count: int) -> list[tuple[int, ...]]:
    """Sample questions as in the demo."""
    questions = [prompt.text for prompt in sample_prompts("questions.json")[:count]]
    return [
        tuple(
            model.tokenizer.encode(
                model.tokenizer.apply_chat_template([{"role": "user", "content": text}]),
                add_special=False,
            )
        )
        for text in questions
    ]


def answered(
    model: LoadedModel, reference: Executable, *, count: int, max_tokens: int
) -> list[RequestState]:
    """Greedy answers of the reference."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(model.tokenizer.eos_ids))
    requests = [
        RequestState(index, prompt, params) for index, prompt in enumerate(chats(model, count))
    ]
    EngineLoop(reference).generate(requests)
    assert len({tuple(request.output) for request in requests}) == count
    assert max(len(request.output) for request in requests) == max_tokens
    return requests


def test_greedy_text_is_transformers_likeliest(
    model: LoadedModel, reference: Executable, theirs: transformers.LlamaForCausalLM
) -> None:
    """Every token is transformers' argmax after the previous tokens, which implies equal greedy
    text. The slow test below runs `generate`.
    """
    for request in answered(model, reference, count=2, max_tokens=16):
        fed = torch.tensor([[*request.prompt, *request.output[:-1]]])
        with torch.no_grad():
            logits = theirs(fed).logits[0, len(request.prompt) - 1 :]
        assert request.output == logits.argmax(-1).tolist()


@pytest.mark.slow
def test_greedy_text_is_transformers_generate(
    model: LoadedModel, reference: Executable, theirs: transformers.LlamaForCausalLM
) -> None:
    ends = list(model.tokenizer.eos_ids)
    for request in answered(model, reference, count=5, max_tokens=64):
        prompt = torch.tensor([request.prompt])
        with torch.no_grad():
            generated = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        assert request.output == generated[0, len(request.prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["performance", "bf16", "all-bfp8", "all-bfp4", "accuracy"])
def test_the_exact_cpu_is_the_reference_on_the_same_weights(
    model: LoadedModel, tokens: list[int], name: str
) -> None:
    """256 positions prefilled and 64 decoded."""
    oracle = build(model, "reference", name)
    expected = prefill(oracle, tokens)
    del oracle
    cpu = build(model, "cpu", name)
    found = prefill(cpu, tokens, [256] + [1] * 64)
    cpu.close()
    agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    rows = zip(expected, found, strict=True)
    kl = sum(divergence(wanted, row) for wanted, row in rows) / len(tokens)
    assert len(found) == len(tokens) >= 200
    assert agreement >= 0.995
    assert kl <= 1e-4


@pytest.fixture(scope="module")
def fast(model: LoadedModel) -> Iterator[Executable]:
    made = build(model, "cpu", "all-bfp8", compute="fast", max_batch=8)
    yield made
    made.close()


@pytest.mark.slow
def test_rows_of_the_fast_mode_are_what_they_are_alone(
    model: LoadedModel, fast: Executable, tokens: list[int]
) -> None:
    """Eight sequences decoded together and separately, with int8 activations."""
    engine = Engine(fast)
    prompts = [torch.tensor(tokens[10 * n : 17 * n + 3]) for n in range(1, 9)]
    steps = torch.tensor(tokens[-8:])
    engine.prefill(range(8), prompts)
    together = engine.decode(range(8), steps)
    engine.remove(range(8))

    def alone(index: int) -> Tensor:
        engine.prefill([0], [prompts[index]])
        return engine.decode([0], steps[index : index + 1])[0]

    expected = torch.stack([alone(index) for index in range(8)])
    engine.remove([0])
    difference = float((together - expected).abs().max())
    assert expected.std() > 1
    assert difference <= 1e-4


def test_the_fast_cpu_answers_a_question(model: LoadedModel, fast: Executable) -> None:
    """Teacher forcing can pass with wrong output."""
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": "What is gravity?"}])
    ends = tuple(model.tokenizer.eos_ids)
    prompt = tuple(model.tokenizer.encode(text, add_special=False))
    request = RequestState(0, prompt, SamplingParams(max_tokens=40, stop_token_ids=ends))
    EngineLoop(fast).generate([request])
    assert model.tokenizer.decode(request.output).startswith("Gravity is a fundamental concept")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_default_configuration_names_the_capital_of_france(smollm2_path: Path) -> None:
    """Under `stored`, 8-bit activations decide a near tie in the prompt."""
    with LLM(smollm2_path, max_num_seqs=1, max_context=512) as llm:
        assert llm.compiled.precision.name == SMALL
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert answer.text == "The capital of France is Paris."


EXPECTED = {
    "match_calls": 7 * NUM_LAYERS + 2,
    "match_rms_norm": 2 * NUM_LAYERS + 1,
    "match_rope": 2 * NUM_LAYERS,
    "match_swiglu": NUM_LAYERS,
    "merge_parallel_linears": 2 * NUM_LAYERS,
    "fuse_swiglu_packed": NUM_LAYERS,
    "fuse_add_rms_norm": 2 * NUM_LAYERS,
    "insert_state": NUM_LAYERS,
    "gather_logit_rows": 1,
    "fuse_rope_attention": NUM_LAYERS,
}


def test_every_fusion_fires_its_expected_count(model: LoadedModel) -> None:
    graph_module, ctx = lowered(model, precision=load_precision("performance"))
    counts = {report.name: report.num_rewrites for report in ctx.reports}
    assert {each: counts.get(each) for each in EXPECTED} == EXPECTED
    layers = Counter(
        fqn.split(".")[2]
        for node in graph_module.graph.nodes
        if node.op == "call_function" and (fqn := info(node).fqn).startswith("model.layers.")
    )
    assert len(layers) == NUM_LAYERS
    assert max(layers.values()) <= 12


def run_alone(path: Path, name: str, *options: str) -> tuple[Result, float]:
    """Run 128 tokens in and a token out in a separate process.

    Return its result and total seconds.
    """
    argv = ["--case", "performance-ci-1", "--precision", name, "--no-results", "--json"]
    argv += ["--max-generated-tokens", "1", "--repeat-batches", "1", *options]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tilewright.cli.main", "bench", "--model", str(path), *argv],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        check=True,
    )
    return loads(done.stdout.decode()), time.perf_counter() - started


TRITON_BYTES = 110e6
"""What torch.export imports and maps where triton is installed, used or not. Measured: 103 MB."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all-bfp8", "bf16"])
def test_peak_memory(smollm2_path: Path, name: str) -> None:
    """Weights, cache, and 700 MB. test_cpu_peak.py has a fast test with another model."""
    result, _ = run_alone(smollm2_path, name, "--no-cache")
    assert result.peak_memory_bytes and result.resident_bytes and result.cache_bytes
    allowed = result.resident_bytes + result.cache_bytes + 700e6
    if find_spec("triton") is not None:
        allowed += TRITON_BYTES
    assert result.peak_memory_bytes <= allowed


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.parametrize("name", ["all-bfp8", "bf16"])
def test_start_to_first_token(smollm2_path: Path, name: str) -> None:
    """Slow, because a busy machine fails."""
    _, seconds = run_alone(smollm2_path, name, "--no-cache")
    assert seconds <= 20


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.parametrize("name", ["all-bfp8", "bf16"])
def test_second_start_to_first_token(smollm2_path: Path, name: str) -> None:
    """The cache has the program. Most of the time is computation and the import of torch."""
    run_alone(smollm2_path, name)
    _, seconds = run_alone(smollm2_path, name)
    assert seconds <= 5
