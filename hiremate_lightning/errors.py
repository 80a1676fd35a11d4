"""The exception tree, and the one warning class, of the package; a hint for misspelt names, and the place of an error.

Every error says what was expected, what was found, where, and what to do. `HiRemateError` is the root; an error that
users already handle under a standard name inherits that name too (`ValueError`, `torch.OutOfMemoryError`); the one that
needs torch for that is in `out_of_memory`.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class HiRemateError(Exception):
    """Root of all errors raised by this package."""


class HiRemateWarning(UserWarning):
    """A fall-back, or something to know about a plan; each is given once."""


class BudgetError(HiRemateError, ValueError):
    """A budget that can't be read: wrong type, unit or range."""


class ConfigurationError(HiRemateError, ValueError):
    """A set-up that can't be planned: wrong argument, wrong target, or another tool that already does the same."""


class CaptureError(HiRemateError, RuntimeError):
    """The training step could not be captured as a graph."""


class SecondDerivativeError(CaptureError):
    """A gradient that went through captured code was to be differentiated once more."""


class ScheduleError(HiRemateError, RuntimeError):
    """A schedule that computes from a value that is not there, or frees one that is not there."""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Return a question that names the known names nearest to a wrong one, with a space before it; "" for none."""
    names = list(known)
    nearest = [name for name in names if name.lower() == found.lower()]
    nearest = nearest or difflib.get_close_matches(found, names, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""


def place_of(error: BaseException) -> str:
    """Return where the user's code raised an error, in brackets with a space before them; "" where it did not.

    That is the innermost line of a script or module of the user's own, or else of a package that is installed; torch,
    Python's own library and this package don't count.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    *library, pure, plat = (f"{Path(sysconfig.get_path(name))}/" for name in names)
    hidden = ("<", f"{Path(__file__).parent}/")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(hidden)]
    installed = [f for f in frames if f.filename.startswith((pure, plat))]
    own = [f for f in frames if f not in installed and not f.filename.startswith(tuple(library))]
    others = [f for f in installed if not f.filename.startswith((f"{pure}torch/", f"{plat}torch/"))]
    innermost = (own or others)[-1:]
    return "".join(f" ({frame.filename}:{frame.lineno}, in {frame.name})" for frame in innermost)
