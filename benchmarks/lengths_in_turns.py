"""Time steps of lengths.py plain and planned, in turns in one process: a ratio that holds on a busy machine.

    python benchmarks/lengths_in_turns.py [--models gpt2_6,unet,columns,gradcache,qwen2_vl] [--steps 100] [--share 0.6]

Seconds are CPU time of all steps, the first ones included; the planned ones with those of the processes that solve.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings

import lengths
import page_tables
import psutil
import torch
from lengths import Batch
from provenance import provenance
from torch import Tensor
from zoo import sizes_that_vary

from hiremate_lightning import hiremate


class _Training:
    """A model that trains, with random numbers of its own."""

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self.model = lengths.build(name)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.seconds, self.losses = list[float](), list[Tensor]()
        if budget_bytes is not None:
            hiremate(sizes_that_vary.planned_part(self.model), budget_bytes, verbose=False)
        torch.manual_seed(1)
        self._random = torch.get_rng_state()

    def step(self, batch: Batch) -> None:
        """Train one step."""
        torch.set_rng_state(self._random)
        start = time.process_time()
        loss = self.model(**batch).loss
        loss.backward()
        self.losses.append(loss.detach())
        del loss
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(time.process_time() - start)
        self._random = torch.get_rng_state()


def _solving_s() -> float:
    """Return the CPU time of the processes that this one has started, those that have ended included."""
    ended = os.times()
    running = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return ended.children_user + ended.children_system + sum(times.user + times.system for times in running)


def row(name: str, steps: int, share: float) -> str:
    """Train a model both ways, and write what it took as a row of the table."""
    before_s = _solving_s()
    plain, planned = _Training(name, None), _Training(name, lengths.budget_of(name, share))
    for index in range(steps):
        others = name in sizes_that_vary.MODELS
        batch = sizes_that_vary.batch_of(name, index) if others else lengths.batch_of(index, int, name.startswith("t5"))
        for training in (plain, planned) if index % 2 else (planned, plain):
            training.step(batch)
    eager_s, planned_s = sum(plain.seconds), sum(planned.seconds) + _solving_s() - before_s
    middle = statistics.median(b / a for a, b in zip(plain.seconds, planned.seconds, strict=True))
    is_equal = all(map(torch.equal, plain.losses, planned.losses))
    count, verdict = lengths.captured_count(planned.model), "equal" if is_equal else "DIFFER"
    seconds = f"{eager_s:.1f}", f"{planned_s:.1f}", f"{planned_s / eager_s:.2f}"
    return page_tables.row(name, *seconds, count, f"{planned.seconds[0]:.1f}", f"{middle:.2f}", verdict)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2_6,llama_6,lora_6,unet,graph")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout.write(f"{provenance()}\n\n")
    seconds = "eager, s", "planned, s", "over eager"
    sys.stdout.write(page_tables.head("model", *seconds, "captured graphs", "first step, s", "median step", "losses"))
    for name in options.models.split(","):
        sys.stdout.write(row(name, options.steps, options.share))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
