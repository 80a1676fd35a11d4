"""Run one part: `python -m gpu_parts NAME`, told the rest by `gpu_check.py` in the environment.

The part's own process loads no torch. It asks a server to fork a process for each measurement, with torch imported but
no device touched yet: a measurement that hangs, crashes or runs out of memory leaves the others alone, and none waits
for imports again.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import PARTS, Part
from .processes import end_tree, end_with_parent
from .records import FAILED, KILLED, NO_DEVICE, NO_MEMORY, OK, PLANS, SKIPPED, TAIL, Record, Results

SETTING = "GPU_CHECK"  # environment variable with a `Setting`
RESERVE_S = 3.0  # before its limit, a part begins nothing more
BEFORE_KILL_S = 1.5  # before its limit, a measurement says where it is
LEAST_S = 2.0  # no measurement begins with less

Send = Callable[..., None]


@dataclass(frozen=True)
class Setting:
    """What the command tells a part.

    Attributes:
        folder: Where results go.
        scratch: Where processes leave files for each other.
        device: "cuda" or "cpu".
        is_toy: Whether sizes are small: on the simulated GPU and without a device.
        is_simulated: Whether to load the simulated GPU.
        can_fork: Whether processes that a server forks can use the device.
        deadline: When the part is killed, in seconds since the epoch.
    """

    folder: str
    scratch: str
    device: str
    is_toy: bool
    is_simulated: bool
    can_fork: bool
    deadline: float = 0.0

    def to_json(self) -> str:
        """Write it for the environment of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def of_environment(cls) -> Setting:
        """Read what the command told this process."""
        return cls(**json.loads(os.environ[SETTING]))


class Context:
    """What a part measures with."""

    def __init__(self, part: Part, setting: Setting) -> None:
        self.part = part
        self.device, self.is_toy = setting.device, setting.is_toy
        self.folder, self.scratch = Path(setting.folder), Path(setting.scratch)
        self._deadline = setting.deadline
        self._results = Results(self.folder)
        self._processes: Any = multiprocessing.get_context("forkserver" if setting.can_fork else "spawn")
        if setting.can_fork:
            self._processes.set_forkserver_preload(["gpu_parts.preload"])

    @property
    def plans(self) -> Path:
        """The folder of plans that later calls use again."""
        return self.folder / PLANS

    @property
    def has_device(self) -> bool:
        """Whether there is a GPU, simulated or not."""
        return self.device == "cuda"

    def left_s(self) -> float:
        """Compute the seconds in which something may still be begun."""
        return self._deadline - RESERVE_S - time.time()

    def record(self, name: str, status: str = OK, **values: Any) -> Record:
        """Write down a measurement."""
        return self._results.add(self.part.name, name, status, **values)

    def say(self, name: str, text: str) -> None:
        """Write down a sentence."""
        self.record(name, text=text)

    def no_device(self, *names: str) -> None:
        """Write down what only a GPU can show."""
        for name in names:
            self.record(name, NO_DEVICE)

    def isolated(
        self, name: str, function: Callable[..., None], limit_s: float = 1e9, **arguments: Any
    ) -> list[Record]:
        """Run a function in a process of its own, and write down whatever it sends.

        Args:
            name: What to call it where it fails.
            function: Takes a function that sends a record (name, status, values), and the arguments.
            limit_s: Seconds until it is killed; at most those left to the part.
            arguments: Handed on.

        Returns:
            The records.
        """
        limit_s = self.left_s() if self.is_toy else min(limit_s, self.left_s())  # a rehearsal may be slow
        if limit_s < LEAST_S:
            return [self.record(name, SKIPPED, why="no time was left")]
        end, (ours, theirs) = time.time() + limit_s, self._processes.Pipe()
        process = self._processes.Process(target=serve, args=(theirs, name, function, arguments, limit_s))
        process.start()
        theirs.close()
        records = []
        try:
            while ours.poll(max(0.0, end - time.time())):
                sent, status, values = ours.recv()
                records.append(self.record(sent, status, **values))
            records.append(self.record(name, KILLED, why=f"not done after {limit_s:.0f} s"))
        except EOFError:
            process.join(1.0)
            if process.exitcode not in (0, None):
                records.append(self.record(name, KILLED, why=f"its process ended with {process.exitcode}"))
        finally:
            if process.is_alive():
                end_tree(process.pid)
            process.join()
            ours.close()
        return records

    def together(self, tasks: Sequence[tuple[str, Callable[..., None], dict[str, Any]]], at_once: int) -> None:
        """Run several functions, each in a process of its own, some at once."""
        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(self.isolated, name, function, **given) for name, function, given in tasks]:
                done.result()


def serve(
    connection: Connection, name: str, function: Callable[..., None], arguments: dict[str, Any], limit_s: float
) -> None:
    """Run a function in a process of its own; send what it sends, and how it failed.

    Shortly before it is killed at its limit, the console gets what all its threads are doing.
    """
    faulthandler.dump_traceback_later(max(1.0, limit_s - BEFORE_KILL_S))
    importlib.import_module("gpu_parts.preload")
    warnings.simplefilter("ignore")

    def send(sent: str, status: str = OK, **values: Any) -> None:
        connection.send((sent, status, values))

    try:
        function(send, **arguments)
    except Exception as error:  # whatever a measurement fails with is its result
        send(name, status_of(error), traceback=tail(error))
    faulthandler.cancel_dump_traceback_later()
    connection.close()
    sys.stderr.write(f"{name}: {time.process_time():.1f} s of the processor\n")


def status_of(error: Exception) -> str:
    """Describe how a measurement failed."""
    return NO_MEMORY if type(error).__name__ == "OutOfMemoryError" else FAILED


def tail(error: Exception) -> str:
    """Write the end of a traceback."""
    return "".join(traceback.format_exception(error))[-TAIL:]


def main() -> None:
    """Run the part that is named."""
    end_with_parent()
    part = next(part for part in PARTS if part.name == sys.argv[1])
    context = Context(part, Setting.of_environment())
    try:
        importlib.import_module(f"gpu_parts.{part.module}").run(context)
    except Exception as error:  # the next part starts all the same
        context.record(part.name, FAILED, traceback=tail(error))
