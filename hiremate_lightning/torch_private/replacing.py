"""Something in the place of attributes, or of entries of tables, for a while: how this folder changes torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

StandIn = tuple[Any, str, Any]  # for an attribute: its owner, its name, and what is in its place


@contextmanager
def replaced(*stand_ins: StandIn) -> Iterator[None]:
    """Put something in the place of attributes for a while."""
    originals = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(stand_ins, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def replaced_entries(table: MutableMapping[Any, Any], stand_ins: Mapping[Any, Any]) -> Iterator[None]:
    """Put something in the place of entries of a table, or add entries to it, for a while."""
    originals = {key: table[key] for key in stand_ins if key in table}
    table.update(stand_ins)
    try:
        yield
    finally:
        for key in stand_ins:
            del table[key]
        table.update(originals)
