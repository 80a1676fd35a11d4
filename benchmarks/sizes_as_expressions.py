"""Try programs whose numbers are expressions of the sizes: traced at a few sizes, run at others.

    python benchmarks/sizes_as_expressions.py --models gpt2_2,bert_2,llama_2,lora_2,t5_2 [--vary batch] [--width 64]
    python benchmarks/sizes_as_expressions.py --models gpt2_12 --times

A model of transformers (kind, number of layers) is captured as the library does, each of its graphs at four sizes.
For three choices of what to compute again (nothing, half of what can be saved, the least memory) programs for all
sizes are made (`running/program_at_sizes.py`). Then steps run at sizes that were never traced, by the wrapper that
AOTAutograd made for the first traced size and by these programs. Losses and all gradients are compared with eager
PyTorch's bit for bit, with the model's own loss and with one more on its logits. Peaks come from expressions of bytes.

Prints a Markdown table. "First step": what the first step of a size takes beyond the second. --times prints what a step
takes over eager PyTorch's time instead, by choice, beside a checkpoint per block.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import page_tables
import torch
from provenance import provenance
from sympy.core.function import Application
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.nn import functional as F
from zoo.texts import build_model, make_batch

from hiremate_lightning.capturing import backend as backends
from hiremate_lightning.capturing.absent import without_missing
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.housekeeping import collecting_what_it_leaves
from hiremate_lightning.measuring.profiling import CostCache, measure
from hiremate_lightning.memory.allocator import in_blocks
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.solvers.base import UNLIMITED, Problem, SolveOptions, get_strategy
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.expressions import Sizes, find_expression
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.simulation import allocations, simulate
from hiremate_lightning.records.step import HELD_TO_THE_END, Call, MergedStep, merge
from hiremate_lightning.running.execution import GraphRuntime
from hiremate_lightning.running.program import Program, build
from hiremate_lightning.running.program_at_sizes import ProgramAtSizes, SizesDifferError
from hiremate_lightning.torch_private import captured_code, dynamo, tensor_state
from hiremate_lightning.torch_private.size_symbols import SizeSymbols, sizes_among, trace_apart

ROUNDS = 7
CHOICES = ("keep", "middle", "least")
COLUMNS = (
    "varies",
    "a trace, CPU s",
    "templates, CPU s",
    "nodes",
    "equal",
    "programs, ms",
    "peaks, ms",
    "first step, ms",
)
PEAKS = ("peak over predicted: traced sizes", "new sizes", "bytes without an expression")
TIMES = ("eager, CPU s", "middle, of all bytes", "least", "keep, over eager", "middle", "least", "checkpoint per block")
SIZES = {  # traced, and then those never traced: batch, length, and the length of T5's labels
    "length": (
        [(4, 24, 12), (4, 40, 20), (4, 46, 33), (4, 59, 26), (4, 50, 14)],
        [(4, 17, 9), (4, 64, 32), (4, 33, 50), (4, 100, 64), (4, 101, 13)],
    ),
    "batch": (
        [(4, 24, 12), (6, 40, 20), (9, 46, 33), (5, 35, 26), (7, 52, 14)],
        [(3, 17, 9), (2, 64, 32), (8, 33, 50), (5, 100, 64), (7, 101, 13)],
    ),
}


class _Compilation(backends._Compilation):
    """A compilation whose results that are views are made again with the sizes that come, not with those traced."""

    def _forward(self, *given: Any) -> Any:
        results = TracingContext.get().fw_metadata.output_info
        results[:] = [replace(result, view_meta_sequence=None) for result in results]
        return super()._forward(*given)


class _Steps:
    """The conductor: programs by runtime, and what the calls of the step under way handed to each other."""

    def __init__(self) -> None:
        self.programs: dict[GraphRuntime, Program] = {}
        self.missing: dict[GraphRuntime, frozenset[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        # Each call's runtime, the storages of its inputs, and those of its outputs.
        self.calls: list[tuple[GraphRuntime, list[int], list[tuple[int, Any]]]] = []
        self.order: list[int] = []  # of the backwards
        self.alive: list[set[int]] = []  # outputs of each call that someone holds when the first backward begins

    def start(self, runtime: GraphRuntime, arguments: Sequence[Any]) -> tuple[Program, int]:
        if runtime not in self.programs:
            graph = runtime.captured.graph
            self.programs[runtime] = build(runtime.captured, lower(graph, keep_all(graph)))
        self.calls.append((runtime, [_storage(value) for value in arguments], []))
        return self.programs[runtime], len(self.calls) - 1

    def forward_done(self, run: int, outputs: Sequence[Any]) -> None:
        self.calls[run][2].extend((_storage(v), weakref.ref(v) if isinstance(v, Tensor) else int) for v in outputs)

    def backward_starts(self, run: int, tangents: Sequence[Any], leaves: Any, retains: bool) -> None:
        if not self.order:
            calls = [enumerate(made) for _, _, made in self.calls]
            self.alive = [{i for i, (_, held) in made if isinstance(held(), Tensor)} for made in calls]
        self.order.append(run)
        self.missing[self.calls[run][0]] = frozenset(i for i, value in enumerate(tangents) if value is None)

    def backward_done(self, *_: Any) -> None:
        pass

    must_return = ran_out = settings_changed = was_overwritten = backward_done


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _quotients(module: fx.GraphModule) -> list[Any]:
    """List the quotients, rests and extremes among the sizes in captured code, which no samples could tell."""
    shown = tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])
    numbers = [n for v in shown if isinstance(v, Tensor) for n in (*v.shape, *v.stride())] + shown
    atoms = [n.node.expr.atoms(Application) for n in numbers if isinstance(n, torch.SymInt)]
    return sorted(set[Any]().union(*atoms), key=str)


class _Graph:
    """A captured graph of sizes that vary: traced at the first ones, then run by programs at sizes."""

    def __init__(self, module: fx.GraphModule, positions: Sequence[int], trial: Trial) -> None:
        self.module, self.positions, self.trial = module, positions, trial
        count = len(module.graph.find_nodes(op="placeholder"))
        self.others = [position for position in range(count) if position not in positions]
        inputs = module.graph.find_nodes(op="placeholder")
        self.symbols = [inputs[position].meta["example_value"].node.expr for position in positions]
        self.quotients = _quotients(module)
        self.terms: backends.TermCounts = {}
        self.traced: dict[Sizes, tuple[Any, GraphRuntime | None]] = {}
        self.at_sizes: dict[str, ProgramAtSizes] = {}

    def trace(self, key: Sizes, others: list[Any]) -> None:
        """Trace it at a size as `EachSize` does."""

        def trace(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, int]:
            compilation = _Compilation(lambda captured: GraphRuntime(captured, self.trial.steps), None)
            run = compilation.compile(module, inputs, self.terms)
            self.terms, self.traced[key] = compilation.contributions.terms, (run, compilation.runtime)
            return run, 0

        start = time.process_time()
        module = SizeSymbols(self.module, self.positions).code_at(key)
        with torch.random.fork_rng(), collecting_what_it_leaves():
            trace_apart(module, others, trace, [None] * len(others))
        self.trial.trace_s[len(self.traced)] += time.process_time() - start

    def __call__(self, *arguments: Any) -> Any:
        start = time.process_time()
        key, others = tuple(arguments[p] for p in self.positions), [arguments[p] for p in self.others]
        if not self.trial.is_new:
            if key not in self.traced:
                self.trace(key, others)
            return self.traced[key][0](*others)
        run, runtime = next(iter(self.traced.values()))
        if runtime is None:
            return captured_code.eager_module(self.module)(*arguments)
        self.trial.steps.programs[runtime] = self.at_sizes[self.trial.choice].at(self.reduced(key))
        self.trial.bind_ms[-1] += 1000 * (time.process_time() - start)
        return run(*others)

    def reduced(self, key: Sizes) -> Sizes:
        """Add quotients to sizes; leave out those that never vary, and those that are always the same as another."""
        *traced, new = [self._with_quotients(sizes) for sizes in (*self.traced, key)]
        columns = list(zip(*traced, strict=True))
        if any(new[i] != new[columns.index(c)] or (len(set(c)) == 1 and new[i] != c[0]) for i, c in enumerate(columns)):
            raise SizesDifferError(f"Sizes that were equal, or did not vary, differ: {new}")
        varying = dict.fromkeys(column for column in columns if len(set(column)) > 1)
        return tuple(new[columns.index(column)] for column in varying)

    def _with_quotients(self, key: Sizes) -> Sizes:
        values = dict(zip(self.symbols, key, strict=True))
        return (*key, *(int(quotient.xreplace(values)) for quotient in self.quotients))


class Trial:
    """One model, and all that is measured of it."""

    def __init__(self, name: str, width: int, vary: str) -> None:
        self.model, self.steps = build_model(name, width), _Steps()
        count = 3 if name.startswith("t5") else 2
        self.traced, self.new = ([sizes[:count] for sizes in chosen] for chosen in SIZES[vary])
        self.graphs: list[_Graph] = []
        self.is_new, self.choice, self.captures = False, "keep", 0
        self.trace_s: dict[int, float] = defaultdict(float)
        self.bind_ms: list[float] = []
        self.compiled = torch.compile(self.model, backend=self._backend)

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.captures += 1
        if not backends.has_gradients(inputs):
            return module.forward
        positions = sizes_among(module, inputs)
        if positions:
            self.graphs.append(_Graph(module, positions, self))
            return self.graphs[-1]
        compilation = _Compilation(lambda captured: GraphRuntime(captured, self.steps), None)
        run: Callable[..., Any] = compilation.compile(module, inputs, {})
        return run

    def train(self, model: Any, batch: dict[str, Tensor], on_logits: bool = False) -> tuple[Any, Tensor]:
        """Run forward and backward; return what the model returned, and the loss."""
        self.model.zero_grad(set_to_none=True)
        self.steps.begin()
        self.bind_ms.append(0.0)
        with dynamo.capturing_for_plans(None, sizes_vary=True):
            out = model(**batch)
            more = F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten()) if on_logits else 0.0
            loss: Tensor = out["loss"] + more
            loss.backward()
        return out, loss

    def step(self, model: Any, batch: dict[str, Tensor], seed: int, on_logits: bool = False) -> list[Tensor]:
        """Train one step; return the loss and the gradients."""
        torch.manual_seed(seed)
        _, loss = self.train(model, batch, on_logits)
        return [loss.detach(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def trace(self) -> bool:
        """Trace all sizes that are to be traced; return whether all steps were eager's."""
        equal = []
        for seed, sizes in enumerate(self.traced):
            batch = make_batch(*sizes)
            want = self.step(self.model, batch, seed)
            equal.append(_equal(want, self.step(self.compiled, batch, seed)))
        return all(equal)

    def settle(self) -> None:
        """Choose what to compute again, at the largest traced size; make the programs at sizes."""
        by_part = {runtime: graph for graph in self.graphs for _, runtime in graph.traced.values()}
        self.planned = [by_part[runtime] for runtime, *_ in self.steps.calls]
        self.samples = self._merged()
        problem = Problem(self.samples[-1].graph, self.samples[-1].profile, UNLIMITED, SolveOptions(time_limit_s=2))
        least = solve_least_memory(problem)
        kept = simulate(problem.graph, problem.profile, lower(problem.graph, keep_all(problem.graph))).peak_bytes
        middle = get_strategy("portfolio")(replace(problem, budget_bytes=(least.peak_bytes + kept) // 2))
        self.chosen = dict(zip(CHOICES, (keep_all(problem.graph), middle.recompute, least.recompute), strict=True))
        self.making_s = list[float]()
        for choice, decisions in self.chosen.items():
            start = time.process_time()
            for graph, rows in zip(self.planned, self.samples[-1].split(decisions), strict=True):
                captured = [runtime.captured for _, runtime in graph.traced.values() if runtime is not None]
                graph.at_sizes[choice] = ProgramAtSizes(captured, [graph.reduced(key) for key in graph.traced], rows)
            self.making_s.append(time.process_time() - start)
        self.is_new = True

    def _merged(self) -> list[MergedStep]:
        """Merge the last traced step's calls at each traced size."""
        cache, steps = CostCache(), []
        for traced in zip(*(graph.traced.values() for graph in self.planned), strict=True):
            calls = []
            for number, ((_, runtime), (last, taken, _)) in enumerate(zip(traced, self.steps.calls, strict=True)):
                captured = runtime.captured
                profile = measure(captured, cache)
                graph, costs = without_missing(captured, self.steps.missing[last], profile)
                calls.append(self._call(number, captured, in_blocks(graph, captured.device), costs, taken))
            steps.append(merge(calls, self.steps.order))
        return steps

    def _call(self, number: int, captured: Captured, graph: Any, profile: Any, taken: list[int]) -> Call:
        links: dict[int, tuple[int, int]] = {}
        for position, storage in enumerate(taken):
            for earlier, (runtime, _, made) in enumerate(self.steps.calls[:number]):
                numbers = {value: t for t, value in enumerate(runtime.captured.fx_values)}
                for output, (other, _) in enumerate(made):
                    if storage and other == storage and runtime.captured.forward_outputs[output] in numbers:
                        links[graph.inputs[position]] = earlier, numbers[runtime.captured.forward_outputs[output]]
        number_of = {value: t for t, value in enumerate(captured.fx_values)}
        outputs = [number_of.get(value) for value in captured.forward_outputs]
        alive = tuple(o for i, o in enumerate(outputs) if o is not None and i in self.steps.alive[number])
        died = tuple(t for t in graph.outputs if t not in alive)
        gradients = [g for p, g in enumerate(captured.backward_outputs) if g is not None and graph.inputs[p] in links]
        held_until = dict.fromkeys(alive, HELD_TO_THE_END)
        return Call(graph, profile, links, died, held_until, passed_on=tuple(number_of[g] for g in gradients))


def _equal(want: list[Tensor], got: list[Tensor]) -> bool:
    return len(want) == len(got) and all(map(torch.equal, want, got))


class Peaks:
    """Peaks of the chosen schedules at all sizes, from expressions of bytes; a line through two where none fits.

    Attributes:
        guessed: How many numbers have no expression.
    """

    def __init__(self, trial: Trial, sizes: Sequence[Sizes]) -> None:
        names = [f"s{dimension}" for dimension in range(len(sizes[0]))]
        steps, texts, (before, last) = trial.samples, list[str](), [math.prod(sample) for sample in sizes[-2:]]
        samples = [[*(s.size_bytes for s in step.graph.storages), *step.profile.workspace_bytes] for step in steps]
        expressions = [find_expression(sizes, values) for values in zip(*samples, strict=True)]
        for expression, low, high in zip(expressions, *samples[-2:], strict=True):
            line = f"max(0, {high}+{high - low}*({'*'.join(names)}-{last})//{last - before})"
            texts.append(line if expression is None else expression.source(names))
        self.guessed, distinct = expressions.count(None), sorted(set(texts))
        self._places = np.array([distinct.index(text) for text in texts])
        self._numbers = eval(f"lambda {','.join(names)}: ({', '.join(distinct)},)")
        self._graph = graph = steps[-1].graph
        self._schedules = [allocations(graph, lower(graph, rows)) for rows in trial.chosen.values()]

    def at(self, sizes: Sizes) -> list[int]:
        """Return the peak of each schedule."""
        numbers = np.array(self._numbers(*sizes), dtype=np.int64)[self._places]
        storages, workspaces = np.split(numbers, [len(self._graph.storages)])
        return [schedule.peak_bytes(storages, workspaces) for schedule in self._schedules]


def run_new(trial: Trial) -> tuple[str, list[float]]:
    """Run steps at new sizes; return how many were equal to eager's, and what the first of each took beyond another."""
    equal, extra_ms, captures = list[bool](), list[float](), trial.captures
    for seed, sizes in enumerate(trial.new):
        batch = make_batch(*sizes)
        want = trial.step(trial.model, batch, seed), trial.step(trial.model, batch, seed, True)
        for trial.choice in CHOICES:
            seconds = []
            for on_logits in (False, False, True):
                start = time.process_time()
                equal.append(_equal(want[on_logits], trial.step(trial.compiled, batch, seed, on_logits)))
                seconds.append(time.process_time() - start)
            extra_ms.append(1000 * (seconds[0] - seconds[1]))
    more = f", {trial.captures - captures} captures" if trial.captures > captures else ""
    return f"{sum(equal)} of {len(equal)}{more}", extra_ms[:: len(CHOICES)]


def row(name: str, width: int, vary: str) -> str:
    """Make a row of the table."""
    trial = Trial(name, width, vary)
    traced_equal = trial.trace()
    trace_s = statistics.median(trial.trace_s.values())
    try:
        trial.settle()
    except SizesDifferError as error:
        return page_tables.row(name, vary, f"{trace_s:.1f}", "", "", str(error))
    equal, extra_ms = run_new(trial)
    columns = [i for i, column in enumerate(zip(*trial.traced, strict=True)) if len(set(column)) > 1]
    reduced = [tuple(sizes[i] for i in columns) for sizes in (*trial.traced[1:], *trial.new)]
    foreseen = Peaks(trial, reduced[: len(trial.traced) - 1])
    predict_ms, ratios = [], []
    for key, sizes in zip(reduced, (*trial.traced[1:], *trial.new), strict=True):
        start = time.process_time()
        peaks = foreseen.at(key)
        predict_ms.append(1000 * (time.process_time() - start))
        ratios.append([])
        for trial.choice, predicted in zip(CHOICES, peaks, strict=True):
            trial.model.zero_grad(set_to_none=True)
            batch, held = make_batch(*sizes), list[Any]()
            peak = measure_peak(lambda batch=batch, held=held: held.append(trial.train(trial.compiled, batch)))
            ratios[-1].append(peak / predicted)
    count = len(trial.traced) - 1
    cells = (
        f"{trace_s:.1f}",
        f"{statistics.median(trial.making_s):.2f}",
        len(trial.samples[-1].graph.nodes),
        equal if traced_equal else f"{equal}, traced sizes DIFFER",
        f"{statistics.median(trial.bind_ms):.2f}",
        f"{statistics.median(predict_ms):.1f}",
        f"{statistics.median(extra_ms):.0f}",
        *(" ".join(f"{ratio:.3f}" for ratio in np.max(part, 0)) for part in (ratios[:count], ratios[count:])),
        foreseen.guessed,
    )
    return page_tables.row(name, vary, *cells)


def times(name: str, width: int, vary: str) -> str:
    """Time steps at the largest new size in turns, and write their medians over eager's as a row."""
    trial = Trial(name, width, vary)
    trial.trace()
    trial.settle()
    checkpointed = build_model(name, width)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    batch, seconds = make_batch(*trial.new[-1]), defaultdict[str, list[float]](list)
    for seed in range(ROUNDS):
        for way in ("eager", *CHOICES, "checkpoint"):
            trial.choice = way
            model = trial.compiled if way in CHOICES else trial.model if way == "eager" else checkpointed
            checkpointed.zero_grad(set_to_none=True)
            start = time.process_time()
            trial.step(model, batch, seed)
            seconds[way].append(time.process_time() - start)
    middle = {way: statistics.median(s) for way, s in seconds.items()}
    eager_s = middle.pop("eager")
    step = trial.samples[-1]
    schedules = (lower(step.graph, decisions) for decisions in trial.chosen.values())
    bytes_of = [simulate(step.graph, step.profile, schedule).peak_bytes for schedule in schedules]
    shares = (f"{size / bytes_of[0]:.2f}" for size in bytes_of[1:])
    return page_tables.row(name, f"{eager_s:.3f}", *shares, *(f"{s / eager_s:.2f}" for s in middle.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2_2,bert_2,llama_2,lora_2,t5_2")
    parser.add_argument("--vary", choices=sorted(SIZES), default="length")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--scale", type=int, default=1, help="of all lengths")
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout.write(f"{provenance('transformers')}; width {options.width}; 1 thread\n\n")
    columns = TIMES if options.times else COLUMNS + PEAKS
    sys.stdout.write(page_tables.head("model", *columns))
    for vary, chosen in SIZES.items():
        SIZES[vary] = tuple([(batch, *(options.scale * n for n in rest)) for batch, *rest in part] for part in chosen)
    for name in options.models.split(","):
        torch._dynamo.reset()
        write = times if options.times else row
        sys.stdout.write(write(name, options.width, options.vary))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
