"""State of another process on this machine, from the kernel."""

from __future__ import annotations

import socket
import struct


def process_behind(connection: socket.socket) -> int | None:
    """Return the process that listened at the other end of a local socket. None: not local."""
    if connection.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", found)[0])


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, by a signal or a debugger."""
    return _process_state(pid) in ("T", "t")


def _process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state, empty for an ended process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def how_process_is(pid: int) -> str:
    """In words: ``runs``, ``is stopped`` or ``is gone``."""
    state = _process_state(pid)
    return "is gone" if not state else "is stopped" if state in "Tt" else "runs"
