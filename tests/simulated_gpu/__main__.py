"""Run pytest on the simulated GPU; arguments go to it: `python -m tests.simulated_gpu -m gpu tests`."""

from __future__ import annotations

import sys
import warnings

from . import build, torch_cuda

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch warns of its own while it is imported; tests take warnings for errors
    torch_cuda.install(build.load())

import pytest

sys.exit(pytest.main(sys.argv[1:]))
