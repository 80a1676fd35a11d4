"""Whether packages can be imported, found out in a process of its own: a broken one may end the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

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


def import_failures(names: Sequence[str]) -> dict[str, str]:
    """Import modules, named with dots, one after the other; return why some can't be, by their names."""
    reasons: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        seen, ending = _import(waiting)
        reasons |= seen
        waiting = waiting[len(seen) :]
        if waiting:  # the process has ended in one of them
            reasons[waiting.pop(0)] = ending
    return {name: reason for name, reason in reasons.items() if reason}


def _import(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Import modules in one process; return what it found of each, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _CODE, *names],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {}, f"importing it takes more than {LIMIT_S:g} s"
    seen = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["'))
    code = result.returncode
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return seen, f"importing it ends the process ({ending})"
