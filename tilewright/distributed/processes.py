"""How another process of this machine is, as its kernel says."""

from __future__ import annotations

import socket
import struct


def process_behind(connection: socket.socket) -> int | None:
    """The process at the other end of a local socket that it listened at; else None."""
    if connection.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", found)[0])


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, by a signal or a debugger."""
    return _process_state(pid) in ("T", "t")


def _process_state(pid: int) -> str:
    """The letter that the kernel has for how a process is; empty for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def how_process_is(pid: int) -> str:
    """In words: ``runs``, ``is stopped`` or ``is gone``."""
    state = _process_state(pid)
    return "is gone" if not state else "is stopped" if state in "Tt" else "runs"
