"""Import torchvision as it is, and timm where torchvision is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import torch


def mend_torchvision() -> None:
    """Let torchvision be imported where it was built for CUDA and torch was not: define the operators it describes."""
    try:
        with suppress(ImportError):
            importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@contextmanager
def torchvision_or_stand_in() -> Iterator[None]:
    """Let timm be imported where torchvision is not: its data pipeline needs it, the models that we build don't."""
    if importlib.util.find_spec("torchvision") is not None:
        mend_torchvision()
        yield
        return
    names = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
    stand_ins = {f"torchvision{name}": _StandIn(f"torchvision{name}") for name in names}
    for name, module in stand_ins.items():
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(stand_ins[parent], child, module)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


class _StandIn(types.ModuleType):
    """A package in which every name is a class that nothing is an instance of, or an enumeration."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock() if name == "InterpolationMode" else type(name, (), {})
