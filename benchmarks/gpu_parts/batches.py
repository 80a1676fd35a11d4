"""The largest batch inside a real memory limit: doubling and halving, beside `find_max_batch_size`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .runner import Context, Send

LIMIT_GIB, TOY_GIB = 12.0, 0.08
OF_LIMIT, TOY_OF_LIMIT = 0.95, 0.5  # what the budget is of the limit: segments are large beside small tensors
MAX_SIZE, TOY_MAX_SIZE = 8192, 32
MAX_OVERHEAD = 0.3


def run(context: Context) -> None:
    """Search both ways, each in a process of its own."""
    if not context.has_device:
        context.no_device("plain", "planned")
        return
    for name, function in (("plain", search_plain), ("planned", search_planned)):
        context.isolated(name, function, 40.0, is_toy=context.is_toy)


class Training:
    """A GPT, its optimizer, and batches of any size, inside a memory limit.

    Attributes:
        module: The model.
        optimizer: Its optimizer.
        limit_bytes: What the process may have.
        max_size: Largest batch to try.
    """

    def __init__(self, is_toy: bool) -> None:
        import torch
        from torch import nn
        from zoo.networks import Block

        self.max_size = TOY_MAX_SIZE if is_toy else MAX_SIZE
        self.limit_bytes = int((TOY_GIB if is_toy else LIMIT_GIB) * 2**30)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total)
        torch.manual_seed(0)
        self.length, width, depth = (32, 64, 1) if is_toy else (1024, 1024, 12)
        net = nn.Sequential(nn.Embedding(256, width), *(Block(width, 8) for _ in range(depth)), nn.Linear(width, 256))
        self.module = net.cuda()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

    def batch(self, size: int) -> Any:
        """Make a batch."""
        import torch

        return torch.randint(0, 256, (size, self.length + 1), device="cuda")

    def step(self, module: Any, batch: Any) -> None:
        """Take a training step under autocast."""
        import torch
        from torch.nn import functional as F

        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()

    def samples_per_s(self, size: int) -> float:
        """Measure training at a size, after steps that plan it."""
        from .trials import event_ms

        batch = self.batch(size)
        for _ in range(5):
            self.step(self.module, batch)
        return 1e3 * size / event_ms(lambda: self.step(self.module, batch), repeats=5)


def search_plain(send: Send, is_toy: bool) -> None:
    """Double the batch until it does not fit, then halve the gap."""
    import torch

    start, training = time.time(), Training(is_toy)

    def fits(size: int) -> bool:
        try:
            for _ in range(2):
                training.step(training.module, training.batch(size))
        except torch.OutOfMemoryError:
            return False
        finally:
            training.optimizer.zero_grad()
            torch.cuda.empty_cache()
        return True

    size = largest(fits, training.max_size)
    seconds = time.time() - start
    send("plain", size=size, samples_per_s=training.samples_per_s(size), search_s=seconds, **_memory(training))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Find the largest size that fits, 0 for none."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search_planned(send: Send, is_toy: bool) -> None:
    """Find the largest batch by planning, then train at it."""
    import torch

    from hiremate_lightning import find_max_batch_size, get_plan, hiremate

    start, training = time.time(), Training(is_toy)
    budget = int((TOY_OF_LIMIT if is_toy else OF_LIMIT) * training.limit_bytes)
    result = find_max_batch_size(
        training.module,
        training.batch,
        training.step,
        budget=budget,
        max_overhead=MAX_OVERHEAD,
        max_val=training.max_size,
        max_trials=3 if is_toy else 25,
        time_limit_s=0.5 if is_toy else 3.0,
        verbose=False,
    )
    seconds = time.time() - start
    found = {"size": int(result), "unplanned_size": result.unplanned_size, "limited_by": result.limited_by}
    send("planned, search", **found, search_s=seconds, real_steps=result.real_steps, **_memory(training))
    hiremate(training.module, budget, optimizer=training.optimizer, time_limit_s=3.0, verbose=False)
    torch.cuda.reset_peak_memory_stats()
    per_s = training.samples_per_s(int(result))
    plan = get_plan(training.module)
    overhead = None if plan is None else plan.predicted_overhead
    send("planned", size=int(result), samples_per_s=per_s, predicted_overhead=overhead, **_memory(training))


def _memory(training: Training) -> dict[str, Any]:
    import torch

    return {
        "allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        "limit_mib": training.limit_bytes / 2**20,
        "out_of_memory": torch.cuda.memory_stats().get("num_ooms", 0),
    }
