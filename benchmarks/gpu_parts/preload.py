"""What the server imports once, for all processes that it forks. No device is touched."""

from __future__ import annotations

import importlib
import os
import time
import warnings

from .runner import Setting

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS takes the same ways in each run
warnings.simplefilter("ignore")
if Setting.of_environment().is_simulated:
    from tests.simulated_gpu import build, torch_cuda

    device = build.load()  # before PyTorch is imported
    torch_cuda.install(device)
    device.add_in_any_order(time.time_ns(), True)  # as kernels of a GPU do
for name in ("torch._dynamo", "torch._functorch.aot_autograd", "rival_worker", "hiremate_lightning.api"):
    importlib.import_module(name)
