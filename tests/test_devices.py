"""The device table, mesh spellings and the description of the host."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tilewright.compiler.devices import BOARDS, DEVICES, describe_cpu, get_device
from tilewright.errors import ConfigError


def test_chips() -> None:
    chips = {name: DEVICES[name].num_chips for name in DEVICES}
    wormhole = {"n150": 1, "n300": 2, "t3k": 8, "tg": 32}
    blackhole = {"p100": 1, "p150": 1, "p300": 2, "qb2": 4, "loudbox": 8, "bh-galaxy": 32}
    assert chips == {"cpu": 1, **wormhole, **blackhole, "h200": 1}
    assert (*wormhole, *blackhole) == BOARDS
    assert all(device.source for device in DEVICES.values())


def test_boards_have_the_published_grids_and_banks() -> None:
    for name in ("n150", "n300", "t3k"):
        assert (DEVICES[name].grid, DEVICES[name].l1_bytes) == ((8, 8), 1_393_312)
    assert [DEVICES[name].num_banks for name in ("n150", "p100", "p150")] == [12, 7, 8]
    for name in ("p100", "p150", "p300", "qb2", "loudbox", "bh-galaxy"):
        assert DEVICES[name].architecture == "blackhole"
    assert DEVICES["tg"].grid is None, "unknown"
    assert (DEVICES["h200"].target, DEVICES["h200"].num_cores) == ("cuda", 132)


def test_get_device() -> None:
    assert get_device("N150") is DEVICES["n150"]
    with pytest.raises(ConfigError, match="unknown device 'n500'; allowed: cpu, n150, n300, t3k"):
        get_device("n500")


def write_table(folder: Path, *cores: tuple[int, int]) -> Path:
    """A table as Linux on x86 prints it, one processor for each (package, core)."""
    lines = []
    for package, core in cores:
        lines += [
            "model name\t: Some CPU: 3 GHz",
            f"physical id\t: {package}",
            f"core id\t\t: {core}",
            "flags\t\t: fpu avx2 avx512f avx512_vnni",
            "",
        ]
    path = folder / "cpuinfo"
    path.write_text("\n".join(lines))
    return path


def test_cpu_from_the_systems_table(tmp_path: Path) -> None:
    cpu = describe_cpu(write_table(tmp_path, (0, 0), (0, 1), (0, 0), (1, 0)))
    assert cpu.model_name == cpu.full_name == "Some CPU: 3 GHz"
    assert cpu.isa == ("avx2", "avx512f", "avx512_vnni")


def test_processors_of_one_name_differ_by_family(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("cpu family\t: 26\nmodel name\t: Some CPU\ncpu family\t: 26\n")
    assert describe_cpu(path).full_name == "Some CPU, family 26"


def test_arm_names_its_instructions_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    cpu = describe_cpu(path)
    assert cpu.isa == ("asimddp",)
    assert cpu.model_name


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe: \x00", b"model name"])
def test_cpu_without_a_table(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_bytes(content)
    cpu = describe_cpu(path)
    assert cpu.model_name
    assert cpu.num_cores >= 1
    assert cpu.isa == ()


def test_this_host() -> None:
    cpu = describe_cpu()
    assert "\n" not in cpu.model_name
    # As many as this process may use, whatever the machine has.
    assert cpu.num_cores == len(os.sched_getaffinity(0))


def test_rows_do_not_change() -> None:
    for row in (DEVICES["n150"], describe_cpu()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            row.num_cores = 1  # type: ignore[misc]
