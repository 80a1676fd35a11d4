"""Runs a script as `python` does: with its `__main__`, `sys.argv` and `sys.path`, until its threads have ended.

Programs that the script starts have no plan. A launcher (`torchrun`, `accelerate launch`) only starts such programs:
run those under hiremate, not the launcher.
"""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import io
import re
import runpy
import shutil
import sys
import threading
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError

INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
RUN = "-m hiremate_lightning.run [options]"
LAUNCHERS = {  # commands that only start other programs, and how to start those under hiremate
    **dict.fromkeys(("torchrun", "-m torch.distributed.run"), f"torchrun [its options] {RUN} train.py ..."),
    **dict.fromkeys(
        ("accelerate launch", "-m accelerate.commands.launch"), f"accelerate launch [its options] {RUN} train.py ..."
    ),
}


def run_script(command: Sequence[str], is_module: bool, ends_process: bool = False) -> None:
    """Run a script, and wait for its threads; `command` and `is_module` are those of `find_script`.

    With `ends_process`, `__main__` stays the script's module, for code that runs at exit.
    """
    name = find_script(command, is_module)
    before, first = sys.argv, sys.path[0] if sys.path else None
    sys.argv = [name, *command[1:]]
    folder = str(Path.cwd() if is_module else Path(name).resolve().parent)
    if first is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # replaces the folder of the command
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


def find_script(command: Sequence[str], is_module: bool = False) -> str:
    """Return the file or module to run: a path, a command that is a Python script (`trl`), or a module.

    `command` is the name, followed by the script's arguments.

    Raises:
        ConfigurationError: If there is no such script, or if it is a launcher.
    """
    launcher, name = launcher_of(["-m", *command] if is_module else command), command[0]
    if launcher is not None:
        raise ConfigurationError(
            f"{launcher} starts programs of its own, which would have no plan. Start it so: {LAUNCHERS[launcher]}"
        )
    is_package = Path(name).is_dir() and not (Path(name) / "__main__.py").exists()
    if is_module or (Path(name).exists() and not is_package):
        return name
    program = shutil.which(name) if Path(name).name == name else None
    if program is not None:
        with Path(program).open("rb") as file:
            first = file.readline(512)
        if first.startswith(b"#!") and b"python" in first:
            return program
    if INTERPRETER.fullmatch(Path(name).name):
        rest = " ".join(command[1:2]) or "train.py"
        raise ConfigurationError(f"{name!r} is the interpreter: leave it out, as in hiremate run [options] {rest} ...")
    if program is not None:
        raise ConfigurationError(f"The command {name!r} ({program}) is no script of Python: it can't be planned.")
    if is_package:
        raise ConfigurationError(
            f"{name!r} is a folder without __main__.py. Name the script in it, or -m and a module."
        )
    raise ConfigurationError(
        f"There is no file {name!r} to run, and no command of that name. Options come before the script."
    )


def launcher_of(words: Sequence[str]) -> str | None:
    """Return the launcher that a command calls, None if it calls none."""
    text = " ".join([Path(words[0]).name, *words[1:], ""]) if words else ""
    return next((name for name in LAUNCHERS if text.startswith(f"{name} ")), None)


def _of_file(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of a script, and a new module to run it in; runpy would change the name in `sys.argv`."""
    path, module = str(Path(name).absolute()), types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __cached__=None, __annotations__={})
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), module


class _NoModuleError(Exception):
    """There is no module of this name to run."""


def _of_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of a module or package as `python -m` finds it, and a new module to run it in."""
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
    """Run code in a module that is `__main__` until the code ends; with `ends_process`, until the interpreter ends."""
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
    """Wait for the threads that a script has started, as Python does: they may train or save a model."""
    pooled = vars(concurrent.futures.thread).get("_threads_queues", ())  # pool threads end only with the interpreter
    threads = {*threads, *pooled}
    while started := [t for t in threading.enumerate() if t not in threads and not t.daemon]:
        started[0].join()
        threads.add(started[0])
