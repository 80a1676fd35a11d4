"""One method on one model, in a process of its own: builds, warms up, measures, then takes timed steps when asked to.

`serve` talks over a pipe: it sends one `Row`, and from then on a `Timing` for each number of steps that it receives,
blocked in between; the end of the pipe ends it.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rival_tables import ABSENT, EAGER, FAILED, INFEASIBLE, Row, Timing
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from zoo.models import MODELS

from hiremate_lightning import InfeasibleBudgetError, get_plan, hiremate
from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.testing import changed_thresholds

SEED = 3
WARM_STEPS = 3  # of rivals: the first compiles, the second allocates what stays
OUR_WARM_STEPS = 19  # of ours: the plan's peak and time are measured, and its peak again at the 9th and the 17th step
HAIR = 1.001  # what "least" adds to the smallest budget found
BLOCKS = {  # paths of what users put torch.utils.checkpoint around, where it isn't the items of the lists in the model
    "gpt": r"net\.([1-9]|10)",
    "convnext": r"net\.stages\.\d+\.blocks\.\d+",
    "diffusion": r"net\.(down_blocks\.\d+|mid_block|up_blocks\.\d+)\.(resnets|attentions)\.\d+",
    "regnet": r"net\.s\d+\.b\d+",
    "resnet50": r"net\.layer\d+\.\d+",
    "resnet101": r"net\.layer\d+\.\d+",
    "stable_diffusion_unet": r"down\.\d+\.\d+|middle|up\.\d+\.\d+",
    "resnet50_224": r"net\.layer\d+\.\d+",
    "unet": r"net\.(first|down\.\d+|merge\.\d+)",
}
IN_LISTS = r"net\.((encoder|decoder|transformer|model|bert)\.)*(layers?|blocks?|h)\.\d+"
SAVE = CheckpointPolicy.MUST_SAVE
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = "aten::_scaled_dot_product_"
STRATEGY_SHARE = 50  # per cent, for comparing strategies of ours


class AbsentMethodError(Exception):
    """The model has no such method."""


@dataclass(frozen=True)
class Setup:
    """What a worker is told.

    Attributes:
        model: Name of the model.
        method: Name of the method.
        folder: Where eager leaves its gradients for the others to compare with.
        device: "cpu" or "cuda".
        threads: Threads of torch on the CPU.
        batch: Times that the batch is repeated along its first dimension.
        time_limit_s: Most seconds for solving one plan.
        peak_bytes: What a planned step may add, where that is known.
    """

    model: str
    method: str
    folder: Path
    device: str = "cpu"
    threads: int = 1
    batch: int = 1
    time_limit_s: float = 30.0
    peak_bytes: int = 0


class Trainer:
    """A model, its batch, and its step."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        module, batch = MODELS[setup.model]()
        self.device = torch.device(setup.device)
        self.module = module.to(self.device).train()
        self.batch = tuple(t.to(self.device).repeat(setup.batch, *[1] * (t.dim() - 1)) for t in batch)
        self._buffers = [b.clone() for b in self.module.buffers()]

    def step(self) -> torch.Tensor:
        """Take one training step: no gradients, forward, loss, backward."""
        self.module.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.module(*self.batch)
        loss.backward()
        return loss.detach()

    def fixed_step(self) -> dict[str, list[torch.Tensor]]:
        """Take the step that all methods are compared by; give what it leaves, on the CPU."""
        with torch.no_grad():
            for buffer, start in zip(self.module.buffers(), self._buffers, strict=True):
                buffer.copy_(start)
        torch.manual_seed(SEED)
        loss = self.step()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.cpu() for p in self.module.parameters()]
        return {"gradients": [loss.cpu(), *gradients], "buffers": [b.cpu().clone() for b in self.module.buffers()]}

    def resident_bytes(self) -> int:
        """Count parameters, buffers and batch; on CUDA all that is allocated."""
        self.module.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        tensors = (*self.module.parameters(), *self.module.buffers(), *self.batch)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def peak(self) -> tuple[int, int | None]:
        """Measure what a step adds at its peak, and what the caching allocator holds at most, in bytes."""
        gc.collect()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
        # Of two steps: the allocator must have been watched when what a step frees was allocated.
        with MemoryMeter(self.device) as meter:
            self.step()
            self.module.zero_grad(set_to_none=True)
            meter.mark("second")
            self.step()
        last = meter.intervals[-1]
        reserved = torch.cuda.max_memory_reserved(self.device) if on_gpu else None
        return last.peak_bytes - last.start_bytes, reserved

    def timed(self, steps: int) -> Timing:
        """Time steps, without what the first one on an idle device waits for."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self.step()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize(self.device)
        gc.collect()
        if on_gpu:
            events[0].record()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        cpu = time.process_time() - cpu  # before waiting for the device: waiting is no work of the host
        if on_gpu:
            events[1].record()
            torch.cuda.synchronize(self.device)
        wall = time.perf_counter() - wall
        device = events[0].elapsed_time(events[1]) / 1000 if on_gpu else wall
        return Timing(wall / steps, cpu / steps, device / steps)


# -------------------------------------------------------------------- methods


def prepare(trainer: Trainer, setup: Setup) -> None:
    """Make the module train as the method says."""
    method, module = setup.method, trainer.module
    if method == EAGER:
        return
    if method in ("checkpoint", "checkpoint2"):
        checkpoint_blocks(module, setup.model, 1 if method == "checkpoint" else 2)
    elif method == "selective":
        checkpoint_blocks(module, setup.model, context_fn=selective_contexts)
    elif method == "library":
        own_checkpointing(module.net if isinstance(module.net, nn.Module) else module)
    elif method.startswith(("budget-", "inductor")):
        family, _, share = method.partition("-")
        torch._functorch.config.activation_memory_budget = float(share or 1)
        module.compile(backend="inductor" if family == "inductor" else "aot_eager")
    elif method.startswith("blocks"):
        torch._functorch.config.activation_memory_budget = float(method.removeprefix("blocks").removeprefix("-") or 1)
        for block in blocks_of(module, setup.model):
            block.compile()
    elif method.startswith("strategy-"):
        solver = method.removeprefix("strategy-")
        plan_with(trainer, setup, f"{STRATEGY_SHARE}%", solver=solver)
    elif setup.peak_bytes:
        plan_with(trainer, setup, trainer.resident_bytes() + setup.peak_bytes)
    elif method in ("ours-least", "ours-100", "fused-100"):
        plan_with(trainer, setup, "1%" if method == "ours-least" else "100%")
    else:
        raise AbsentMethodError(f"there is no method {method!r}")


def blocks_of(module: nn.Module, model: str) -> list[nn.Module]:
    """Find what users put torch.utils.checkpoint around, or compile one by one."""
    pattern = BLOCKS.get(model, IN_LISTS)
    blocks = [child for path, child in module.named_modules() if re.fullmatch(pattern, path)]
    if not blocks:
        raise AbsentMethodError("no blocks are known of this model")
    return blocks


def checkpoint_blocks(module: nn.Module, model: str, every: int = 1, **options: Any) -> None:
    """Put torch.utils.checkpoint around every so-manyth block."""
    for block in blocks_of(module, model)[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def selective_contexts() -> Any:
    """Keep the outputs of attention and of every second matrix product, as torchtitan does; recompute all else."""
    counts: Counter[bool] = Counter()

    def decide(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = op.name()
        if name in PRODUCTS:
            counts[context.is_recompute] += 1
            return SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return SAVE if name.startswith(ATTENTION) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def own_checkpointing(net: nn.Module) -> None:
    """Switch on what the library of the model has: transformers, diffusers, timm."""
    if hasattr(net, "gradient_checkpointing_enable"):
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(net, "enable_gradient_checkpointing"):
        net.enable_gradient_checkpointing()
    elif hasattr(net, "set_grad_checkpointing"):
        net.set_grad_checkpointing(True)
    else:
        raise AbsentMethodError("the model has no checkpointing of its own")


def plan_with(trainer: Trainer, setup: Setup, budget: int | str, **options: Any) -> None:
    if setup.method.startswith("fused-"):
        options["compile"] = "inductor"
    plans = setup.folder / f"{setup.model}-{setup.method}-plans"  # its next process runs by the same
    hiremate(trainer.module, budget, time_limit_s=setup.time_limit_s, cache_dir=plans, verbose=False, **options)


def warm_up(trainer: Trainer, setup: Setup) -> float:
    """Take steps until all is compiled, planned and measured; give the seconds of the first."""
    start = time.perf_counter()
    planned_step(trainer, setup)
    synchronize(trainer.device)
    first_s = time.perf_counter() - start
    for _ in range(OUR_WARM_STEPS if is_planned(setup) else WARM_STEPS):
        planned_step(trainer, setup)
    synchronize(trainer.device)
    return first_s


def planned_step(trainer: Trainer, setup: Setup) -> None:
    """Take a step; for "least", replace a budget that can't be met by the smallest that the error names."""
    try:
        trainer.step()
    except InfeasibleBudgetError as error:
        if setup.method != "ours-least":
            raise
        hiremate(trainer.module, math.ceil(error.smallest_bytes * HAIR))
        trainer.step()


def is_planned(setup: Setup) -> bool:
    """Whether the method is ours."""
    return setup.method.startswith(("ours-", "fused-", "strategy-"))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------- comparison and the pipe


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Give the largest difference of a tensor over the largest value of the expected one; 0 if bit for bit equal."""
    if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return 0.0
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or not torch.isfinite(a).all():
            return math.inf
        scale = b.abs().max().item()
        largest = max(largest, (a - b).abs().max().item() / scale if scale else a.abs().max().item())
    return largest


def measure(trainer: Trainer, setup: Setup) -> Row:
    """Warm up and find all but the times."""
    resident_bytes = trainer.resident_bytes()
    prepare(trainer, setup)
    start = time.perf_counter()
    first_s = warm_up(trainer, setup)
    warm_s = time.perf_counter() - start
    reference = setup.folder / f"{setup.model}.pt"
    found = trainer.fixed_step()
    if setup.method == EAGER:
        torch.save(found, reference)
        found = trainer.fixed_step()  # what differs here is chance, not method
    expected = torch.load(reference)
    row = Row(
        setup.model,
        setup.method,
        resident_bytes=resident_bytes,
        first_step_s=first_s,
        warm_s=warm_s,
        difference=difference(found["gradients"], expected["gradients"]),
        buffers_equal=difference(found["buffers"], expected["buffers"]) == 0,
    )
    del found, expected
    peak_bytes, reserved_bytes = trainer.peak()
    row = replace(row, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes, step_s=trainer.timed(1).wall_s)
    return replace(row, rss_bytes=rss_bytes(), **planned(trainer))


def planned(trainer: Trainer) -> dict[str, Any]:
    """Give what our plan says, where there is one."""
    plan = get_plan(trainer.module)
    if plan is None:
        return {}
    seconds = plan.planning
    return {
        "predicted_bytes": plan.planned.peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        "bound_overhead": plan.bound_overhead,
        "planning_s": seconds.capture_s + seconds.profile_s + seconds.solve_s,
    }


def rss_bytes() -> int:
    """Read the memory of this process; 0 where the system doesn't tell in Linux's way."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def guarded(function: Callable[[], Row], setup: Setup) -> Row:
    """Turn what a method can't do into a row that says so: one method must not end the comparison."""
    try:
        return function()
    except InfeasibleBudgetError as error:
        return Row(setup.model, setup.method, INFEASIBLE, f"smallest budget found {error.smallest_bytes:,} bytes")
    except AbsentMethodError as error:
        return Row(setup.model, setup.method, ABSENT, str(error))
    except Exception as error:  # whatever a rival fails with is its result
        traceback.print_exc()
        return Row(setup.model, setup.method, FAILED, f"{type(error).__name__}: {str(error).splitlines()[:1]}")


def serve(setup: Setup, pipe: Connection) -> None:
    """Run in a fresh process: measure, then time steps until the other end closes."""
    with (setup.folder / f"{setup.model}-{setup.method}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(setup.threads)
    if setup.device == "cuda":  # the same kernels in each process
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    kept: list[Trainer] = []

    def build_and_measure() -> Row:
        kept.append(Trainer(setup))
        return measure(kept[0], setup)

    with changed_thresholds(gives_back=False):  # `ours-100` shows what the execution itself costs
        row = guarded(build_and_measure, setup)
        pipe.send(row)
        sys.stdout.flush()
        while row.status not in (INFEASIBLE, ABSENT, FAILED):
            try:
                steps = pipe.recv()
            except EOFError:
                return
            pipe.send(kept[0].timed(steps))
