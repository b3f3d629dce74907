"""Known devices with sizes, for targets and plans.

Values are published or measured, see the ``source`` of each row. Imports no torch and starts no
device. Only :func:`describe_cpu` inspects the host.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import CompileError, ConfigError
from tilewright.utils.registry import Registry

_WORMHOLE = "Tenstorrent Wormhole, 64 workers at 1 GHz: published, 12 DRAM banks"
_BLACKHOLE = "Tenstorrent Blackhole, 110 workers at 1.35 GHz: published, 2026-11"

WORMHOLE, BLACKHOLE = "wormhole", "blackhole"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A type of device. Values are per chip. None: unknown.

    Attributes:
        grid: worker cores as (rows, columns).
        num_cores: multiprocessor count, for devices without a grid.
        l1_bytes: usable L1 per core.
        architecture: architecture of a board's chips.
        num_banks: DRAM banks per chip.
    """

    name: str
    target: str
    num_chips: int
    source: str
    grid: tuple[int, int] | None = None
    num_cores: int | None = None
    l1_bytes: int | None = None
    dram_bytes: int | None = None
    architecture: str = ""
    num_banks: int = 0


@dataclass(frozen=True, slots=True)
class CpuDescription:
    """The processor of this machine.

    Attributes:
        num_cores: cores that this process may use.
        isa: instruction sets for matmuls, in Linux spelling.
        family: processor family, useful if a virtual machine hides the name.
    """

    model_name: str
    num_cores: int
    isa: tuple[str, ...]
    family: str = ""

    @property
    def full_name(self) -> str:
        """The name, with the family if known."""
        return f"{self.model_name}, {self.family}" if self.family else self.model_name


def _wormhole(name: str, num_chips: int, *, grid: tuple[int, int] | None = (8, 8)) -> DeviceSpec:
    """Return the row of a Wormhole board or box."""
    return DeviceSpec(
        name.upper(),
        name,
        num_chips,
        _WORMHOLE,
        grid=grid,
        l1_bytes=1_393_312,
        dram_bytes=12_870_000_000,
        architecture=WORMHOLE,
        num_banks=12,
    )


def _blackhole(name: str, num_chips: int, *, num_banks: int = 8) -> DeviceSpec:
    """Return the row of a Blackhole board or box. A bank has 4 GB."""
    return DeviceSpec(
        name.upper(),
        name,
        num_chips,
        _BLACKHOLE,
        grid=(10, 11),
        l1_bytes=1_393_312,
        dram_bytes=num_banks * 4_000_000_000,
        architecture=BLACKHOLE,
        num_banks=num_banks,
    )


DEVICES: Registry[DeviceSpec] = Registry("device")

BOARDS = (
    *("n150", "n300", "t3k", "tg"),
    *("p100", "p150", "p300", "qb2", "loudbox", "bh-galaxy"),
)
"""Targets with emulated devices and predicted speed."""

CPU_BACKENDS = {"onnxruntime": "cpu", "native": "cpu-native"}
"""Full name of the target cpu by backend."""

DEVICES.register("cpu", DeviceSpec("CPU", "cpu", 1, "the host; see describe_cpu"))
DEVICES.register("n150", _wormhole("n150", 1))
DEVICES.register("n300", _wormhole("n300", 2))
DEVICES.register("t3k", _wormhole("t3k", 8))
# The worker grid of Galaxy is not published in the same terms.
DEVICES.register("tg", _wormhole("tg", 32, grid=None))
DEVICES.register("p100", _blackhole("p100", 1, num_banks=7))
DEVICES.register("p150", _blackhole("p150", 1))
DEVICES.register("p300", _blackhole("p300", 2))
# QuietBox 2: two p300 in a ring. LoudBox: eight p150.
DEVICES.register("qb2", _blackhole("qb2", 4))
DEVICES.register("loudbox", _blackhole("loudbox", 8))
DEVICES.register("bh-galaxy", _blackhole("bh-galaxy", 32))
DEVICES.register(
    "h200",
    DeviceSpec(
        "H200",
        "cuda",
        1,
        "NVIDIA H200: published sizes",
        num_cores=132,
        dram_bytes=143_771 * 2**20,
    ),
)

_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")
_CUDA_DRIVER = "libcuda.so.1"


def get_device(name: str) -> DeviceSpec:
    """Return the device with a name, in any case.

    Raises:
        ConfigError: for an unknown name, with the known names.
    """
    return DEVICES[name.lower()]


def target_options(name: str) -> list[str]:
    """Return the command options for a target's full name."""
    backend = next((each for each, full in CPU_BACKENDS.items() if full == name), None)
    return ["--target", name] if backend is None else ["--target", "cpu", "--backend", backend]


def check_ranks(target: str, num_ranks: int) -> None:
    """Check that a target supports ``num_ranks``. ``target`` is the full name.

    A board shards a model over its own chips. ONNX Runtime has no collectives.

    Raises:
        ConfigError: for several ranks, with the alternatives.
    """
    if num_ranks == 1:
        return
    if target == CPU_BACKENDS["onnxruntime"]:
        raise ConfigError(
            f"{num_ranks} ranks of backend onnxruntime: it exchanges nothing between ranks; "
            "allowed: --backend native (a C++ compiler), or without --tensor-parallel-size"
        )
    if target in BOARDS:
        chips = ", ".join(f"{each} ({DEVICES[each].num_chips})" for each in BOARDS)
        raise ConfigError(
            f"{num_ranks} ranks of target {target}: a board deals a model over its own chips; "
            "allowed: without --tensor-parallel-size, and as --target a board by its chips: "
            f"{chips}"
        )


def check_gpu() -> None:
    """Check that Triton and a GPU exist, without importing their libraries.

    Triton's interpreter (``TRITON_INTERPRET=1``) needs no GPU.

    Raises:
        CompileError: with the missing part.
    """
    check_triton()
    if os.environ.get("TRITON_INTERPRET") != "1" and not num_gpus():
        raise CompileError(
            "target cuda: this machine has no GPU that its driver knows; allowed: --target cpu or "
            "reference, or a machine with an NVIDIA GPU and a CUDA build of torch"
        )


def check_triton() -> None:
    """Check that Triton is installed, without importing it.

    Raises:
        CompileError: with the command for the installation.
    """
    if importlib.util.find_spec("triton") is None:
        raise CompileError(
            "target cuda: triton is not installed; allowed: pip install -e '.[cuda]' in the "
            "clone, or --target cpu or reference"
        )


def num_gpus() -> int:
    """Return the number of GPUs that the CUDA driver shows this process, 0 without a driver."""
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def gpu_name() -> str:
    """Return the name of the first GPU that this process can use. Empty: there is none."""
    if not num_gpus():
        return ""
    driver, device = ctypes.CDLL(_CUDA_DRIVER), ctypes.c_int(0)
    text = ctypes.create_string_buffer(256)
    is_known = driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    is_known = is_known and driver.cuDeviceGetName(text, len(text), device) == 0
    return text.value.decode(errors="replace") if is_known else ""


def describe_cpu(cpuinfo: Path = _CPUINFO) -> CpuDescription:
    """Return the host's processor from ``/proc/cpuinfo``. Unknown fields are marked."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""  # not Linux; the platform module has a name
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            continue
        fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return CpuDescription(
        model_name=fields.get("model name") or platform.processor() or "unknown processor",
        num_cores=_usable_cores(),
        isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
        family=f"family {fields['cpu family']}" if "cpu family" in fields else "",
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cpus(topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Return the usable CPUs' numbers, sorted by package, core and hyper-thread.

    Without topology information, the numbers are ascending.
    """
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))

    def place(cpu: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            package, core = (
                int((folder / name).read_text(encoding="ascii"))
                for name in ("physical_package_id", "core_id")
            )
        except (OSError, ValueError):
            return 0, 0, cpu
        return package, core, cpu

    return tuple(sorted(os.sched_getaffinity(0), key=place))
