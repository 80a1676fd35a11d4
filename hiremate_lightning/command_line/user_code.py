"""The user's code, by name: a factory, a script run as `python` runs it, and packages imported in another process.

A script has its own `__main__`, `sys.argv` and `sys.path`, until its threads have ended. Programs that it starts have
no plan. A launcher (`torchrun`, `accelerate launch`) only starts such programs: run those under hiremate, not the
launcher.
"""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import importlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean

INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
RUN = "-m hiremate_lightning.run [options]"
LAUNCHERS = {  # commands that only start other programs, and how to start those under hiremate
    **dict.fromkeys(("torchrun", "-m torch.distributed.run"), f"torchrun [its options] {RUN} train.py ..."),
    **dict.fromkeys(
        ("accelerate launch", "-m accelerate.commands.launch"), f"accelerate launch [its options] {RUN} train.py ..."
    ),
}
LIMIT_S = 300.0
_CODE = """
import importlib, json, sys
for name in sys.argv[1:]:
    reason = ""
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit too: a package may end the process
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = f"{type(error).__name__}: {line}"
    print("\\n" + json.dumps([name, reason]), flush=True)
"""


# ---------------------------------------------------------------- a factory


def split(text: str) -> tuple[str, str]:
    """Split "package.module:name" or "path/to/file.py:name" into place and name; check that a file is there."""
    place, colon, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not colon or not name or not (is_module or place.endswith(".py")):
        hint = did_you_mean(text, [f"{place}.py:{name}"] if Path(f"{place}.py").is_file() else [])
        raise ConfigurationError(f"Can't read {text!r}.{hint} Expected PACKAGE.MODULE:NAME or path/to/file.py:NAME.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigurationError(f"There is no file {place!r}. Expected path/to/file.py:NAME.")
    return place, name


def find_factory(text: str) -> Any:
    """Import the object named "package.module:name" or "path/to/file.py:name"."""
    place, path = split(text)
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # permanently: a factory may import modules from there when it is called
    try:
        if is_file:
            code, factory = _of_file(Path(place), Path(place).stem)
            sys.modules.setdefault(factory.__name__, factory)  # dataclasses look up their module
            exec(code, vars(factory))
        else:
            factory = importlib.import_module(place)
    except SyntaxError as error:
        raise ConfigurationError(f"Can't read {error.filename}, line {error.lineno}: {error.msg}.") from None
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not place.startswith(error.name):
            raise  # an import inside of the module failed
        raise ConfigurationError(
            f"There is no module {error.name!r}. Expected PACKAGE.MODULE:NAME, importable from here, or "
            "path/to/file.py:NAME."
        ) from None
    for name in path.split("."):
        if not hasattr(factory, name):
            hint = did_you_mean(name, sorted(each for each in vars(factory) if not each.startswith("_")))
            words = f"{place} has no {path!r}.{hint} Name a function, a class or a module object in it."
            raise ConfigurationError(words)
        factory = getattr(factory, name)
    return factory


# ---------------------------------------------------------------- a script


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
            code, module = _of_module(name) if is_module else _of_file(Path(name).absolute(), "__main__")
            _run_as_main(code, module, ends_process)
    finally:
        sys.argv = before
        if first is not None and sys.path and sys.path[0] == folder:
            sys.path[0] = first


def find_script(command: Sequence[str], is_module: bool = False) -> str:
    """Return the file or module to run: a path, a command that is a Python script (`trl`), or a module.

    `command` is the name, followed by the script's arguments.

    Raises:
        ConfigurationError: If there is no such script, or if it is a launcher.
    """
    name, words = command[0], ["-m", *command] if is_module else [Path(command[0]).name, *command[1:]]
    launcher = next((known for known in LAUNCHERS if " ".join([*words, ""]).startswith(f"{known} ")), None)
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


def _of_file(path: Path, name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of a file, and a new module to run it in; runpy would change the name in `sys.argv`."""
    module = types.ModuleType(name)
    vars(module).update(__file__=str(path.absolute()), __builtins__=builtins, __cached__=None, __annotations__={})
    with io.open_code(str(path.absolute())) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True), module


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


# ---------------------------------------------------------------- packages, in a process of its own


def import_failures(names: Sequence[str]) -> dict[str, str]:
    """Import modules one by one in a process that a broken one may end; return the reasons for failures, by name."""
    reasons: dict[str, str] = {}
    waiting = list(names)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    while waiting:
        command, seen = [sys.executable, "-c", _CODE, *waiting], dict[str, str]()
        try:
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            ending = f"importing it takes more than {LIMIT_S:g} s"
        else:
            seen = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["'))
            code = result.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            ending = f"importing it ends the process ({how})"
        reasons |= seen
        if len(seen) < len(waiting):
            reasons[waiting[len(seen)]] = ending
        waiting = waiting[len(seen) + 1 :]
    return {name: reason for name, reason in reasons.items() if reason}
