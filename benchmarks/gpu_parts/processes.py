"""Processes that must not outlive the check: found by their parents, ended with all that they started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """List the processes that a process has started, directly or not, by Linux's /proc; elsewhere none."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, queue = [], [pid]
    while queue:
        own = children.get(queue.pop(), [])
        found += own
        queue += own
    return found


def end_tree(pid: int) -> None:
    """Kill a process, its group if it leads one, and all that it has started."""
    victims = [pid, *descendants(pid)]
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def end_with_parent() -> None:
    """Kill this process and all that it has started as soon as standard input ends: its parent holds the other end."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing is ever written
        for victim in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
