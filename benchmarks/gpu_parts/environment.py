"""The machine: device, driver, versions, `doctor`, and the rates that any result is to be read beside."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import provenance

from .runner import Context, Send

PACKAGES = (
    "transformers",
    "timm",
    "lightning",
    "accelerate",
    "triton",
    "mip",
    "highsbox",
    "highspy",
    "numpy",
    "pytest",
)


def run(context: Context) -> None:
    """Describe the machine, then measure its rates."""
    context.say("machine", f"{provenance.processor()}; {provenance.versions(*PACKAGES)}; commit {provenance.commit()}")
    context.say("driver", _driver())
    if context.has_device:
        context.isolated("rates", measure_rates, is_toy=context.is_toy)
    else:
        context.no_device("device", "rates")
    context.isolated("doctor", examine)


def _driver() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi says nothing: {type(error).__name__}"
    return found.stdout.strip() or found.stderr.strip()


def examine(send: Send) -> None:
    """Ask `hiremate doctor`, which compares bits: with kernels that add in one order."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    from hiremate_lightning.command_line.doctor import examine as findings

    for finding in findings():
        send(f"doctor: {finding.name}", "failed" if finding.verdict.value == "BAD" else "ok", found=finding.words)


def measure_rates(send: Send, is_toy: bool) -> None:
    """Describe the device, then measure copies and a matrix product."""
    import torch

    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    context_bytes = total - free - torch.cuda.memory_reserved()
    send("device", device=torch.cuda.get_device_name(), total_gib=total / 2**30, context_mib=context_bytes / 2**20,
         capability=f"{found.major}.{found.minor}", cuda=str(torch.version.cuda), cudnn=str(_cudnn_version()),
         python=sys.version.split()[0])  # fmt: skip
    measure_copies(send, is_toy)
    measure_product(send, is_toy)


def measure_copies(send: Send, is_toy: bool) -> None:
    """Measure copies in both directions and on the device."""
    import torch

    from .trials import event_ms

    size = 2**20 if is_toy else 2**30
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=not is_toy)
    on_device, other = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    copies = {
        "host to device, pinned": (on_device, on_host),
        "device to host, pinned": (on_host, on_device),
        "device to device, read and written": (other, on_device),
    }
    for name, (to, source) in copies.items():
        ms = event_ms(partial(to.copy_, source, non_blocking=True), repeats=3 if is_toy else 10)
        send(name, gb_per_s=(2 if to is other else 1) * size / ms / 1e6, ms=ms)


def measure_product(send: Send, is_toy: bool) -> None:
    """Measure a matrix product in bfloat16, of random numbers."""
    import torch

    from .trials import event_ms

    side = 256 if is_toy else 8192
    a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    ms = event_ms(partial(torch.mm, a, b), repeats=3 if is_toy else 20)
    send(f"matrix product, bfloat16, {side} cubed", tflop_per_s=2 * side**3 / ms / 1e9, ms=ms)


def _cudnn_version() -> int | None:
    import torch

    return torch.backends.cudnn.version()
