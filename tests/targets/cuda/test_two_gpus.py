"""Two GPUs with a process each against a single GPU: equal logits and output, through peer memory
and through NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.targets.cuda.test_invariance import run
from tests.targets.cuda.test_ragged import check_alike, logits_beside, uncaptured
from tests.targets.random_operations import random_operations
from tests.utils.test_child_process import gone
from tilewright.api import load
from tilewright.cli.arguments.bench import read_options
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.graphs.mixed_batch import MixedBatchRunner
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.ranks.sharded import ShardedExecutable
from tilewright.distributed.parallel import EXCHANGES
from tilewright.errors import RankError
from tilewright.loading.program import compile_program
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES
from tilewright.models.sources import stored_shapes
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.runtime.engine import Engine
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.utils.child_process import PYTHON

pytestmark = pytest.mark.multigpu

NUM_STEPS = {"fast": 512, "exact": 64}
"""Of eight sequences: 4,104 positions, and 520 in exact arithmetic, which is slow."""

VOCABULARY = 8192
LIMIT, PATIENCE = 2.0, 8.0
"""Seconds that ranks wait for each other, and that the end of a group takes at most."""


@contextlib.contextmanager
def engine(*more: str, model: str = "shape:llama-3.2-1b") -> Iterator[Engine]:
    argv = ["--model", model, "--target", "cuda", "--precision", "bf16"]
    options = read_options([*argv, "--no-results", "--no-cache", *more])
    assert options is not None
    source = load(options.model.path)
    limits = CompileOptions(max_batch=8, max_context=1024, compute=options.model.compute)
    executable = compile_program(source, options.model, limits, silent).executable
    try:
        yield Engine(executable)
    finally:
        started = time.monotonic()
        executable.close()
        assert time.monotonic() - started < PATIENCE


def prompts(vocabulary: int = 100_000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 17, 64, 130, 2, 33, 65, 200)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]


def forced(given: Engine, num_steps: int) -> Tensor:
    """Return logits of prompts and of fixed later tokens."""
    asked = prompts()
    ids = list(range(len(asked)))
    found = [given.prefill(ids, asked).clone()]
    for step in range(num_steps):
        tokens = torch.tensor([(7919 * step + 31 * each) % 100_000 for each in ids])
        found.append(given.decode(ids, tokens).clone())
    given.remove(ids)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("compute", "least_equal", "most_kl"), [("fast", 0.95, 1e-4), ("exact", 0.999, 1e-6)]
)
def test_logits_are_those_of_one_gpu(compute: str, least_equal: float, most_kl: float) -> None:
    """Random weights have close logits, so fast arithmetic may change the argmax."""
    num_steps = NUM_STEPS[compute]
    with engine("--compute", compute) as one:
        expected = forced(one, num_steps)
    with engine("--compute", compute, "--tensor-parallel", "2") as two:
        found, again = forced(two, num_steps), forced(two, num_steps)
    assert torch.equal(found, again)
    with engine("--compute", compute, "--tensor-parallel", "2", "--exchange", "nccl") as two:
        notes = " ".join(two.executable.notes)
        assert "exchange through NCCL (--collective-backend nccl)" in notes
        for _ in range(2):  # as captured, and replayed
            assert torch.equal(forced(two, num_steps), found)
    divergences = torch.cat([divergence(*each) for each in zip(expected, found, strict=True)])
    same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
    print(f"{compute}, {divergences.numel()} positions: argmax equal at {same:.4%}")
    print(f"KL: mean {divergences.mean():.2e}, most {divergences.max():.2e}")
    assert divergences.mean() <= most_kl and same >= least_equal


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence per row, in float64."""
    one, other = (torch.log_softmax(each.double(), -1) for each in (expected, found))
    return (one.exp() * (one - other)).sum(-1)


def test_greedy_and_drawn_tokens_are_those_of_either_exchange() -> None:
    found = []
    for exchange in EXCHANGES:
        with engine("--tensor-parallel", "2", "--exchange", exchange) as two:
            loop = EngineLoop(two.executable)
            sampling = [SamplingParams(max_tokens=20, temperature=t, seed=7) for t in (0.0, 1.0)]
            asked = [RequestState(i, (5, 6, 7), each) for i, each in enumerate(sampling)]
            loop.generate(asked)
            found.append([list(each.output) for each in asked])
    assert found[0] == found[1] and [len(each) for each in found[0]] == [20, 20]


@pytest.mark.parametrize(
    ("shape", "changes", "most"),
    [
        ("llama-3.2-1b", {}, 0.05),
        ("qwen3.5-35b-a3b", {"full_attention_interval": 2, "num_experts": 8}, 0.15),
    ],
    ids=["dense", "hybrid"],
)
def test_rows_ride_along_with_pieces_of_prompts(
    shape: str,
    changes: dict[str, object],
    most: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured graphs have equal bits with both collective backends.

    Separate steps differ by bfloat16 rounding. All experts are selected, so that near ties cannot
    differ.
    """
    monkeypatch.setattr(MixedBatchRunner, "_uncaptured", uncaptured)
    model, found = shallow(tmp_path, shape, **changes), []
    for exchange in EXCHANGES:
        with engine("--tensor-parallel", "2", "--exchange", exchange, model=model) as two:
            assert two.executable.capabilities.passes
            for is_mixed in (True, True, False):  # captured, replayed, and in separate steps
                logits = logits_beside(two.executable, 5, context=200, count=300, is_mixed=is_mixed)
                found.append(logits)
    mixed, again, separate, *others = found
    assert torch.equal(mixed, again)
    assert all(torch.equal(one, other) for one, other in zip(found, others, strict=False))
    check_alike(separate, mixed, most=most)


def test_a_row_s_bits_do_not_depend_on_its_company_or_on_a_prompt_s_cuts() -> None:
    """Strict steps on two ranks are batch-invariant."""
    run("strict_steps", "llama-3.2-1b", "bf16", "64", "--tensor-parallel", "2")


def test_two_machines_whose_gpus_are_hidden_from_each_other_exchange_by_nccl() -> None:
    """Two local processes, configured as two machines with a GPU each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PYTHON, "-m", "tilewright.cli.main", "run", "--model", "shape:llama-3.2-1b"]
    command += ["--target", "cuda", "--no-cache", "--prompt", "x", "--max-tokens", "8", "--json"]
    command += ["--tensor-parallel", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    ranks = []
    for rank in range(2):
        given = [*command, "--master-port", str(port), "--node-rank", str(rank)]
        own = {**os.environ, "TILEWRIGHT_TOKEN": "x", "CUDA_VISIBLE_DEVICES": str(rank)}
        process = subprocess.Popen(given, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ranks.append(process)
    try:
        said = [each.communicate(timeout=240) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], said
    note = "ranks exchange through NCCL (the GPU of rank 1 is hidden from another rank's process)"
    assert note in said[0][1].decode()
    assert len(json.loads(said[0][0])["tokens"]) == 8


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_run(how: signal.Signals, exchange: str) -> None:
    """In decode: a timely error names the rank, and no process or memory remains.

    Needs free GPUs, because foreign memory looks like a leak.
    """
    free = torch.cuda.mem_get_info(1)[0]
    given = ("--tensor-parallel", "2", "--peer-limit", str(LIMIT), "--exchange", exchange)
    with engine(*given) as two:
        two.prefill([0, 1], prompts()[:2])
        for _ in range(5):
            decode(two)
        executable = two.executable
        assert isinstance(executable, ShardedExecutable)
        pid = executable._ranks.leader.members[0].pid
        os.kill(pid, how)
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1"):
            for_a_minute(two)
        assert time.monotonic() - started < LIMIT + 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    ended = time.monotonic()
    while (left := free - torch.cuda.mem_get_info(1)[0]) > 64 << 20:
        assert time.monotonic() - ended < 5.0, f"{left >> 20} MiB of GPU 1: is somebody else there?"
        time.sleep(0.1)


MOMENTS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 14.0)
"""Seconds behind its start at which a rank goes: while ranks meet, load, capture, and decode."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_goes_at_any_moment_ends_the_command(
    rank: int, moment: float, how: signal.Signals, tmp_path: Path
) -> None:
    """The remaining process ends in time. Rank 0 prints a line and returns its exit code."""
    said = tmp_path / "said"
    command = [*PYTHON, "-c", _MAIN, "run", "--model", "shape:llama-3.2-1b", "--target", "cuda"]
    command += ["--precision", "bf16", "--no-cache", "--tensor-parallel", "2"]
    command += ["--peer-limit", str(LIMIT), "--max-tokens", "100000", "--prompt", "Why?"]
    with said.open("wb") as file:
        started = time.monotonic()
        first = subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path)
        other = first.pid
        try:
            other = rank_1_of(first.pid)
            time.sleep(max(0.0, moment - (time.monotonic() - started)))
            hit, left = (first.pid, other) if rank == 0 else (other, first.pid)
            assert first.poll() is None, said.read_text()
            os.kill(hit, how)
            hit_at = time.monotonic()
            while not (first.poll() is not None if rank else gone(left)):
                assert time.monotonic() - hit_at < LIMIT + 5.0 + 20.0
                time.sleep(0.02)
            took = time.monotonic() - hit_at
            text = said.read_text()
            print(f"rank {rank}, {moment:g} s, {how.name}: {took:.2f} s; {text[-300:]!r}")
            assert took < LIMIT + 5.0
            if rank == 1:
                assert first.returncode == 3 and "rank 1 " in text and gone(other)
        finally:
            for pid in (other, first.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            first.wait()


_MAIN = "import sys; from tilewright.cli.main import main; sys.exit(main())"


def rank_1_of(pid: int) -> int:
    """Return the follower process of a command."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in children.read_text().split() if children.exists() else ():
            if b"loading.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.02)
    raise AssertionError("no rank 1")


@pytest.mark.slow
def test_a_hundred_thousand_operations_on_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 64 steps, ranks compare steps, slots, positions and tokens.

    A difference ends the run.
    """
    monkeypatch.setenv("TILEWRIGHT_CHECK_RANKS", "1")
    with engine("--tensor-parallel", "2", model=shallow(tmp_path)) as two:
        loop = EngineLoop(two.executable)
        loop.warm_up()
        assert random_operations(loop, 100_000, vocabulary=VOCABULARY) > 5_000


def shallow(folder: Path, shape: str = "llama-3.2-1b", **changes: object) -> str:
    """Two layers with a model's width, and some tokens, because the host dominates a step of a 1B
    model.
    """
    config = {**SHAPES[shape], "num_hidden_layers": 2, "vocab_size": VOCABULARY, **changes}
    byte_tokenizer(VOCABULARY, "a test").save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = architecture_of(str(config["model_type"])).model
        module = model(config_of_hf(config, where="a test"))
    tensors = {
        name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 + ("norm" in name)
        for name, shape in stored_shapes(module).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def decode(two: Engine) -> None:
    two.decode([0, 1], torch.tensor([5, 6]))


def for_a_minute(two: Engine) -> None:
    started = time.monotonic()
    while time.monotonic() - started < 60:
        decode(two)
