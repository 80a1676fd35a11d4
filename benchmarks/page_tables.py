"""Tables of Markdown, as every page of results has them; scripts that measure for long print line by line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Write a whole table.

    Args:
        columns: What is above each column.
        rows: The cells of each row.
    """
    return head(*columns) + "".join(row(*cells) for cells in rows)


def head(*columns: Any) -> str:
    """Write what is above the rows."""
    return f"{row(*columns)}|{'--|' * len(columns)}\n"


def row(*cells: Any) -> str:
    """Write one row; what would end a cell or a row is written so that it doesn't."""
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
