"""The largest batch within a budget, found by planning: steps at two small sizes, a forecast for others, a proof.

1. Run one real step at each of two sizes, at the least memory, and record them.
2. Refit the step as a function of the size (`Forecast`), and search for the best size with the planner (`size_search`).
3. Run the step at that size, plan it by its measurement, run it by its plan, and compare its peak with the budget.
   If it does not fit, refit with this step and search below it.

So no size is tried that was not predicted to fit, and the size that is returned has run. At most six real steps run,
and all state that they change is restored: weights, optimizers, random generators.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..calls.refused import refuse
from ..errors import BudgetError, ConfigurationError, HiRemateWarning
from ..housekeeping import log
from ..memory.allocator import allocated_bytes
from ..memory.metering import MemoryMeter
from ..options import SIZE_OPTIONS, SizeOptions, make_size_options
from ..out_of_memory import InfeasibleBudgetError
from ..planning.planner import make_options
from ..records.expressions import Line
from ..records.graph import OUTSIDE, Graph
from ..reporting.report import Reporter
from ..targets.candidates import Target
from ..targets.modules import Targets, targets_of
from ..torch_private import runtime
from ..units import Budget, format_bytes, format_ratio, parse_budget
from .size_search import (
    BatchSizeResult,
    Forecast,
    FoundSize,
    Limit,
    SizeTrial,
    least_memory,
    result_table,
    search,
    trial_of,
)
from .size_trials import SizeRunner, TrainingState, TrialSteps

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

MAX_STEPS = 6  # most real steps of a search
FAR = 4  # take a third sample half way if the largest size that fits exceeds so many times the second
CAUTION = 0.9  # factor on the largest accepted overhead, after a predicted overhead was too low
STEP_BACK = 0.8  # next size, as a share of one that failed, if there is no forecast


def find_max_batch_size(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    step: Callable[[nn.Module, Any], Any],
    *,
    budget: int | float | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    validate: Callable[[nn.Module, Any], Any] | None = None,
    stateful: Sequence[Stateful] = (),
    init_val: int = 2,
    max_val: int = 8192,
    max_overhead: float = 0.3,
    objective: str = "largest",
    margin: float = 0.05,
    max_trials: int = 25,
    target: Target = None,
    time_limit_s: float = 3.0,
    solver: str = "portfolio",
    verbose: bool = True,
) -> BatchSizeResult:
    """Find the largest batch that trains within a budget, without running out of memory on the way.

    Afterwards the model, its optimizers and all random generators are as they were. Under torch.distributed every rank
    calls it, and all get the smallest of their sizes.

    Args:
        model: The module to train, on its device; planned by `hiremate` or not.
        make_batch: Gives a batch of a size, on the model's device; of the longest samples where lengths vary. The size
            may also be a sequence length, or any number that the batch grows with.
        step: Takes the model and a batch, and runs one training step: forward, backward, optimizer.
        budget: Bytes ("12 GiB", an int) or "auto", as for `hiremate`; None for the budget of a planned model, else
            "auto". A share is refused, since what it is a share of grows with the batch.
        optimizer: Found by itself where `step` steps it.
        validate: Takes the model and a batch, and runs one step of validation, whose memory counts too.
        stateful: What else a step changes: schedulers, a gradient scaler.
        init_val: Size of the first real step; small.
        max_val: Largest size to find: the length of the data set, say, at which HiRemateBatchSizeFinder stops by
            itself.
        max_overhead: Most predicted overhead to accept, a ratio.
        objective: "largest", or "throughput" for the most samples per second.
        margin: Share of what the budget leaves beside weights and optimizer that predictions must leave free.
        max_trials: Most sizes to plan in one search.
        target: As for `hiremate`.
        time_limit_s: Seconds for solving one plan, counted as the work of an idle core; training may take longer and
            gets a plan at least as fast.
        solver: Leave it at the default, "portfolio", the best of several strategies. The others are for comparison:
            "segments", without a MIP solver; "none"; or a method of a paper: "hilp", "rockmate", "rotor", "pofo",
            "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr"; see docs/formulation.md.
        verbose: Whether to report the search, on rank zero.

    Returns:
        The size, and what was found on the way; `int(result)` is the size.

    Raises:
        BudgetError: If the budget can't be read, or is a share.
        ConfigurationError: If an argument is out of its range, or the step can't be scaled.
        InfeasibleBudgetError: If not even size 1 fits.

    Example:
        >>> result = find_max_batch_size(model, make_batch, step, budget="10 GiB")
        >>> loader = DataLoader(data, batch_size=int(result))
    """
    # Here `locals()` has only the arguments.
    options = make_size_options(**{name: value for name, value in locals().items() if name in SIZE_OPTIONS})
    root = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    targets = targets_of(root) if isinstance(root, nn.Module) else None
    default = Budget() if targets is None else targets.session.options.budget
    chosen = default if budget is None else parse_budget(budget)
    asked = make_options(chosen, time_limit_s=time_limit_s, solver=solver, verbose=verbose)

    def train(size: int, trial: TrialSteps) -> None:
        batch = make_batch(size)
        trial.step_begins(batch)
        step(model, batch)
        trial.step_ends(batch)

    with ExitStack() as stack:
        if targets is not None:
            targets.session.close()
            stack.callback(targets.attach)
        refuse(root)
        state = TrainingState(root, [optimizer] if optimizer is not None else [], stateful)
        stack.callback(state.restore)
        runner = SizeRunner(
            root,
            asked,
            state,
            train,
            lambda session: Targets(root, session, target),
            None if validate is None else lambda size: validate(model, make_batch(size)),
        )
        return SizeFinder(runner, options).find()


class SizeFinder:
    """Searches for a size by running steps.

    Raises:
        BudgetError: If the budget is a share.
    """

    def __init__(self, runner: SizeRunner, options: SizeOptions) -> None:
        budget = runner.options.budget
        if budget.is_share:
            raise BudgetError(
                f"The budget {budget} is a share of what a step adds, which grows with the batch: no batch is "
                'the largest. Name bytes, such as "10 GiB", or "auto".'
            )
        self._runner, self._options = runner, options
        self._reporter = Reporter(runner.options.verbose)
        self._trials: dict[int, SizeTrial] = {}
        self._max_overhead = options.max_overhead
        self._failed: set[int] = set()
        self._spare_bytes = self._budget_bytes = 0  # excess of measured peaks, left free; the budget

    def find(self) -> BatchSizeResult:
        """Search for the size; the caller restores the state that steps change.

        Raises:
            ConfigurationError: If the step can't be scaled, or takes too much overhead at size 1.
            InfeasibleBudgetError: If not even size 1 fits.
        """
        start = time.perf_counter()
        if not MemoryMeter.is_available(self._runner.device):
            raise ConfigurationError("Another profiler is running, so memory can't be measured: stop it first.")
        with self._reporter.stage("searching for the size"), warnings.catch_warnings():
            warnings.simplefilter("ignore", HiRemateWarning)
            asked = self._runner.options.budget.size_bytes
            self._budget_bytes = self._agree(self._runner.free_bytes() if asked is None else asked)
            answer = self._find()
        seconds = time.perf_counter() - start
        result = answer.result(self._options, self._budget_bytes, self._trials, self._runner.steps, seconds)
        self._reporter.show(result_table(result))
        return result

    def _find(self) -> FoundSize:
        self._sample_two()
        high = self._options.max_val
        answer = self._predict(high)
        while not self._holds(answer.size):
            self._failed.add(answer.size)
            high = answer.size - 1
            if high < 1 or MAX_STEPS - self._runner.steps < 2:
                return self._fall_back(answer)
            answer = self._predict(high)
        return answer

    # ---------------------------------------------------------------- samples

    def _sample_two(self) -> None:
        """Run a step at two sizes, if the budget has room for the second one."""
        first = self._sample_first()
        second = self._second_size(first)
        if second == first:
            return
        self._sample(second)
        middle, unlike = (first + second) // 2, self._difference(first, second)
        if unlike is not None and middle > first:
            log.info("Sizes %d and %d are not captured as the same graph: %d is tried", first, second, middle)
            self._sample(middle)
            first, unlike = middle, self._difference(middle, second)
        if unlike is not None:
            raise ConfigurationError(
                f"The step can't be scaled: at sizes {first} and {second} it is not the same graph: {unlike}. "
                "The size must not decide what the model computes; start at a larger init_val, where it does so only "
                "for small sizes."
            )
        if _captured_shapes(self._graph(first)) == _captured_shapes(self._graph(second)):
            raise ConfigurationError(
                f"The step can't be scaled: at sizes {first} and {second} its tensors are the same. The batch must be "
                "made of the size that is asked for."
            )
        forecast = self._forecast()
        feasible = self._agree(0 if forecast is None else forecast.largest_feasible(self._options.max_val))
        if feasible > FAR * second:  # kernels change with the size
            self._sample(feasible // 2)

    def _sample_first(self) -> int:
        """Run a step at the first size; while it does not fit, at a quarter of it. Return the size that ran."""
        size = self._options.init_val
        refused: InfeasibleBudgetError | None = None
        while True:
            try:
                self._sample(size)
            except InfeasibleBudgetError as error:
                log.info("Size %d does not fit: %s", size, error)
                error.args = (f"Not even size {size} fits. {error.args[0]}",)
                if size == 1:
                    raise
                refused = error.with_traceback(None)  # a traceback holds the tensors of the step
                size = max(1, size // 4)
            except Exception as error:  # at a size smaller than the user chose: some models can't train on few samples
                if refused is None:
                    raise
                raise refused from error
            else:
                return size

    def _sample(self, size: int) -> None:
        # A rank that stops inside of a step leaves the others waiting in it. Size 1 runs to find out what it needs.
        on_infeasible = "warn" if runtime.world_size() > 1 or size == 1 else "raise"
        with self._runner.trial(size, self._budget_bytes, on_infeasible, max_plans=0):
            pass  # its first step is the sample

    def _second_size(self, first: int) -> int:
        """Return the largest size that is sure to fit, even if memory grows with its square."""
        sample = self._runner.seen[first]
        least = least_memory(sample.step).peak_bytes
        ratio = (self._limit_bytes - self._runner.fixed_bytes) / max(1, least + sample.batch_bytes)
        second = int(first * math.sqrt(max(ratio, 1.0)))
        if second == first and (first + 1) / first <= ratio:
            second += 1
        return self._agree(min(second, self._options.max_val))

    def _difference(self, first: int, second: int) -> str | None:
        """Describe where the steps at two sizes differ as graphs, on this or another rank; None if they don't."""
        words = self._graph(first).difference(self._graph(second))
        return None if self._agree(words is None) else words or "on another rank"

    def _graph(self, size: int) -> Graph:
        return self._runner.seen[size].step.graph

    # ---------------------------------------------------------------- prediction

    @property
    def _limit_bytes(self) -> int:
        room_bytes = max(0, self._budget_bytes - self._runner.fixed_bytes)
        return self._budget_bytes - int(self._options.margin * room_bytes) - self._spare_bytes

    def _forecast(self) -> Forecast | None:
        """Fit the step to the samples with the same graph as the latest one; None if there is only one sample."""
        measured = self._runner.seen
        latest = list(measured.values())[-1].step.graph
        seen = {size: real for size, real in sorted(measured.items()) if real.step.graph.difference(latest) is None}
        if self._agree(len(seen)) < 2:
            return None
        validation = [real.validation_bytes for real in seen.values()]
        return Forecast(
            {size: real.step for size, real in seen.items()},
            allocated_bytes(1, self._runner.device),
            Line(list(seen), [self._runner.fixed_bytes + real.batch_bytes for real in seen.values()]),
            self._limit_bytes,
            replace(self._runner.options, on_infeasible="warn"),
            self._runner.optimizer_ms,
            None if self._runner.validate is None else Line(list(seen), validation),
        )

    def _predict(self, high: int) -> FoundSize:
        """Search for the best size up to `high`; ranks agree on the smallest."""
        forecast = self._forecast()
        if forecast is None:
            seen = max(self._runner.seen)
            return FoundSize(seen if seen <= high else max(1, int(STEP_BACK * high)), Limit.GRAPH, 0)
        answer = search(forecast, high, self._max_overhead, self._options.objective, self._options.max_trials)
        size = self._agree(answer.size)
        if size < 1:
            raise self._nothing_fits(forecast.trial(1), forecast.validation_bytes(1))
        forecast.trial(size)
        self._trials.update(forecast.trials)
        return replace(answer, size=size, unplanned_size=self._agree(answer.unplanned_size))

    def _nothing_fits(self, trial: SizeTrial, validation_bytes: int) -> ConfigurationError | InfeasibleBudgetError:
        """Return the error that says why not even size 1 is accepted."""
        budget_bytes, limit_bytes, overhead = self._budget_bytes, self._limit_bytes, trial.overhead
        if overhead is not None and overhead > self._max_overhead and validation_bytes <= limit_bytes:
            return ConfigurationError(
                f"Even size 1 takes an overhead of {format_ratio(overhead)} to stay within "
                f"{format_bytes(limit_bytes)}, more than max_overhead, {format_ratio(self._max_overhead)}. "
                "Raise the budget or max_overhead."
            )
        needed_bytes = max(trial.predicted_peak_bytes, trial.measured_peak_bytes or 0, validation_bytes)
        return InfeasibleBudgetError(
            f"Not even size 1 fits the budget of {format_bytes(budget_bytes)}, of which predictions leave "
            f"{format_bytes(budget_bytes - limit_bytes)} free: it needs {format_bytes(needed_bytes)} "
            f"({needed_bytes:,} bytes). Raise the budget.",
            budget_bytes=budget_bytes,
            smallest_bytes=needed_bytes,
            device=self._runner.device.type,
        )

    # ---------------------------------------------------------------- proof

    def _holds(self, size: int) -> bool:
        """Run a size, plan it, and run it by its plan; return whether it fits. Correct later predictions by it."""
        with self._runner.trial(size, self._budget_bytes, "warn", max_plans=1) as trial:
            planned = self._trials[size] = trial_of(size, trial.plan(), self._runner.optimizer_ms)
            if not self._agree(planned.fits and self._runner.seen[size].validation_bytes <= self._budget_bytes):
                return False
            if not self._agree((planned.overhead or 0.0) <= self._options.max_overhead):
                self._max_overhead *= CAUTION
                return False
            self._runner.run(size, trial)
        ran = [plan for plan in trial.plans if plan.measured.peak_bytes is not None]
        if not ran:
            log.info("The second step of size %d was of another signature than the first: its peak is not known", size)
            return bool(self._agree(0))
        proven = self._trials[size] = trial_of(size, ran[-1], self._runner.optimizer_ms)
        excess_bytes = (proven.measured_peak_bytes or 0) - self._budget_bytes
        self._spare_bytes += max(0, excess_bytes)
        return bool(self._agree(excess_bytes <= 0))

    def _fall_back(self, failed: FoundSize) -> FoundSize:
        """Return the largest size that ran at the least memory and is predicted to fit by a plan."""
        forecast = self._forecast()
        if forecast is None and 1 in self._failed:
            raise self._nothing_fits(self._trials[1], self._runner.seen[1].validation_bytes)
        sizes = sorted(set(self._runner.seen) - self._failed, reverse=True)
        fits = (s for s in sizes if forecast is not None and forecast.accepts(s, self._options.max_overhead))
        size = self._agree(next(fits, 0))
        if size < 1 or forecast is None:
            raise ConfigurationError(
                f"No size was found in {self._runner.steps} real steps: the predictions for sizes "
                f"{', '.join(map(str, sorted(self._failed)))} were too far off. Start at a larger init_val."
            )
        self._trials[size] = forecast.trial(size)
        return replace(failed, size=size, limit=Limit.STEPS)

    def _agree(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        if runtime.world_size() == 1:
            return int(value)
        on = self._runner.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        shared = torch.tensor(int(value), dtype=torch.int64, device=on)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN)
        return int(shared.item())


def _captured_shapes(graph: Graph) -> list[tuple[int, ...]]:
    """List the shapes of all tensors except those that stand for memory of outside code, which varies by itself."""
    outside = {index for index, node in enumerate(graph.nodes) if node.op == OUTSIDE}
    return [tensor.shape for tensor in graph.tensors if tensor.producer not in outside]
