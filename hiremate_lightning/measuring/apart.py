"""Run things beside the step under way, so that it does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from ..memory.metering import MemoryMeter
from ..torch_private import tensor_state


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Leave random state, gradient mode, autocast, and a measurement of the step under way as they are found."""
    with unmeasured(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def unmeasured(device: torch.device) -> Iterator[None]:
    """Leave random state and a measurement of the step under way as they are found."""
    meter = MemoryMeter.covering(device) if MemoryMeter.is_available(device) else nullcontext()
    devices = [device] if device.type == "cuda" else []
    with (
        torch.cuda.device(device) if devices else nullcontext(),  # events are of the current device
        meter,
        tensor_state.real_mode(),
        torch.random.fork_rng(devices=devices),
        _same_draws_on_host(),
    ):
        yield


@contextmanager
def _same_draws_on_host() -> Iterator[None]:
    """Leave the random state of Python and NumPy as it is found: custom operators may draw from these."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what users may draw from
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
