"""Random training loops: forwards and backwards of small networks in random order, plain and planned, bit for bit.

A loop has one to three kinds of iterations, which come in a cycle or by chance. An iteration is a list of actions:
forwards whose losses wait, backwards of any of these, retained or not, gradients by `autograd.grad`, losses that are
dropped, and steps of the optimizer. So kinds of steps cycle, graphs wait or are retained, and micro-batches accumulate.
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hiremate_lightning import hiremate, remove_hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.signatures.watching import Look, WatchFacts, WatchPolicy
from hiremate_lightning.targets.modules import targets_of
from tests.exact import differing, leave_behind, recorded

WIDTH = 32
ROWS = (1024, 1344, 1792)
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the largest iteration's peak in plain training
ITERATIONS, MEASURED = 14, 3  # the last ones are measured
LONG_ITERATIONS = 1010  # of one loop in so many: the first looks at each kind are over after 500
LONG_EVERY = 50
ACCOUNTED = 500  # last iterations of a long loop of whose time watching may take a share
SLACK_BYTES = 4096  # numbers and states of random generators, which nobody counts
ANNOUNCED = (
    "Nothing fits",
    "no plan leaves",
    "with a margin",
    "began by the wrong plan",
    "first step of another signature",
)

Action = tuple[Any, ...]


@dataclass(frozen=True)
class LoopRecipe:
    iterations: tuple[tuple[Action, ...], ...]  # the actions of each kind of iteration
    order: tuple[int, ...]  # which kind each iteration is of
    share: int  # position in SHARES
    seed: int  # of weights and batches
    has_buffers: bool  # whether the networks have batch norms


def draw_loop(seed: int) -> LoopRecipe:
    rng, count = random.Random(seed), LONG_ITERATIONS if seed % LONG_EVERY == LONG_EVERY - 1 else ITERATIONS
    iterations = tuple(_draw_iteration(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    cycle = [rng.randrange(len(iterations)) for _ in range(rng.randrange(1, 5))]
    by_chance = rng.random() < 0.3
    order = tuple(rng.randrange(len(iterations)) if by_chance else cycle[i % len(cycle)] for i in range(count))
    return LoopRecipe(iterations, order, rng.randrange(len(SHARES)), seed, rng.random() < 0.5)


def _draw_iteration(rng: random.Random) -> tuple[Action, ...]:
    """Draw the actions of an iteration; all that waits at its end has one backward, or is dropped."""
    actions, waiting = list[Action](), 0
    for _ in range(rng.randrange(2, 8)):
        kinds = ["forward", "forward", "chain"] + ["backward", "backward", "retain", "gradient", "drop"] * (waiting > 0)
        kind = rng.choice(kinds)
        if kind in ("forward", "chain"):
            actions.append((kind, rng.choice("ab"), rng.randrange(len(ROWS)), rng.random() < 0.3))
            waiting += 1
        else:
            actions.append((kind, rng.randrange(waiting)))
            waiting -= kind != "retain"
    if waiting:
        actions.append((rng.choice(("together", "drop all", "together")),))
    if not any(action[0] in ("backward", "together", "retain") for action in actions):
        actions += [("forward", "a", 0, False), ("backward", 0)]
    return (*actions, ("step",))


class LoopNet(nn.Module):
    """Two networks that a loop calls apart."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.a, self.b = _make_part(1, has_buffers), _make_part(2, has_buffers)


def _make_part(depth: int, has_buffers: bool) -> nn.Module:
    part = nn.Sequential()
    for _ in range(depth):
        part.extend([nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()])
        if has_buffers:
            part.append(nn.BatchNorm1d(WIDTH))
    return part


def run_iteration(model: LoopNet, actions: tuple[Action, ...], optimizer: Any, seed: int) -> list[Tensor]:
    """Run an iteration up to its optimizer's step; return the losses, and gradients asked for."""
    generator, pending, seen = torch.Generator().manual_seed(seed), list[tuple[Tensor, Tensor]](), list[Tensor]()
    for kind, *settings in actions:
        if kind in ("forward", "chain"):
            name, rows, needs_gradient = settings
            x = torch.randn(ROWS[rows], WIDTH, generator=generator)
            if kind == "chain" and pending:
                x = pending[-1][0].detach() if needs_gradient else pending[-1][0]
            elif needs_gradient:
                x.requires_grad_()
            output = getattr(model, name)(x)
            pending.append((output, output.square().mean()))
            seen.append(pending[-1][1].detach().clone())
            del output, x
        elif kind in ("backward", "retain"):
            index = settings[0] % len(pending)
            _backward(pending, index, retain=kind == "retain" or _is_shared(actions))
            if kind == "backward":
                del pending[index]
        elif kind == "gradient":
            _, loss = pending.pop(settings[0] % len(pending))
            weights = [p for p in model.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=_is_shared(actions))
            seen += [g.sum() for g in found if g is not None]
            del loss, found
        elif kind == "drop":
            del pending[settings[0] % len(pending)]
        elif kind == "together":
            sum(loss for _, loss in pending).backward()
            pending.clear()
        elif kind == "drop all":
            pending.clear()
    return seen


def _is_shared(actions: tuple[Action, ...]) -> bool:
    """Whether forwards may read outputs of others: the graph of one is part of the other's then, and has to stay."""
    return any(kind == "chain" and not settings[2] for kind, *settings in actions)


def _backward(pending: list[tuple[Tensor, Tensor]], index: int, retain: bool) -> None:
    pending[index][1].backward(retain_graph=retain)


@dataclass
class LoopOutcome:
    """A loop's plain and planned training, compared."""

    recipe: LoopRecipe
    differences: int = 0  # number of values that differ in any bit
    peaks: list[int] = field(default_factory=list)  # of the measured iterations, planned
    plain_peaks: list[int] = field(default_factory=list)  # the same without a plan
    budget_bytes: int = 0
    warnings: list[str] = field(default_factory=list)  # of the package
    iterations: int = 0  # of the loop
    watched: int = 0  # steps that were measured or timed
    watching: float = 0.0  # share of the time of a long loop's last iterations that was taken by watching; 0 for others
    kinds: int = 0  # how many kinds of steps have a plan

    @property
    def is_over_budget(self) -> bool:
        """Whether an iteration took more than its budget without a warning."""
        warns = any(words in text for text in self.warnings for words in ANNOUNCED)
        return max(self.peaks) > self.budget_bytes + SLACK_BYTES and not warns


def compare_loop(recipe: LoopRecipe) -> LoopOutcome:
    """Train a loop twice, plainly and under a budget that is a share of what its largest iteration takes plainly."""
    outcome = LoopOutcome(recipe, iterations=len(recipe.order))
    plain = _train(recipe, None, outcome.plain_peaks)
    outcome.budget_bytes = max(2**20, int(SHARES[recipe.share] * max(outcome.plain_peaks)))  # less is refused
    with recorded() as outcome.warnings:
        planned = _train(recipe, outcome, outcome.peaks)
    outcome.differences = len(differing(planned, plain))
    return outcome


@contextmanager
def _counting_watched() -> Iterator[list[bool]]:
    """Note of each step that begins whether it is watched."""
    begin, found = WatchPolicy.choose_look, list[bool]()

    def counted(policy: WatchPolicy, step: WatchFacts) -> Look:
        look = begin(policy, step)
        found.append(look.is_measured or look.is_timed)
        return look

    WatchPolicy.choose_look = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        WatchPolicy.choose_look = begin  # type: ignore[method-assign]


def share_of_watching(took: list[tuple[int, float, bool]]) -> float:
    """Compute the share of the time of a loop's last iterations that was taken by watching them.

    Args:
        took: For each iteration of the loop its kind, its seconds, and whether it was watched.
    """
    took = took[-ACCOUNTED:]
    usual = defaultdict[int, list[float]](list)
    for kind, seconds, is_watched in took:
        if not is_watched:
            usual[kind].append(seconds)
    extra = [max(0.0, seconds - median(usual[kind])) for kind, seconds, is_watched in took if is_watched]
    return sum(extra) / sum(seconds for _, seconds, _ in took)


def _train(recipe: LoopRecipe, outcome: LoopOutcome | None, peaks: list[int]) -> list[Tensor | None]:
    torch.manual_seed(recipe.seed)
    model, log = LoopNet(recipe.has_buffers), list[Tensor | None]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if outcome is not None:
        hiremate(
            model, outcome.budget_bytes, optimizer=optimizer, on_infeasible="warn", time_limit_s=5.0, verbose=False
        )
    took, unmeasured = list[tuple[int, float, bool]](), len(recipe.order) - MEASURED
    with _counting_watched() as watched:
        for index, kind in enumerate(recipe.order):
            actions, seen = recipe.iterations[kind], list[Tensor]()

            def iterate(actions: Any = actions, seed: int = 1000 * recipe.seed + index, seen: Any = seen) -> None:
                seen += run_iteration(model, actions, optimizer, seed)

            if index < unmeasured:
                began_at, begun = time.thread_time(), len(watched)
                iterate()
                took.append((kind, time.thread_time() - began_at, any(watched[begun:])))
            else:
                gc.collect()
                state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                there = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *gradients, *state))
                peaks.append(there + measure_peak(iterate))
            optimizer.step()
            log += [*seen, *leave_behind(model)]
            optimizer.zero_grad(set_to_none=False)
    if outcome is not None:
        targets = targets_of(model)
        assert targets is not None
        outcome.kinds, outcome.watched = len(targets.session.plans), sum(watched)
        if len(took) > ACCOUNTED:
            outcome.watching = share_of_watching(took)
        remove_hiremate(model)
    return log
