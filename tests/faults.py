"""Faults that tests plant, to see that they are noticed or do no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from hiremate_lightning.capturing import backend
from hiremate_lightning.capturing.capture import Absence, Captured
from hiremate_lightning.running import program


def change_captures(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[fx.Graph, Callable[[], Captured]], Captured]
) -> None:
    """Let joint graphs be captured otherwise, or not at all: `change` takes a graph, and what captures it."""
    capture = backend.capture
    monkeypatch.setattr(backend, "capture", lambda joint, *given: change(joint.graph, lambda: capture(joint, *given)))


def change_absences(monkeypatch: pytest.MonkeyPatch, change: Callable[[Captured, Absence], Absence]) -> None:
    """Let programs count on something else where some gradients of outputs do not come."""
    find = program.find_absent
    monkeypatch.setattr(program, "find_absent", lambda captured, missing: change(captured, find(captured, missing)))


def overwriting_nothing(is_changed: Callable[[Captured], Any]) -> Callable[[Captured, Absence], Absence]:
    """Let some backwards overwrite nothing, as if other values died in them."""
    return lambda captured, absence: replace(absence, overwrites={}) if is_changed(captured) else absence
