"""How a machine is dealt out among replicas; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright.cli.arguments.serve import read_serve_options
from tilewright.compiler.devices import usable_cpus
from tilewright.distributed.grouping import Grouping
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import ConfigError
from tilewright.serve.engines import replicas
from tilewright.serve.engines.replicas import replicas_of
from tilewright.serve.web.settings import Replica

SINGLE_RANK = ("--replicas", "1")


def of_options(argv: list[str]) -> tuple[Replica, ...]:
    """What `tilewright serve` deals for a command line."""
    given = read_serve_options(argv)
    model, threads = given.model, given.model.config.num_threads
    dealing = {"devices": given.devices, "threads": threads}
    return replicas_of(given.server.replicas, model.target, model.grouping, **dealing)


def dealt(*argv: str, cores: tuple[int, ...] = (), monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments and cores of each replica of a CPU server on a machine of these cores."""
    monkeypatch.setattr(replicas, "usable_cpus", lambda: cores)
    found = of_options(["shape:tiny", *argv])
    return [(each.arguments, each.cores) for each in found]


@pytest.mark.parametrize(
    ("argv", "cores", "expected"),
    [
        ("", (0, 1), [((), ())]),
        ("--replicas 2", (4, 0), [("1", (4,)), ("1", (0,))]),
        ("--data-parallel-size 2", (0, 1, 2), [("2", (0, 1)), ("1", (2,))]),
        ("--replicas 2 --threads 2", tuple(range(8)), [("1", (0,)), ("1", (1,))]),
        ("--replicas 2 --threads 6", (0, 1), [("3", (0,)), ("3", (1,))]),
        ("--replicas 3 --threads 3", (0, 1), [("1", ()), ("1", ()), ("1", ())]),
    ],
)
def test_cores_and_threads_are_divided(
    argv: str,
    cores: tuple[int, ...],
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wanted = [
        ((*SINGLE_RANK, "--num-threads", said) if said else (), own) for said, own in expected
    ]
    assert dealt(*argv.split(), cores=cores, monkeypatch=monkeypatch) == wanted
    is_shared = len(cores) < len(expected)
    assert ("3 replicas share 2 cores" in capfd.readouterr().err) == is_shared


def test_gpus_are_dealt_and_seen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def dealt(count: int, devices: tuple[int, ...] = (), ranks: int = 1) -> list[Any]:
        found = replicas_of(count, "cuda", Grouping(ParallelConfig(ranks)), devices=devices)
        return [(each.arguments, dict(each.environment)) for each in found]

    monkeypatch.setattr(replicas, "num_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own, name = (*SINGLE_RANK, "--devices", "0"), "CUDA_VISIBLE_DEVICES"
    two = (*SINGLE_RANK, "--devices", "0,1")
    assert dealt(1) == [((), {})], "as it was"
    assert dealt(2) == [(own, {name: "0"}), (own, {name: "1"})]
    assert dealt(2, (3, 1)) == [(own, {name: "3"}), (own, {name: "1"})]
    assert dealt(2, (3, 1, 0, 2), 2) == [(two, {name: "3,1"}), (two, {name: "0,2"})]
    monkeypatch.setenv(name, "GPU-a,GPU-b,7,GPU-d")
    assert dealt(2, (3, 2)) == [(own, {name: "GPU-d"}), (own, {name: "7"})]
    for count, devices, ranks, said in (
        (5, (), 1, "--replicas 5 on devices 0,1,2,3,4: this machine has 4 GPUs; allowed: "),
        (2, (0, 4), 1, "--replicas 2 on devices 0,4: this machine has 4 GPUs"),
        (2, (0,), 1, "--devices 0 for 2 replicas of 1 ranks; allowed: 2 numbers, each once"),
        (2, (0, 0), 1, "--devices 0,0 for 2 replicas"),
        (2, (0, 1), 2, "--devices 0,1 for 2 replicas of 2 ranks; allowed: 4 numbers, each once"),
    ):
        with pytest.raises(ConfigError, match=said):
            dealt(count, devices, ranks)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--replicas 0", "allowed: integers, 1 to 64"),
        ("--replicas 3 --threads 2", "of 1 ranks with 2 threads; allowed: up to 2 replicas"),
        ("--replicas 2 --threads 2 --nodes 2", "of 2 ranks with 2 threads; allowed: up to 1"),
        ("--replicas 2 --devices 0,1", "target cpu has cores; allowed: --target cuda"),
        (
            "--replicas 2 --nnodes 2 --nodes 2 --master-addr 127.0.0.1",
            "--replicas 2 of a group that others start too; allowed: a server a group",
        ),
    ],
)
def test_what_cannot_be_dealt_is_said(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_options(["shape:tiny", *argv.split()])


def test_an_engine_reads_its_own_share_behind_the_users_options() -> None:
    user = ["shape:tiny", "--replicas", "2", "--tensor-parallel", "2", "--threads", "8"]
    for own in of_options(user):
        options = read_serve_options([*user, *own.arguments], last_wins=True)
        assert (options.server.replicas, options.model.config.num_threads) == (1, 2)
        assert options.model.grouping.parallel.tensor == 2


def test_hyper_threads_of_a_core_and_cores_of_a_package_are_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cpus(tmp_path) == tuple(range(8))
    for cpu in range(8):  # two packages of two cores of two threads, as Linux numbers them
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "core_id").write_text(f"{cpu // 2 % 2}\n")
    assert usable_cpus(tmp_path) == (0, 4, 2, 6, 1, 5, 3, 7)
