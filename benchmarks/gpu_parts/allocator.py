"""What the allocator and cuDNN do with sizes that lie near their rules: 1 to 12 MiB, workspaces, batch norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .runner import Context, Send

SIZES_MIB = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12)
DEPTH, WIDTH = 4, 256
BUDGET = "60%"


def run(context: Context) -> None:
    """Compare peaks, then cuDNN's ways."""
    if not context.has_device:
        context.no_device("peaks of ten graphs", "cuDNN")
        return
    sizes = SIZES_MIB[::6] if context.is_toy else SIZES_MIB
    context.isolated("peaks", compare_peaks, sizes=sizes, folder=context.folder)
    context.isolated("cuDNN", compare_cudnn, is_toy=context.is_toy)


def compare_peaks(send: Send, sizes: tuple[float, ...], folder: Path) -> None:
    """Plan graphs whose tensors have a size; compare the peak that was predicted with the allocator's."""
    import torch
    from torch import nn

    from hiremate_lightning import get_plan, hiremate

    from . import raw
    from .trials import settle

    settle(torch.device("cuda"))
    worst = raw.Worst(folder, "graphs of one size")
    for size in sizes:
        rows, width = int(size * 2**20) // 4 // WIDTH, WIDTH
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
        module, x = nn.Sequential(*layers).cuda(), torch.randn(rows, width, device="cuda")
        hiremate(module, BUDGET, time_limit_s=0.5, verbose=False)

        def step(module: nn.Module = module, x: torch.Tensor = x) -> None:
            module.zero_grad(set_to_none=True)
            module(x).square().mean().backward()

        for _ in range(4):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak, plan = torch.cuda.max_memory_allocated(), get_plan(module)
        assert plan is not None
        known = {"predicted_mib": plan.planned_peak_bytes / 2**20, "measured_mib": peak / 2**20}
        above = (peak - plan.planned_peak_bytes) / 2**20
        send(f"tensors of {size:g} MiB", **known, above_mib=above, within_budget=peak <= plan.budget_bytes)
        worst.see(plan, peak, step)
        del module, x, step, plan
        torch.compiler.reset()
    send("worst plan", **worst.found)


def compare_cudnn(send: Send, is_toy: bool) -> None:
    """Train a small network of convolutions with each choice of algorithms; run batch norms with cuDNN and without."""
    import torch
    from torch import nn

    from hiremate_lightning import get_plan, hiremate

    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        layers = [
            m
            for i in range(3)
            for m in (nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        ]
        module, x = nn.Sequential(*layers).cuda(), torch.randn(2 if is_toy else 32, 3, 64, 64, device="cuda")
        hiremate(module, BUDGET, time_limit_s=0.5, verbose=False)
        for _ in range(4):
            module.zero_grad(set_to_none=True)
            module(x).square().mean().backward()
        torch.cuda.reset_peak_memory_stats()
        module.zero_grad(set_to_none=True)
        module(x).square().mean().backward()
        peak, plan = torch.cuda.max_memory_allocated(), get_plan(module)
        assert plan is not None
        values = {"predicted_mib": plan.planned_peak_bytes / 2**20, "measured_mib": peak / 2**20}
        send(f"cudnn.benchmark={benchmark}", **values, overhead=plan.predicted_overhead)
        torch.compiler.reset()
    send("batch norm, with cuDNN and without", **compare_batch_norm(is_toy))


def compare_batch_norm(is_toy: bool) -> dict[str, Any]:
    """Run one batch norm forward and backward by cuDNN and by PyTorch's own kernels."""
    import torch
    from torch import nn

    from .trials import event_ms

    found: dict[str, Any] = {}
    results = []
    for enabled in (True, False):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(64).cuda(), torch.randn(2 if is_toy else 64, 64, 56, 56, device="cuda")
        x.requires_grad_()

        def step(norm: nn.Module = norm, x: torch.Tensor = x) -> torch.Tensor:
            x.grad = None
            out = norm(x)
            out.sin().sum().backward()
            return out

        with torch.backends.cudnn.flags(enabled=enabled):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results.append((step().detach().clone(), x.grad.clone()))
            kind = "cudnn" if enabled else "own"
            found[f"{kind}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            found[f"{kind}_ms"] = event_ms(step, repeats=5)
    found["same_bits"] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return found
