"""Programs of Python that a script starts by itself: what they train has no plan, which is said when they start.

Launchers do so, and commands that call one: `torchrun`, `accelerate launch`, `trl sft`, `axolotl train`. What they
start is to run under hiremate, not they. Workers of torch.multiprocessing start in another way, and are not seen here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
RUN = "-m hiremate_lightning.run [options]"
# Commands that only start other programs, and how to start these under hiremate.
LAUNCHERS = {
    ("torchrun",): f"torchrun [its options] {RUN}",
    ("-m", "torch.distributed.run"): f"torchrun [its options] {RUN}",
    ("accelerate", "launch"): f"accelerate launch [its options] {RUN}",
    ("-m", "accelerate.commands.launch"): f"accelerate launch [its options] {RUN}",
}
_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of the interpreter
_TRAIN_NOTHING = re.compile(r"-m (torch\._|hiremate_lightning|pip\b)|[/\\\\](torch[/\\\\]_|hiremate_lightning[/\\\\])")


@dataclass(frozen=True)
class Program:
    """A program of Python.

    Attributes:
        name: Its script, or its module with `-m` before it, or the name of a launcher.
        instead: What to start in its place, for a plan.
    """

    name: str
    instead: str


def launcher_of(words: Sequence[str]) -> Program | None:
    """Return the launcher that a command calls, None where it calls none.

    Args:
        words: The name of the command, or `-m` and a module; then its arguments.
    """
    named = [Path(words[0]).name, *words[1:]] if words else []
    for names, instead in LAUNCHERS.items():
        if tuple(named[: len(names)]) == names:
            return Program(" ".join(names), f"{instead} train.py ...")
    return None


@contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """Name, once, each Python script that is started in the block: it has no plan. The line says how it gets one."""
    start = subprocess.Popen.__init__
    known, process = set[Program](), os.getpid()

    @wraps(start)
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        program = _program_of(_words_of(args), kwargs.get("env") or os.environ)
        if program is not None and program not in known and os.getpid() == process:
            known.add(program)
            say(
                f"the script starts another program, {program.name}, which has no plan. If that trains, start it "
                f"under hiremate instead: {program.instead}"
            )
        start(self, args, *rest, **kwargs)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def _words_of(arguments: Any) -> list[str]:
    """List the words of a command, given as a list or as one line for a shell."""
    try:
        if isinstance(arguments, str):
            return shlex.split(arguments)
        return [os.fsdecode(word) for word in ([arguments] if isinstance(arguments, bytes | Path) else arguments)]
    except (TypeError, ValueError):  # Popen says what is wrong with them
        return []


def _program_of(words: list[str], environment: Mapping[str, str]) -> Program | None:
    """Find the script or module of Python in a command; None where there is none that might train."""
    if words and INTERPRETER.fullmatch(Path(words[0]).name):
        words = _after_options(words[1:])
        if not words or words[0] == "-c":
            return None
    elif launcher_of(words) is None:
        return None
    name = " ".join(words[:2]) if words[0] == "-m" else words[0]
    if _TRAIN_NOTHING.search(name):
        return None
    launched = "ACCELERATE_MIXED_PRECISION" in environment, "RANK" in environment
    start = "hiremate run [options]"
    if any(launched):
        start = f"{'accelerate launch' if launched[0] else 'torchrun'} [its options] {RUN}"
    return launcher_of(words) or Program(name, f"{start} {name} ...")


def _after_options(words: list[str]) -> list[str]:
    """Leave out the options of the interpreter: what remains begins with a script, with -m or with -c."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
        index += 2 if words[index] in _TAKE_A_VALUE else 1
    return words[index:]
