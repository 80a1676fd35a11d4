"""What a device computes, reads and sends in a millisecond: what times are estimated from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..records.costs import A100, Machine


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a millisecond, for estimates.

    Attributes:
        machine: What it computes, and reads and writes.
        source: Where the numbers come from.
        link_bytes_per_ms: What it sends to others, where there are several.
    """

    machine: Machine
    source: str
    link_bytes_per_ms: float

    def __str__(self) -> str:
        """Write the rates for people."""
        machine = self.machine
        flops, half = f"{machine.flops_per_ms / 1e9:g} TFLOP/s", machine.half_flops_per_ms
        flops = flops if half is None else f"{flops} ({half / 1e9:g} in half precision)"
        return f"{flops}, {machine.bytes_per_ms / 1e6:g} GB/s: {self.source}"


DEFAULT_RATES = {
    "cpu": Rates(Machine(), "about one core of a server", 10e6),
    "cuda": Rates(replace(A100, half_flops_per_ms=312e9), "data sheet of an NVIDIA A100", 300e6),
}


def rates_of(
    device: torch.device, tflops: float | None = None, gb_per_s: float | None = None, link_gb_per_s: float | None = None
) -> Rates:
    """Return the rates of a kind of device, with what the user knows better.

    Args:
        device: The device that is planned for.
        tflops: Arithmetic, in 10**12 operations a second; None for the default.
        gb_per_s: Memory traffic, in 10**9 bytes a second; None for the default.
        link_gb_per_s: What it sends to others, in 10**9 bytes a second; None for the default.
    """
    rates = DEFAULT_RATES[device.type]
    machine, link_bytes_per_ms = rates.machine, rates.link_bytes_per_ms
    if tflops is not None:
        machine = replace(machine, flops_per_ms=tflops * 1e9, half_flops_per_ms=None)
    if gb_per_s is not None:
        machine = replace(machine, bytes_per_ms=gb_per_s * 1e6)
    if link_gb_per_s is not None:
        link_bytes_per_ms = link_gb_per_s * 1e6
    return Rates(machine, rates.source if machine is rates.machine else "as given", link_bytes_per_ms)
