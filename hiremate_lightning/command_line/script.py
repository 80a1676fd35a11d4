"""A script, run as `python` runs it: what is `__main__`, `sys.argv` and `sys.path` to it, and when it has ended."""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import io
import runpy
import shutil
import sys
import threading
import types
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError
from .started import INTERPRETER, launcher_of


class Script:
    """What is to run.

    Args:
        given: Path of a script, name of a command that is one (`trl`), or name of a module; then its arguments.
        is_module: Whether it is the name of a module.
        ends_process: Whether the process ends with it: `__main__` then stays the script's, for what runs at exit.

    Raises:
        ConfigurationError: If there is no such script, or if it only starts others.
    """

    def __init__(self, given: Sequence[str], is_module: bool, ends_process: bool = False) -> None:
        launcher = launcher_of(["-m", *given] if is_module else given)
        if launcher is not None:
            raise ConfigurationError(
                f"{launcher.name} starts programs of its own, which would have no plan. Start it so: {launcher.instead}"
            )
        self.name = given[0] if is_module else _find(given)
        self.arguments, self.is_module = [*given[1:]], is_module
        self._ends_process = ends_process

    def run(self) -> None:
        """Run it to its end, and to that of the threads that it leaves.

        Raises:
            ConfigurationError: If there is no such module.
        """
        with self._arguments_and_path():
            if self.is_module:
                _run_as_main(*_of_module(self.name), self._ends_process)
            elif _is_archive(self.name):
                runpy.run_path(self.name, run_name="__main__")
            else:
                _run_as_main(*_of_file(Path(self.name).absolute()), self._ends_process)

    @contextmanager
    def _arguments_and_path(self) -> Iterator[None]:
        before, first = sys.argv, sys.path[0] if sys.path else None
        sys.argv = [self.name, *self.arguments]
        folder = str(Path.cwd() if self.is_module else Path(self.name).resolve().parent)
        if first is not None and not getattr(sys.flags, "safe_path", False):
            sys.path[0] = folder  # it was the folder of the command
        try:
            yield
        finally:
            sys.argv = before
            if first is not None and sys.path and sys.path[0] == folder:
                sys.path[0] = first


# ---------------------------------------------------------------- what to run


def _find(given: Sequence[str]) -> str:
    """Find the file to run: a path, or else a command that is a script of Python.

    Raises:
        ConfigurationError: If there is none.
    """
    name = given[0]
    is_package = Path(name).is_dir() and not (Path(name) / "__main__.py").exists()
    if Path(name).exists() and not is_package:
        return name
    command = shutil.which(name) if Path(name).name == name else None
    if command is not None and _is_python(command):
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


def _is_python(command: str) -> bool:
    """Whether the first line of a command names an interpreter of Python."""
    with Path(command).open("rb") as file:
        first = file.readline(512)
    return first.startswith(b"#!") and b"python" in first


def _is_archive(name: str) -> bool:
    return Path(name).is_dir() or zipfile.is_zipfile(name)


def _of_file(path: Path) -> tuple[types.CodeType, types.ModuleType]:
    """Read the code of a script, and make the module to run it in; runpy would change the name in `sys.argv`."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=str(path), __builtins__=builtins, __cached__=None, __annotations__={})
    with io.open_code(str(path)) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True), module


class _NoModuleError(Exception):
    """There is no module of a name to run."""


def _of_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Find the code of a module or package as `python -m` does, and make the module to run it in.

    Raises:
        ConfigurationError: If there is none.
    """
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
        if not ends_process or _is_interactive():
            sys.modules["__main__"] = before


def _wait_for_others(threads: set[threading.Thread]) -> None:
    """Wait for the threads that a script has started, as Python does: they may save what it trained, or train."""
    pooled = vars(concurrent.futures.thread).get("_threads_queues", ())  # they wait for the interpreter's end
    threads = {*threads, *pooled}
    while started := [t for t in threading.enumerate() if t not in threads and not t.daemon]:
        started[0].join()
        threads.add(started[0])


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")
