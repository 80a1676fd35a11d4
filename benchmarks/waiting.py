"""Measure how long training waits for plans after the first one, and what solving them in the background costs instead.

    python benchmarks/waiting.py [--model gpt2|llama] [--layers 24] [--steps 60] [--share 0.3] [--rounds 2]

The model of transformers has random weights, AdamW trains it on one thread. Its steps are of three kinds: a short
batch, a longer one, and two calls in one step; a third of the steps each, one kind after the other, then as many in
turns. The budget is what exists before a step and a share of what the longer batch adds in eager PyTorch. Each way runs
in a process of its own, in turns.

Seconds are CPU time, which holds on a busy machine too. Prints a Markdown table: what all steps take but the first of
each kind, which captures; what solving takes after the first plan while training waits, in all and at most for one
plan, and while it goes on; how many steps ran by a plan for the meantime; what the final plans compute again, in shares
of a step; and whether every loss is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any

import page_tables
import psutil
import torch
from provenance import provenance
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.solvers import worker
from hiremate_lightning.sessions.plan_maker import PlanMaker
from hiremate_lightning.sessions.step_kind import StepKind
from hiremate_lightning.sessions.targets import targets_of

ROWS, WORDS, SHORT, LONG, WIDTH = 4, 1000, 64, 112, 128
WAYS = {"training waits": False, "in the background": True}


def build(name: str, layers: int) -> nn.Module:
    """Make a model of random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": layers}
        config = transformers.LlamaConfig(vocab_size=WORDS, num_attention_heads=4, use_cache=False, **shape)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=layers, n_head=4, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def train(name: str, layers: int, steps: int, share: float, background: bool) -> dict[str, Any]:
    """Train one way and return what was measured."""
    model = build(name, layers)
    generator = torch.Generator().manual_seed(1)
    batches = {length: torch.randint(WORDS, (ROWS, length), generator=generator) for length in (SHORT, LONG)}

    def act(kind: int) -> torch.Tensor:
        ids = batches[LONG if kind == 1 else SHORT]
        loss = model(input_ids=ids, labels=ids).loss
        if kind == 2:
            other = batches[SHORT].flip(0)
            loss = loss + model(input_ids=other, labels=other).loss
        loss.backward()
        return loss.detach()

    added_bytes = measure_peak(lambda: act(1))
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    waits = _count_waiting()
    before_bytes = 4 * sum(p.nbytes for p in model.parameters())  # weights, gradients, and two moments
    hiremate(model, before_bytes + int(share * added_bytes), verbose=False, background=background)
    torch.manual_seed(1)
    each = steps // 3
    losses, seconds, meanwhile = [], [], 0
    for kind in [*[0] * each, *[1] * each, *[2] * each, *[0, 1, 2] * each]:
        start = time.process_time()
        losses.append(act(kind))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        plan = get_plan(model)
        meanwhile += plan is not None and plan.is_meanwhile
    known = targets_of(model)
    assert known is not None, "it was planned"
    while any(plan.is_meanwhile for plan in known.session.plans.values()):  # no step runs by them any more
        time.sleep(1)
        act(0)
    return {
        "seconds": sum(s for index, s in enumerate(seconds) if index not in (0, each, 2 * each)),
        "waits": waits[1:],
        "aside": _aside_s(),
        "meanwhile": meanwhile,
        "overheads": [plan.predicted_overhead for plan in known.session.plans.values()],
        "losses": hashlib.sha256(torch.stack(losses).numpy().tobytes()).hexdigest(),
    }


def _count_waiting() -> list[float]:
    """Return a list that gets the seconds of solving that training waits for, plan by plan."""
    seconds, make = list[float](), PlanMaker.make

    def timed(maker: PlanMaker, kind: StepKind) -> Any:
        start = _waited_s()
        try:
            return make(maker, kind)
        finally:
            seconds.append(_waited_s() - start)

    PlanMaker.make = timed  # type: ignore[method-assign]
    return seconds


def _waited_s() -> float:
    """Return the CPU time of the process that solves while training waits."""
    process = worker._worker and worker._worker._process
    times = psutil.Process(process.pid).cpu_times() if process else None
    return times.user + times.system if times else 0.0


def _aside_s() -> float:
    """Return the CPU time of the processes that solve while training goes on; each ends with its plan."""
    ended = os.times()
    return ended.children_user + ended.children_system


def main() -> None:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=(*WAYS,), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.way:
        found = train(options.model, options.layers, options.steps, options.share, WAYS[options.way])
        sys.stdout.write(json.dumps(found))
        return
    cores = len(os.sched_getaffinity(0))
    sys.stdout.write(f"{provenance('transformers')}; one thread, {cores} cores; {options.model}\n\n")
    seconds = "steps, s", "waited, s", "at most, s", "solved aside, s"
    sys.stdout.write(page_tables.head("plans", *seconds, "steps meanwhile", "computed again", "losses"))
    expected = None
    for way in [*WAYS] * options.rounds:
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        expected = expected or found["losses"]
        verdict = "equal" if found["losses"] == expected else "DIFFER"
        again = ", ".join(f"{overhead:.1%}" for overhead in found["overheads"])
        waited, most = sum(found["waits"]), max(found["waits"], default=0.0)
        taken = (f"{seconds:.1f}" for seconds in (found["seconds"], waited, most, found["aside"]))
        sys.stdout.write(page_tables.row(way, *taken, found["meanwhile"], again, verdict))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
