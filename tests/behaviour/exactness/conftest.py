"""Faults that are planted, and compilers left out, for tests of exactness."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hiremate_lightning.running.execution import GraphRuntime
from hiremate_lightning.torch_private import inductor


@pytest.fixture
def scaled_gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let captured backwards give gradients that are wrong by a factor."""
    backward = GraphRuntime.backward

    def scale(factor: float) -> None:
        monkeypatch.setattr(
            GraphRuntime,
            "backward",
            lambda self, values: [g if g is None else factor * g for g in backward(self, values)],
        )

    return scale


@pytest.fixture
def compile_kernels_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Let another function compile what is to be one fused kernel: it takes the module, and its inputs."""
    return partial(monkeypatch.setattr, inductor, "compile_graph")


@pytest.fixture
def _kernels_uncompiled(compile_kernels_by: Callable[[Callable[..., Any]], None]) -> None:
    """Run what would be one fused kernel operation by operation, which takes no compiler."""
    compile_kernels_by(lambda module, _: lambda arguments: module(*arguments))
