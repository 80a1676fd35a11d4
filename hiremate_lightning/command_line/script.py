"""A script, run as `python` runs it: what is `__main__`, `sys.argv` and `sys.path` to it, and when it has ended.

Programs that the script starts have no plan, and a line says so. Launchers start such programs (`torchrun`,
`accelerate launch`), and so do commands that call one (`trl sft`, `axolotl train`): what they start is to run under
hiremate, not they. Workers of torch.multiprocessing start in another way, and are not seen here.
"""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
RUN = "-m hiremate_lightning.run [options]"
LAUNCHERS = {  # how commands that only start other programs are written, and what starts these under hiremate
    **dict.fromkeys(("torchrun", "-m torch.distributed.run"), f"torchrun [its options] {RUN} train.py ..."),
    **dict.fromkeys(
        ("accelerate launch", "-m accelerate.commands.launch"), f"accelerate launch [its options] {RUN} train.py ..."
    ),
}
_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of the interpreter
_TRAIN_NOTHING = re.compile(r"-m (torch\._|hiremate_lightning|pip\b)|[/\\\\](torch[/\\\\]_|hiremate_lightning[/\\\\])")


def run_script(given: Sequence[str], is_module: bool, ends_process: bool = False) -> None:
    """Run a script to its end, and to that of the threads that it leaves.

    Args:
        given: As for `find_script`.
        is_module: Whether it is the name of a module.
        ends_process: Whether the process ends with it: `__main__` then stays the script's, for what runs at exit.
    """
    name = find_script(given, is_module)
    before, first = sys.argv, sys.path[0] if sys.path else None
    sys.argv = [name, *given[1:]]
    folder = str(Path.cwd() if is_module else Path(name).resolve().parent)
    if first is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # it was the folder of the command
    try:
        if not is_module and (Path(name).is_dir() or zipfile.is_zipfile(name)):
            runpy.run_path(name, run_name="__main__")
        else:
            _run_as_main(*(_of_module if is_module else _of_file)(name), ends_process)
    finally:
        sys.argv = before
        if first is not None and sys.path and sys.path[0] == folder:
            sys.path[0] = first


# ---------------------------------------------------------------- what to run


def find_script(given: Sequence[str], is_module: bool = False) -> str:
    """Find what is to run: the file of a path, or of a command that is a script of Python; or a module.

    Args:
        given: Path of a script, name of a command that is one (`trl`), or name of a module; then its arguments.
        is_module: Whether it is the name of a module.

    Raises:
        ConfigurationError: If there is no such script, or if it only starts others.
    """
    launcher, name = launcher_of(["-m", *given] if is_module else given), given[0]
    if launcher is not None:
        raise ConfigurationError(
            f"{launcher} starts programs of its own, which would have no plan. Start it so: {LAUNCHERS[launcher]}"
        )
    is_package = Path(name).is_dir() and not (Path(name) / "__main__.py").exists()
    if is_module or (Path(name).exists() and not is_package):
        return name
    command = shutil.which(name) if Path(name).name == name else None
    if command is not None:
        with Path(command).open("rb") as file:
            first = file.readline(512)
        if first.startswith(b"#!") and b"python" in first:
            return command
    if INTERPRETER.fullmatch(Path(name).name):
        rest = " ".join(given[1:2]) or "train.py"
        raise ConfigurationError(f"{name!r} is the interpreter: leave it out, as in hiremate run [options] {rest} ...")
    if command is not None:
        raise ConfigurationError(f"The command {name!r} ({command}) is no script of Python: it can't be planned.")
    if is_package:
        raise ConfigurationError(
            f"{name!r} is a folder without __main__.py. Name the script in it, or -m and a module."
        )
    raise ConfigurationError(
        f"There is no file {name!r} to run, and no command of that name. Options come before the script."
    )


def _of_file(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Read the code of a script, and make the module to run it in; runpy would change the name in `sys.argv`."""
    path, module = str(Path(name).absolute()), types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __cached__=None, __annotations__={})
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), module


class _NoModuleError(Exception):
    """There is no module of a name to run."""


def _of_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Find the code of a module or package as `python -m` does, and make the module to run it in."""
    try:
        _, spec, code = vars(runpy)["_get_module_details"](name, _NoModuleError)  # as pdb -m does
    except _NoModuleError as error:
        raise ConfigurationError(f"Can't run -m {name}: {error}") from None
    sys.argv[0] = spec.origin
    module = types.ModuleType("__main__")
    vars(module).update(__file__=spec.origin, __builtins__=builtins, __cached__=spec.cached)
    vars(module).update(__loader__=spec.loader, __package__=spec.parent, __spec__=spec)
    return code, module


# ---------------------------------------------------------------- its life


def _run_as_main(code: types.CodeType, module: types.ModuleType, ends_process: bool) -> None:
    """Run code in a module that is `__main__` meanwhile, and up to the interpreter's end where that comes next."""
    threads = {*threading.enumerate()}
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        try:
            exec(code, vars(module))
        except SystemExit:
            _wait_for_others(threads)
            raise
        _wait_for_others(threads)
    finally:
        is_interactive = hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")
        if not ends_process or is_interactive:
            sys.modules["__main__"] = before


def _wait_for_others(threads: set[threading.Thread]) -> None:
    """Wait for the threads that a script has started, as Python does: they may save what it trained, or train."""
    pooled = vars(concurrent.futures.thread).get("_threads_queues", ())  # they wait for the interpreter's end
    threads = {*threads, *pooled}
    while started := [t for t in threading.enumerate() if t not in threads and not t.daemon]:
        started[0].join()
        threads.add(started[0])


# ---------------------------------------------------------------- the programs that it starts


def launcher_of(words: Sequence[str]) -> str | None:
    """Return the launcher that the words of a command call, None where they call none."""
    text = " ".join([Path(words[0]).name, *words[1:], ""]) if words else ""
    return next((name for name in LAUNCHERS if text.startswith(f"{name} ")), None)


@contextmanager
def naming_programs(say: Callable[[str], None]) -> Iterator[None]:
    """Name, once, each Python script that is started in the block: it has no plan. The line says how it gets one."""
    start, known, process = subprocess.Popen.__init__, set[tuple[str, str]](), os.getpid()

    @wraps(start)
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        program = _program_of(_words_of(args), kwargs.get("env") or os.environ)
        if program is not None and program not in known and os.getpid() == process:
            known.add(program)
            say(
                f"the script starts another program, {program[0]}, which has no plan. If that trains, start it "
                f"under hiremate instead: {program[1]}"
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


def _program_of(words: list[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Name the script, module or launcher in a command, and what to start instead; None where none may train."""
    if words and INTERPRETER.fullmatch(Path(words[0]).name):
        index = 1  # after the options of the interpreter
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
            index += 2 if words[index] in _TAKE_A_VALUE else 1
        words = words[index:]
        if not words or words[0] == "-c":
            return None
    elif launcher_of(words) is None:
        return None
    name = " ".join(words[:2]) if words[0] == "-m" else words[0]
    if _TRAIN_NOTHING.search(name):
        return None
    if (launcher := launcher_of(words)) is not None:
        return launcher, LAUNCHERS[launcher]
    start = "hiremate run [options]"
    if "ACCELERATE_MIXED_PRECISION" in environment:
        start = f"accelerate launch [its options] {RUN}"
    elif "RANK" in environment:
        start = f"torchrun [its options] {RUN}"
    return name, f"{start} {name} ..."
