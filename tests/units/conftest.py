"""Answers of a GPU where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def answer_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let functions of `torch.cuda` that take a device be others, by their names."""

    def answer(**functions: Callable[[Any], Any]) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    return answer
