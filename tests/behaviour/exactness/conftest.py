"""Faults that are planted, and compilers left out, for tests of exactness."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hiremate_lightning.running.execution import Part
from hiremate_lightning.torch_private import inductor


@pytest.fixture
def scaled_gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let captured backwards give gradients that are wrong by a factor."""
    backward = Part.backward

    def scale(factor: float) -> None:
        monkeypatch.setattr(
            Part, "backward", lambda self, values: [g if g is None else factor * g for g in backward(self, values)]
        )

    return scale


@pytest.fixture
def _kernels_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would be one fused kernel operation by operation, which takes no compiler."""
    monkeypatch.setattr(inductor, "compile_graph", lambda module, _: lambda arguments: module(*arguments))
