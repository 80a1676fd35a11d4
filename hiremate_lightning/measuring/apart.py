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
    """Restore random state, gradient mode, autocast, and a measurement of the step under way afterwards."""
    with unmeasured(device), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def unmeasured(device: torch.device) -> Iterator[None]:
    """Restore random state, that of Python and NumPy too, and a measurement of the step under way afterwards."""
    meter = MemoryMeter.covering(device) if MemoryMeter.is_available(device) else nullcontext()
    devices = [device] if device.type == "cuda" else []
    with (
        torch.cuda.device(device) if devices else nullcontext(),  # events are of the current device
        meter,
        tensor_state.real_mode(),
        torch.random.fork_rng(devices=devices),
    ):
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  custom operators may draw there
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
