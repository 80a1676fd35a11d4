"""The user's code by its name: a factory, looked at before torch is loaded, then imported; packages, imported apart."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import symtable
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, did_you_mean

LIMIT_S = 300.0
_DYNAMIC = re.compile(r"\bimport \*|\b(?:exec|globals|locals|setattr|vars|__dict__|__getattr__)\b")
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


def _split(text: str) -> tuple[str, str]:
    """Split "package.module:name" or "path/to/file.py:name" into place and name."""
    place, colon, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not colon or not name or not (is_module or place.endswith(".py")):
        hint = did_you_mean(text, [f"{place}.py:{name}"] if Path(f"{place}.py").is_file() else [])
        raise ConfigurationError(f"Can't read {text!r}.{hint} Expected PACKAGE.MODULE:NAME or path/to/file.py:NAME.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigurationError(f"There is no file {place!r}. Expected path/to/file.py:NAME.")
    return place, name


def _no_such_name(place: str, path: str, name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a file or module that lacks a name on a path such as "zoo.Net"."""
    hint = did_you_mean(name, sorted(each for each in known if not each.startswith("_")))
    return ConfigurationError(f"{place} has no {path!r}.{hint} Name a function, a class or a module object in it.")


def _no_such_module(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"There is no module {name!r}. Expected PACKAGE.MODULE:NAME, importable from here, or path/to/file.py:NAME."
    )


# ---------------------------------------------------------------- a factory, before its file runs


def check_factory(text: str) -> None:
    """Check what can be seen of a factory without running its file."""
    place, path = _split(text)
    file = Path(place) if place.endswith(".py") else _file_of_module(place)
    if file is None:
        return
    source = file.read_text(encoding="utf-8", errors="replace")
    try:
        symbols = symtable.symtable(source, str(file), "exec").get_symbols()
    except SyntaxError as error:
        raise ConfigurationError(f"Can't read {file}, line {error.lineno}: {error.msg}.") from None
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    name = path.partition(".")[0]
    if name not in names and not _DYNAMIC.search(source):
        raise _no_such_name(place, path, name, names)


def _file_of_module(name: str) -> Path | None:
    """Find the file of a module that lies in the working folder and in no package; None for any other module."""
    root, _, rest = name.partition(".")
    file = Path(f"{root}.py")
    if file.is_file():
        return None if rest else file
    if not Path(root).is_dir() and root not in sys.modules and importlib.util.find_spec(root) is None:
        raise _no_such_module(root)
    return None


# ---------------------------------------------------------------- its import


def find_factory(text: str) -> Any:
    """Find what "package.module:name" or "path/to/file.py:name" stands for."""
    place, path = _split(text)
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # for good: a factory may import modules of it when it is called
    factory = _import_file(Path(place)) if is_file else _import_module(place)
    for name in path.split("."):
        if not hasattr(factory, name):
            raise _no_such_name(place, path, name, vars(factory))
        factory = getattr(factory, name)
    return factory


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise _no_such_module(error.name) from None
        raise


def _import_file(path: Path) -> Any:
    loader = SourceFileLoader(path.stem, str(path))
    specification = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert specification is not None, "it has a loader"
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    loader.exec_module(module)
    return module


# ---------------------------------------------------------------- packages, in a process of its own


def import_failures(names: Sequence[str]) -> dict[str, str]:
    """Import modules one after the other where a broken one may end the process; return why some can't be, by name."""
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
