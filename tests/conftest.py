"""What all tests share: one seed, and skips that say why."""

from __future__ import annotations

import importlib.util

import pytest
import torch

MODEL_PACKAGES = ("transformers", "timm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", "no CUDA device"))
    if missing:
        skips.append(("models", f"not installed: {', '.join(missing)} (extra: models)"))
    for marker, reason in skips:
        for item in items:
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
