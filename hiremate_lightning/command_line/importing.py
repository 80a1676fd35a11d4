"""Imports by name: the user's factory in this process, packages in a separate process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean

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
        factory = _import_file(Path(place)) if is_file else importlib.import_module(place)
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


def _import_file(path: Path) -> Any:
    specification: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module
    specification.loader.exec_module(module)
    return module


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
