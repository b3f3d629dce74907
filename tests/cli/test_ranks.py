"""Ranks of commands as processes: started, compared, killed and stopped in every phase.

All but the first test take seconds a case, and are slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewright
from tests.utils.test_child_process import gone
from tilewright.cli.main import main
from tilewright.cli.processes.run_follower import is_follower
from tilewright.compiler.targets.cpu import backend as choice
from tilewright.compiler.targets.cuda.collectives import peer_memory as peers
from tilewright.compiler.targets.cuda.memory_budget import open_device
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.grouping import Grouping, check_devices, read_grouping
from tilewright.distributed.handshake import RanksDifferError
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CompileError, ConfigError, RankError
from tilewright.loading import ranks
from tilewright.models import ShapeName
from tilewright.options import resolve as resolving
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig
from tilewright.utils.child_process import PYTHON

RUN = (*PYTHON, "-m", "tilewright.cli.main", "run", "--target", "null", "--tensor-parallel")
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


def asked(**options: object) -> SimpleNamespace:
    nothing = dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"))
    return SimpleNamespace(**{**nothing, **options})


def test_what_started_us_says_which_rank_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_grouping(asked()).is_alone and not is_follower(["--prompt", "x"])
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = read_grouping(asked())
    assert found.place is not None and found.parallel.tensor == 2 and not found.leads
    assert str(found.place.address) == "tcp:127.0.0.1:29511" and is_follower([])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # it listens there itself
    assert str(read_grouping(asked()).place.address) == "tcp:127.0.0.1:29512"
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4 in 2 processes; allowed: 2"):
        read_grouping(asked(tensor_parallel_size=4))
    with monkeypatch.context() as changed:
        changed.setenv("RANK", "2")
        with pytest.raises(ConfigError, match="RANK=2 of WORLD_SIZE=2; allowed: 0 to 1"):
            read_grouping(asked())
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"meet at 10\.0\.0\.1 without a token; allowed: TILEWR"):
        read_grouping(asked())
    for name in TORCHRUN:
        monkeypatch.delenv(name)
    lws = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.svc"}
    for name, value in lws.items():
        monkeypatch.setenv(name, value)
    found = read_grouping(asked(tensor_parallel_size=4))
    assert (found.machines.count, found.machines.rank, found.machines.host) == (2, 1, "leader.svc")
    assert is_follower([]) and not found.leads


def test_ranks_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="2 machines without --master-addr; allowed: the add"):
        read_grouping(asked(tensor_parallel_size=2, nnodes=2))
    with pytest.raises(ConfigError, match=r"3 ranks on 2 machines; allowed: as many on each"):
        read_grouping(asked(tensor_parallel_size=3, nnodes=2, master_addr="h"))
    with pytest.raises(ConfigError, match=r"machine 2 of 2; allowed: 0 to 1 \(--node-rank\)"):
        read_grouping(asked(tensor_parallel_size=2, nnodes=2, node_rank=2, master_addr="h"))
    with pytest.raises(ConfigError, match="devices 0,0; allowed: numbers from 0, each once"):
        read_grouping(asked(tensor_parallel_size=2, devices=(0, 0)))
    given = {"tensor_split": (2,), "comm_dtype": "bf16", "rank_timeout": 3.0}
    given |= {"collective_backend": "nccl"}
    for option, value in given.items():
        with pytest.raises(
            ConfigError, match=f"--{option.replace('_', '-')} for a single rank; allow"
        ):
            read_grouping(asked(**{option: value}))
    two = Grouping(ParallelConfig(tensor=4))
    with pytest.raises(ConfigError, match="4 ranks on target cuda: this machine has 2 GPUs"):
        check_devices(two, 2)
    with pytest.raises(ConfigError, match="device 3: this machine has 2 GPUs; allowed: up to 2"):
        check_devices(Grouping(ParallelConfig(tensor=2, devices=(0, 3))), 2)
    with pytest.raises(ConfigError, match="device 2: this machine has 2 GPUs"):
        check_devices(read_grouping(asked(devices=(2,))), 2)


def test_ranks_that_cannot_write_into_each_other_s_gpus_exchange_otherwise() -> None:
    for exchange in (None, "nccl"):
        words = {"nnodes": 2, "master_addr": "h", "collective_backend": exchange}
        far = asked(tensor_parallel_size=4, **words)
        check_devices(read_grouping(far), 2)
        check_devices(Grouping(ParallelConfig(tensor=16, exchange=exchange)), 16)
    far = asked(tensor_parallel_size=4, nnodes=2, master_addr="h", collective_backend="p2p")
    with pytest.raises(ConfigError, match="p2p for 4 ranks over several machines: a rank"):
        check_devices(read_grouping(far), 2)
    with pytest.raises(ConfigError, match="p2p for 16 ranks; allowed: up to 8, or --"):
        check_devices(Grouping(ParallelConfig(tensor=16, exchange="peers")), 16)


def test_gpus_that_do_not_reach_each_other_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check_access(devices: tuple[int, ...]) -> None:
        raise CompileError(f"GPUs {devices}")

    monkeypatch.setattr(peers, "check_access", check_access)
    monkeypatch.setattr(ranks, "gather_here", lambda *given, **more: pytest.fail("started"))
    with pytest.raises(CompileError, match=r"GPUs \(1, 3\)"):
        ranks._gather(Grouping(ParallelConfig(tensor=2, devices=(1, 3), exchange="peers")), "cuda")


def test_devices_of_a_target_that_has_cores_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--target", "reference", "--devices", "1", "--prompt", "x"]) == 2
    said = "--devices 1: target reference has cores; allowed: --target cuda"
    assert said in capsys.readouterr().err
    ranks = ("--tensor-parallel", "2", "--exchange", "nccl", "--prompt", "x")
    assert main(["run", "--target", "reference", *ranks]) == 2
    said = "--collective-backend nccl: target reference has one of its own; allowed: --target cuda"
    assert said in capsys.readouterr().err


def test_a_board_is_refused_ranks_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "2 ranks of target n300: a board deals a model over its own chips; allowed: without "
        "--tensor-parallel-size, and as --target a board by its chips: n150 (1), n300 (2), "
        "t3k (8), tg (32), p100 (1), p150 (1), p300 (2), qb2 (4), loudbox (8), bh-galaxy (32)"
    )
    given = ["--target", "n300", "--tensor-parallel", "2"]
    nowhere, shape = str(tmp_path / "none"), "shape:llama-3.2-1b"
    for command in (
        ["run", "--prompt", "x", "--model", nowhere],
        ["bench", "--model", nowhere],
        ["compile", shape, "-o", str(tmp_path / "out")],
    ):
        assert main([*command, *given]) == 2
        assert capsys.readouterr().err == f"tilewright: {said}\n"
    with pytest.raises(ConfigError, match="2 ranks of target n300: a board deals a model over"):
        get_target("n300").settled(CompileOptions(parallel=ParallelConfig(2)))
    assert not (tmp_path / "out").exists()


def test_onnxruntime_is_refused_ranks_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "2 ranks of backend onnxruntime: it exchanges nothing between ranks; allowed: "
        "--backend native (a C++ compiler), or without --tensor-parallel-size"
    )
    given = ["--backend", "onnxruntime", "--tensor-parallel", "2"]
    nowhere, shape = str(tmp_path / "none"), "shape:llama-3.2-1b"
    for command in (
        ["run", "--prompt", "x", "--model", nowhere],
        ["bench", "--model", nowhere],
        ["serve", "--model", nowhere],
        ["compile", shape, "-o", str(tmp_path / "out")],
    ):
        assert main([*command, *given]) == 2
        assert capsys.readouterr().err == f"tilewright: {said}\n"
    with pytest.raises(ConfigError, match="2 ranks of backend onnxruntime"):
        get_target("cpu").settled(CompileOptions(parallel=ParallelConfig(2)))
    monkeypatch.setattr(choice, "choose_backend", lambda progress: ("cpu", "no compiler"))
    for command in (["run", "--prompt", "x"], ["compile", shape, "-o", str(tmp_path / "out")]):
        assert main([*command, "--tensor-parallel", "2"]) == 2, "also where nobody has named it"
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_devices_are_those_of_the_target_that_a_folder_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "check_gpu", lambda: None)
    monkeypatch.setattr(resolving, "num_gpus", lambda: 2)

    def read(target: str, **options: object) -> ResolvedConfig:
        (tmp_path / "manifest.json").write_text(f'{{"target": "{target}"}}')
        return resolving.resolve(EngineConfig.of({"model": str(tmp_path), **options}))

    found = read("cuda", devices=(1,))
    assert found.target == "cuda" and found.grouping.parallel.devices == (1,)
    with pytest.raises(ConfigError, match="device 2: this machine has 2 GPUs"):
        read("cuda", devices=(2,))
    with pytest.raises(ConfigError, match="3 ranks on target cuda: this machine has 2 GPUs"):
        read("cuda", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="--devices 1: target null has cores; allowed: --tar"):
        read("null", devices=(1,))
    with pytest.raises(ConfigError, match="2 ranks of target t3k: a board deals a model over"):
        read("t3k", tensor_parallel_size=2)
    assert read('broken"').target == "cpu", "what is wrong is said when it is opened"


def test_ranks_that_differ_are_refused_though_another_said_so_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = SimpleNamespace(failure=None, tell=lambda *said: None, closed=0)

    def all_gather(data: bytes) -> list[bytes]:
        leader.failure = RankError("rank 1 failed: it differs")  # which rank 0 hears meanwhile
        return [data, b'{"code": "another"}']

    def close() -> None:
        leader.closed += 1

    leader.all_gather = all_gather
    group = SimpleNamespace(leader=leader, token=b"", close=close)
    monkeypatch.setattr(ranks, "_gather", lambda grouping, target: group)
    options = CompileOptions(parallel=ParallelConfig(tensor=2))
    job = ranks.RankConfig("m.gguf", "cpu", None, options, use_cache=False)
    grouping = Grouping(parallel=options.parallel)
    with pytest.raises(RanksDifferError, match=r"rank 0 has code .* and rank 1 another") as caught:
        ranks.compile_ranks(job, grouping, {}, lambda options, check: pytest.fail("went on"))
    assert caught.value.exit_code == 2 and leader.closed == 1


def test_how_ranks_exchange_is_said_once_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(executable: Executable, peers: object) -> None:
        executable.notes = (*executable.notes, "ranks exchange through NCCL")

    leader: Any = SimpleNamespace(size=2, rank=0, failure=None, all_gather=lambda data: [data] * 2)
    leader.check, leader.is_ready, leader.tell = (lambda *said: None,) * 3
    group = SimpleNamespace(leader=leader, token=b"", close=lambda: None)
    monkeypatch.setattr(ranks, "_gather", lambda grouping, target: group)
    monkeypatch.setattr(ranks, "meet", met)
    named = {"model": "shape:tiny", "target": "null", "tensor_parallel_size": 2}
    config = EngineConfig(**named, precision="bf16", use_cache=False)
    compiled = tilewright.compile(tilewright.load(ShapeName("tiny")), config)
    assert compiled.notes[-1] == "ranks exchange through NCCL"
    assert len(set(compiled.notes)) == len(compiled.notes)


def test_one_rank_runs_on_the_device_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked_for.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: asked_for[-1] if asked_for else 0)
    found = open_device(CompileOptions(parallel=ParallelConfig(devices=(1,))))
    assert found.index == 1 and open_device(CompileOptions()).index == 1


def followers_of(pid: int) -> list[int]:
    """The processes that a rank 0 has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and b"follow" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


@contextlib.contextmanager
def _running(size: int, limit: float, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*RUN, str(size), "--peer-limit", str(limit), "--prompt", "x"]
    command += ["--max-tokens", "130000", "--model", "shape:llama-3.2-1b", "--no-cache"]
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["loading", "decoding"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whoever_is_killed_or_stopped_nobody_stays(
    rank: int, phase: str, number: int, tmp_path: Path
) -> None:
    limit, text = 4.0, tmp_path / "text"
    with _running(3, limit, text) as process:
        deadline = time.monotonic() + 240
        while len(followers := followers_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        while phase == "decoding" and not text.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        if process.poll() is not None:
            pytest.skip("it was done before")
        everyone = [process.pid, *followers]
        os.kill(everyone[rank], number)
        if rank == 0 and number == signal.SIGSTOP:
            assert all(gone(pid) for pid in followers)  # by themselves, in 10 s
            return
        most = 150.0 if phase == "loading" else limit  # a stage of passes may take long
        assert process.wait(most + 10) != 0
        assert process.stderr is not None
        said = process.stderr.read().decode().strip().splitlines()
        if rank:
            assert process.returncode == 3 and f"rank {rank} " in said[-1], said
    assert all(gone(pid) for pid in everyone)


@pytest.mark.slow
def test_torchrun_starts_all_ranks() -> None:
    command = [*RUN[:-1], "--prompt", "x", "--max-tokens", "3", "--model", "shape:llama-3.2-1b"]
    ranks = []
    for rank in ("0", "1"):
        env = {**os.environ, **TORCHRUN, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE))
    assert [each.wait(120) for each in ranks] == [0, 0]
