"""Reads and writes units for people: the only module that defines GiB as 2**30 and GB as 10**9.

A budget has three forms. Bytes (`"12 GiB"`, `"800 MB"`, an int) are absolute. A share (`"60%"`, a float in (0, 1]) is a
share of the bytes that the eager step adds at its peak. `"auto"` is the device's free bytes less a margin. Only the
session can turn a share or "auto" into bytes, since it has the step and the device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import BudgetError

BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
BINARY_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
MOST_GIB = 4096  # a smaller number without a unit is likely meant in GiB
FORMS = (
    'bytes ("12 GiB", "800 MB", or an int such as 12_884_901_888), '
    'a share of what the step adds at its peak ("60%", or a float in (0, 1]), or "auto"'
)
TEXT_FORMS = 'bytes with a unit ("12 GiB", "800 MB"), a share of what the step adds at its peak ("60%"), or "auto"'
_NUMBER = re.compile(r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as the user gave it: exactly one of bytes or share is set, or neither for "auto"."""

    size_bytes: int | None = None
    share: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the bytes that the eager step adds."""
        return self.share is not None

    @property
    def is_auto(self) -> bool:
        """Whether the budget is "auto"."""
        return self.size_bytes is None and self.share is None

    @property
    def is_whole(self) -> bool:
        """Whether the budget is 100% of the bytes that the eager step adds."""
        return self.share == 1

    def __str__(self) -> str:
        """Write the budget as a user would."""
        if self.size_bytes is not None:
            return format_bytes(self.size_bytes)
        return "auto" if self.share is None else f"{100 * self.share:g}%"


def parse_budget(value: int | float | str | Budget) -> Budget:
    """Parse a budget in any of its three forms; an int must be at least 1 MiB.

    Raises:
        BudgetError: If the value is none of the three forms. The text shows them.
    """
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _unreadable(value, f"it is a {type(value).__name__}")
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, float) and 0 < value <= 1:
        return Budget(share=value)
    if isinstance(value, float) and not (value >= 2**20 and value.is_integer()):  # YAML reads 8e9 as a float
        raise _unreadable(value, "a float must be a share in (0, 1]")
    if 0 < value < 2**20:
        raise _unreadable(value, f"{value} bytes is less than 1 MiB", f' Did you mean "{value} {_likely_unit(value)}"?')
    return _check_bytes(int(value), value)


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "auto":
        return Budget()
    match = _NUMBER.fullmatch(text)
    if match is None:
        point = text.replace(",", ".", 1)
        hint = f' Did you mean "{point.strip()}"?' if _NUMBER.fullmatch(point) else ""
        raise _unreadable(text, "it is not a number with a unit", hint)
    number = float(match[1].replace(",", "").replace("_", ""))
    unit = match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise _unreadable(text, "a percentage must be above 0 and at most 100")
        return Budget(share=number / 100)
    if not unit:
        guess = f"{100 * number:g}%" if 0 < number <= 1 else f"{text.strip()} {_likely_unit(number)}"
        raise _unreadable(text, "it has no unit", f' Did you mean "{guess}"?')
    if unit not in BYTES_PER_UNIT:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or %"
        hint = f' Did you mean "{match[1]} {unit}iB"?' if f"{unit}IB" in BYTES_PER_UNIT else ""
        raise _unreadable(text, f"{match[2]!r} is not one of the units {units}", hint)
    return _check_bytes(math.floor(number * BYTES_PER_UNIT[unit]), text)


def _likely_unit(number: float) -> str:
    return "GiB" if number < MOST_GIB else "B"


def _check_bytes(size_bytes: int, given: object) -> Budget:
    if size_bytes <= 0:
        raise _unreadable(given, "a budget must be above zero")
    return Budget(size_bytes=size_bytes)


def _unreadable(value: object, reason: str, hint: str = "") -> BudgetError:
    text = repr(value)
    forms = TEXT_FORMS if isinstance(value, str) else FORMS
    shown = f" {text}" if len(text) <= 60 else ""  # the text of a model would fill the screen
    return BudgetError(f"Cannot read the budget{shown}: {reason}. Expected {forms}.{hint}")


def format_bytes(size_bytes: int | float, up: bool = False) -> str:
    """Write bytes in binary units with three significant digits; `up` rounds up, for a budget that must be enough."""
    sign, size = ("-" if size_bytes < 0 else ""), abs(size_bytes)
    for unit, name in BINARY_UNITS:
        if size >= unit:
            number = size / unit
            digits = max(0, 2 - int(math.log10(number)))
            number = math.ceil(number * 10**digits) / 10**digits if up else number
            return f"{sign}{number:.{digits}f} {name}"
    return f"{sign}{size:.0f} B"


def binary_unit(size_bytes: int) -> tuple[int, str]:
    """Return the factor and the name of the largest binary unit in which a size is at least 2."""
    return next((unit for unit in BINARY_UNITS if size_bytes >= 2 * unit[0]), (1, "B"))


def format_time(time_ms: float) -> str:
    """Write a duration for people: microseconds, milliseconds, seconds or minutes."""
    if time_ms < 1:
        return f"{1000 * time_ms:.0f} us"
    if time_ms < 1000:
        return f"{time_ms:.3g} ms"
    return f"{time_ms / 1000:.3g} s" if time_ms < 600_000 else f"{time_ms / 60_000:.3g} min"


def format_ratio(ratio: float) -> str:
    """Write an overhead, a ratio, as a signed percentage."""
    return f"{100 * ratio:+.1f}%"
