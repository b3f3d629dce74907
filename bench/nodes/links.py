"""Network namespaces, each a machine to what runs there: their links have a rate and, where it is
asked for, a delay, by `relay.cpp`, which joins them.

Needs root, `ip` and a C++ compiler. Made anew each time, and taken away; what a run left that was
killed is taken away by the next.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.targets.cpu.native.library.build import find_compiler
from tilewright.errors import ConfigError
from tilewright.utils.child_process import Child

_NAME, _NET = "twn", "10.213.77"
_NAMESPACES, _LINKS = Path("/run/netns"), Path("/sys/class/net")
_RELAY = Path(__file__).with_name("relay.cpp")
_KERNEL = "root, on a kernel with veth and packet sockets"


@dataclass(frozen=True, slots=True)
class Link:
    """Gigabits a second each way, and the microseconds that a frame takes besides, each way."""

    gigabits: float
    delay_us: int = 0


def read_link(text: str) -> Link:
    """The link that ``2.5``, or with a delay ``2.5+100us``, names.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\+(\d{1,6})us)?", text)
    if found is None or not 0.001 <= float(found[1]) <= 100:
        allowed = "free, or gigabits a second, 0.001 to 100, and a delay each way, as in 1+100us"
        raise ConfigError(f"--links {text}; allowed: {allowed}")
    return Link(float(found[1]), int(found[2] or 0))


def address(node: int) -> str:
    """The IPv4 address of the machine that a node runs on."""
    return f"{_NET}.{node + 1}"


def inside(node: int) -> list[str]:
    """What begins a command that runs on a node's machine."""
    return ["ip", "netns", "exec", f"{_NAME}{node}"]


@contextlib.contextmanager
def machines(count: int, link: Link) -> Iterator[None]:
    """So many machines, each behind such a link.

    Raises:
        ConfigError: where this user may not make them, or the kernel cannot.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _make(count)
        with _joined([f"{_NAME}h{node}" for node in range(count)], link):
            yield
    finally:
        _remove()
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """End as an exception does, through what takes the machines away."""
    raise SystemExit(128 + number)


def _make(count: int) -> None:
    """The machines and their links, which lead nowhere yet."""
    _remove()
    for node in range(count):
        here, there = f"{_NAME}h{node}", f"{_NAME}p{node}"
        _do(f"ip netns add {_NAME}{node}")
        _do(f"ip link add {here} type veth peer name {there}")
        _do(f"ip link set {there} address 02:00:00:00:00:{node:02x} netns {_NAME}{node}")
        _do(f"ip link set {here} up")
        _do(f"ip netns exec {_NAME}{node} ip addr add {address(node)}/24 dev {there}")
        _do(f"ip netns exec {_NAME}{node} ip link set {there} up")
        _do(f"ip netns exec {_NAME}{node} ip link set lo up")


@contextlib.contextmanager
def _joined(ends: Sequence[str], link: Link) -> Iterator[None]:
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("--links: no C++ compiler; allowed: free, or g++ or clang++ (CXX=path)")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/relay"
        _do([*compiler, "-std=c++20", "-O2", str(_RELAY), "-o", program], "a compiler of C++20")
        command = [program, str(link.gigabits), str(link.delay_us), *ends]
        with Child(command, has_pipes=True, what="the relay") as relay:
            if relay.read_line(10) != b"ready\n":
                raise ConfigError(f"{relay.stop().last}; allowed: {_KERNEL}")
            yield


def _remove() -> None:
    """Take all machines away, those of a larger run that was killed too."""
    for kind, folder in (("netns", _NAMESPACES), ("link", _LINKS)):
        for found in sorted(folder.glob(f"{_NAME}*")):
            _try(f"ip {kind} del {found.name}")


def _try(command: str) -> None:
    """Take away what may not be there; where there is no such program, nothing is."""
    with contextlib.suppress(OSError):
        subprocess.run(command.split(), capture_output=True, check=False)


def _do(command: str | Sequence[str], allowed: str = _KERNEL) -> None:
    words = command.split() if isinstance(command, str) else command
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]}: {error}; allowed: root, with ip") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise ConfigError(f"{' '.join(words)}: {said}; allowed: {allowed}")
