"""A budget for real: the process may not have more memory, two lengths alternate, and training must not run out.

PyTorch's limit counts what its allocator holds, without the CUDA context, so it is the budget itself that is set. Where
training runs out, the limit is raised step by step: how far says what fragmentation costs.
"""

from __future__ import annotations

from typing import Any

from .runner import Context, Send

LIMIT_S = 30.0
STEPS = 30
SHARE = 0.55  # of what a plain step adds at its peak
RAISED = (1.0, 1.02, 1.05, 1.1, 1.2)  # times the budget
SETTINGS = ("expandable_segments:False", "expandable_segments:True")


def run(context: Context) -> None:
    """Train inside the limit, with segments that grow and without."""
    if not context.has_device:
        context.no_device(*SETTINGS)
        return
    for setting in SETTINGS[:1] if context.is_toy else SETTINGS:
        context.isolated(setting, train_inside, LIMIT_S, setting=setting, is_toy=context.is_toy)


def train_inside(send: Send, setting: str, is_toy: bool) -> None:
    """Train plain to learn its peak, then planned inside the limit, then plain inside the limit."""
    import torch

    from hiremate_lightning import get_plan, hiremate, remove_hiremate

    if not is_toy:
        torch.cuda.memory._set_allocator_settings(setting)
    total = torch.cuda.get_device_properties(0).total_memory
    trainer = Alternating(is_toy)
    plain = trainer.train(4)
    budget = trainer.resident + int(SHARE * (plain["allocated"] - trainer.resident))
    hiremate(trainer.module, budget, time_limit_s=1.0 if is_toy else 5.0, verbose=False)
    for factor in RAISED:
        torch.cuda.set_per_process_memory_fraction(min(1.0, factor * budget / total))
        found = trainer.train(6 if is_toy else STEPS)
        send(
            f"{setting}, planned at {factor:.2f} of the budget",
            **trainer.told(found),
            budget_mib=budget / 2**20,
            reserved_of_budget=found["reserved"] / budget,
            allocated_of_budget=found["allocated"] / budget,
            predicted_mib=None if (plan := get_plan(trainer.module)) is None else plan.planned_peak_bytes / 2**20,
        )
        if found["finished"] == found["wanted"]:
            break
    remove_hiremate(trainer.module)
    send(f"{setting}, plain at the same limit", **trainer.told(trainer.train(4)))
    send(f"{setting}, plain without a limit", **trainer.told(plain))


class Alternating:
    """Trains a decoder on two lengths in turn.

    Attributes:
        module: The model.
        resident: Bytes of what exists before a step.
    """

    def __init__(self, is_toy: bool) -> None:
        import torch
        from rival_worker import synchronize
        from zoo.large import TOY_LLAMA, LlamaSize, llama

        from .trials import settle

        size = LlamaSize(layers=8, width=1024, heads=16, kv_heads=8, hidden=3584, vocabulary=32_000, length=2048)
        self.module, whole = llama(TOY_LLAMA if is_toy else size, "cuda", batch=8)
        shorter = whole[0].shape[1] * 3 // 4
        self._batches = (whole, tuple(t[:, :shorter].contiguous() for t in whole))
        settle(torch.device("cuda"))
        synchronize(torch.device("cuda"))
        self.resident = torch.cuda.memory_allocated()

    def train(self, steps: int) -> dict[str, Any]:
        """Take steps until the memory is over; return how many, and the most that was allocated and reserved."""
        import torch

        self.module.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        finished = 0
        try:
            for index in range(steps):
                self.module.zero_grad(set_to_none=True)
                self.module(*self._batches[index % 2]).backward()
                finished += 1
        except torch.OutOfMemoryError:
            pass
        return {
            "wanted": steps,
            "finished": finished,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
        }

    @staticmethod
    def told(found: dict[str, Any]) -> dict[str, Any]:
        """Put what was found into words."""
        return {
            "trains": found["finished"] == found["wanted"],
            "steps": f"{found['finished']} of {found['wanted']}",
            "allocated_mib": found["allocated"] / 2**20,
            "reserved_mib": found["reserved"] / 2**20,
            "retries": found["retries"],
        }
