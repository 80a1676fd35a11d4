"""What a device computes, reads and sends in a millisecond, and the times that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..records.costs import A100, Machine, Profile, estimate
from ..records.graph import Graph

HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a millisecond, for estimates.

    Attributes:
        full: In float32 and whatever is not half precision.
        half: In float16 and bfloat16.
        source: Where the numbers come from.
        link_bytes_per_ms: What it sends to others, where there are several.
    """

    full: Machine
    half: Machine
    source: str
    link_bytes_per_ms: float

    def __str__(self) -> str:
        """Write the rates for people."""
        full, half = (machine.flops_per_ms / 1e9 for machine in (self.full, self.half))
        flops = f"{full:g} TFLOP/s" if full == half else f"{full:g} TFLOP/s ({half:g} in half precision)"
        return f"{flops}, {self.full.bytes_per_ms / 1e6:g} GB/s: {self.source}"


DEFAULT_RATES = {
    "cpu": Rates(Machine(), Machine(), "about one core of a server", 10e6),
    "cuda": Rates(A100, replace(A100, flops_per_ms=312e9), "data sheet of an NVIDIA A100", 300e6),
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
    if link_gb_per_s is not None:
        rates = replace(rates, link_bytes_per_ms=link_gb_per_s * 1e6)
    if tflops is None and gb_per_s is None:
        return rates

    def known(machine: Machine) -> Machine:
        return replace(
            machine,
            flops_per_ms=machine.flops_per_ms if tflops is None else tflops * 1e9,
            bytes_per_ms=machine.bytes_per_ms if gb_per_s is None else gb_per_s * 1e6,
        )

    return replace(rates, full=known(rates.full), half=known(rates.half), source="as given")


def estimate_mixed(graph: Graph, rates: Rates) -> Profile:
    """Estimate each node's time at the rate of the type that it computes in."""
    full, half = estimate(graph, rates.full), estimate(graph, rates.half)

    def is_half(node: int) -> bool:
        return any(graph.tensors[t].dtype in HALF_TYPES for t in graph.nodes[node].outputs)

    times = tuple((half if is_half(node) else full).time_ms[node] for node in range(len(graph.nodes)))
    return replace(full, time_ms=times)
