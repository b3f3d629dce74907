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


def test_wormhole_rates_follow_from_one_core() -> None:
    for name in ("n150", "n300", "t3k"):
        device = DEVICES[name]
        assert device.grid == (8, 8)
        for phases, fidelity in enumerate(("lofi", "hifi2", "hifi3", "hifi4"), start=1):
            assert device.tflops[fidelity] == pytest.approx(64 * 4.096 / phases, rel=0.01)
        assert device.dram_bytes_per_s == 288e9
        assert device.l1_bytes == 1_393_312


def test_blackhole_rates_follow_from_banks_and_cores() -> None:
    assert [DEVICES[name].num_banks for name in ("n150", "p100", "p150")] == [12, 7, 8]
    for name in ("p100", "p150", "p300", "qb2", "loudbox", "bh-galaxy"):
        device = DEVICES[name]
        assert device.architecture == "blackhole"
        assert device.dram_bytes_per_s == device.num_banks * 64e9
        for phases, fidelity in enumerate(("lofi", "hifi2", "hifi3", "hifi4"), start=1):
            of_all = 110 * 1.35 * 4.096 / phases
            assert device.tflops[fidelity] == pytest.approx(of_all, rel=0.01)


def test_what_is_unknown_of_galaxy_is_none() -> None:
    galaxy = DEVICES["tg"]
    assert galaxy.grid is None
    assert galaxy.link_bytes_per_s is None
    assert not galaxy.tflops


def test_h200() -> None:
    device = DEVICES["h200"]
    assert (device.target, device.num_cores, device.dram_bytes_per_s) == ("cuda", 132, 4.35e12)


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
    assert cpu.num_physical_cores == 3
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
    assert cpu.num_physical_cores is None
    assert cpu.model_name


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe: \x00", b"model name"])
def test_cpu_without_a_table(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_bytes(content)
    cpu = describe_cpu(path)
    assert cpu.model_name
    assert cpu.num_cores >= 1
    assert cpu.num_physical_cores is None
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
    with pytest.raises(TypeError):
        DEVICES["n150"].tflops["lofi"] = 1.0  # type: ignore[index]
