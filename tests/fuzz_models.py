"""Random small networks: recipes that are drawn, networks built from them, and their training, plain and planned.

A recipe is plain data, and every list of numbers makes a recipe: sources count modulo the values that exist, settings
modulo what an operation offers. So whoever draws it (hypothesis, a seeded generator) may delete from it and change it,
and a failure shrinks to a few operations. A recipe that plain PyTorch refuses to train (an in-place change of what the
backward needs) is rejected, not skipped over.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import Plan, get_plan, hiremate, remove_hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sessions.messages import CLEARLY_MORE
from hiremate_lightning.sessions.session import Session
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.units import parse_budget
from tests.exact import recorded
from tests.fuzz_operations import OPERATIONS, WORDS
from tests.training import resident_bytes

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95)
ROWS = (24, 64, 96)
SHAPES = ((4, 8), (8, 8), (4, 16), (6, 12))  # tokens, width
STRUCTURES = ("tensor", "tuple", "nested", "views", "inputs", "twice", "several")
OPTIMIZERS = ("sgd", "adamw")
STEPS = 6
HALF = "half precision inside"  # the operation that computes in half precision
ROUNDING, HALF_ROUNDING = 1e-5, 2e-2  # of sums in single and half precision in another order
TINY = 1e-6  # gradients below are sums that cancel
LOOSENED = 2  # the step at which a budget that can't be met becomes one that can
MEASURED = (4, 5)  # the first steps capture, plan and measure


class RejectedError(Exception):
    """Plain PyTorch can't train this network."""


class MiscompiledError(Exception):
    """torch.compile can't train the network that plain PyTorch trains: its backend "aot_eager" fails the same way."""


@dataclass(frozen=True)
class Recipe:
    """A network, its training and its budget."""

    operations: tuple[tuple[str, int, int, int], ...]  # for each operation its name, two sources, and a setting
    structure: str = "tensor"  # what the network returns
    shape: int = 0  # position in SHAPES
    rows: int = 0  # position in ROWS
    share: int = 2  # position in SHARES
    frozen: int = 0  # number that says which parameters are frozen, 0 for none
    optimizer: int = 0  # position in OPTIMIZERS
    needs_input_gradient: bool = False  # whether the batch requires a gradient
    seed: int = 0  # of weights, batches and random operations
    accumulates: bool = False  # whether the gradients of two steps are added up before the optimizer's


def draw(choose: Callable[[Iterable[Any]], Any], longest: int = 9, names: Iterable[str] = OPERATIONS) -> Recipe:
    """Draw a recipe by what picks one of some values."""
    count = choose(range(2, longest + 1))
    numbers = range(8)
    names = sorted(names)
    return Recipe(
        operations=tuple((choose(names), choose(numbers), choose(numbers), choose(numbers)) for _ in range(count)),
        structure=choose(STRUCTURES),
        shape=choose(range(len(SHAPES))),
        rows=choose(range(len(ROWS))),
        share=choose(range(len(SHARES))),
        frozen=choose((0, 0, 0, 1, 2)),
        optimizer=choose(range(len(OPTIMIZERS))),
        needs_input_gradient=choose((False, False, False, True)),
        seed=choose(range(1000)),
        accumulates=choose((False, False, True)),
    )


class FuzzNet(nn.Module):
    """The network of a recipe: a list of values grows, each operation reads two of them and appends its results."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.structure = recipe.structure
        tokens, width = SHAPES[recipe.shape]
        self.first = nn.Linear(width, width)
        self.operations = nn.ModuleList()
        self.sources: list[tuple[int, int]] = []
        values = [torch.zeros(2, tokens, width), torch.ones(2, tokens, width)]
        words = torch.zeros(2, tokens, dtype=torch.long)
        for name, left, right, setting in recipe.operations:
            left, right = len(values) - 1 - left % len(values), len(values) - 1 - right % len(values)
            operation = OPERATIONS[name](values[left], values[right], setting, list(self.operations))
            if operation is None:
                continue
            with torch.no_grad():
                results = operation(values[left].clone(), values[right].clone(), words)
            values.extend(torch.ones(r.shape) for r in results)
            self.operations.append(operation)
            self.sources.append((left, right))
        self.last = nn.Linear(values[-1].shape[-1], 4)
        for number, parameter in enumerate(self.parameters()):
            if recipe.frozen and number % 3 == recipe.frozen:
                parameter.requires_grad_(False)
        self.run = _straight_line(self.sources)

    def forward(self, x: Tensor, *, words: Tensor, options: dict[str, Any]) -> Any:
        values = self.run(self, x, self.first(x) * options["scale"], words)
        return self.arrange(self.last(values[-1]), x, values)

    def arrange(self, y: Tensor, x: Tensor, values: list[Tensor]) -> Any:
        if self.structure == "tensor":
            return y
        if self.structure == "tuple":
            return y, values[len(values) // 2]
        if self.structure == "nested":
            return {"y": y, "more": [{"middle": values[len(values) // 2], "shape": tuple(y.shape)}, None, "words"]}
        if self.structure == "views":
            return y.transpose(1, 2), y[:, 0], values[-1][..., :1]
        if self.structure == "inputs":
            return {"x": x, "first": x[0], "y": y, "weight": self.first.weight}
        if self.structure == "twice":
            return y, y, y.detach()
        return (*values[2:], y)


def _straight_line(sources: list[tuple[int, int]]) -> Callable[..., list[Tensor]]:
    """Write a function that applies the operations, without a loop: Dynamo gives up on loops that break its graphs."""
    lines = ["def run(self, x, y, words):", "    values = [x, y]"]
    for number, (left, right) in enumerate(sources):
        lines.append(f"    values.extend(self.operations[{number}](values[{left}], values[{right}], words))")
    scope: dict[str, Any] = {}
    exec("\n".join([*lines, "    return values"]), scope)
    made: Callable[..., list[Tensor]] = scope["run"]
    return made


def build(recipe: Recipe) -> FuzzNet:
    torch.manual_seed(recipe.seed)
    return FuzzNet(recipe)


def make_batch(recipe: Recipe, index: int) -> tuple[Tensor, Tensor]:
    rows, (tokens, width) = ROWS[recipe.rows], SHAPES[recipe.shape]
    generator = torch.Generator().manual_seed(recipe.seed + index)
    x = torch.randn(rows, tokens, width, generator=generator)
    return x.requires_grad_(recipe.needs_input_gradient), torch.randint(WORDS, (rows, tokens), generator=generator)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [t for inner in value for t in tensors_in(inner)]
    return []


def others_in(value: Any) -> Any:
    """Give a nested value with its tensors left out."""
    if isinstance(value, dict):
        return {key: others_in(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [others_in(inner) for inner in value]
    return None if isinstance(value, Tensor) else value


def loss_of(output: Any) -> Tensor:
    """Reduce every output that can be trained, by a loss whose gradient has the output's strides."""
    trained = [t for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    parts = [F.mse_loss(t, torch.zeros_like(t)) for t in trained]
    return sum(parts[1:], start=parts[0])


@dataclass
class Record:
    """What a training run did, by name and step: everything here must be equal bit for bit."""

    # Losses, outputs, gradients, buffers, random states, batches and parameters
    values: dict[str, Any] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)  # measured peak of the last steps, resident bytes included

    def note(self, name: str, value: Any) -> None:
        self.values[name] = value.detach().clone() if isinstance(value, Tensor) else value


def train(
    model: FuzzNet,
    recipe: Recipe,
    steps: int = STEPS,
    measured: tuple[int, ...] = (),
    before: Callable[[int], None] = lambda index: None,
) -> Record:
    """Take some steps, a new batch each, and write all down."""
    record = Record()
    parameters = list(model.parameters())
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[OPTIMIZERS[recipe.optimizer]]
    optimizer = kind(parameters, lr=1e-3)
    torch.manual_seed(recipe.seed + 1)
    for index in range(steps):
        before(index)
        if not recipe.accumulates or index % 2 == 0:
            optimizer.zero_grad()
        x, words = make_batch(recipe, index)
        outputs: list[Any] = []

        def step(x: Tensor = x, words: Tensor = words, outputs: list[Any] = outputs) -> None:
            output = model(x, words=words, options={"scale": 0.5, "name": "step"})
            loss = loss_of(output)
            loss.backward()
            outputs.extend([[t.detach() for t in tensors_in(output)], others_in(output), loss.detach()])

        if index in measured:
            gc.collect()  # garbage that dies meanwhile would pass for memory that the step gave back
            resident = resident_bytes(model, optimizer, (x, words))
            buffers = {buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}
            peak = resident + measure_peak(step)
            # A buffer that the model replaces was there before the measurement, which so does not see it die.
            replaced = buffers.keys() - {buffer.data_ptr() for buffer in model.buffers()}
            record.peaks.append(peak - sum(buffers[pointer] for pointer in replaced))
        else:
            step()
        if not recipe.accumulates or index % 2 == 1:
            optimizer.step()
        # Notes are taken now: before an optimizer's step all that is allocated counts as the training step's.
        for number, output in enumerate(outputs[0]):
            record.note(f"output {number} of step {index}", output)
        record.note(f"other outputs of step {index}", outputs[1])
        record.note(f"loss of step {index}", outputs[2])
        for name, parameter in model.named_parameters():
            record.note(f"gradient of {name} in step {index}", parameter.grad)
        record.note(f"gradient of the batch in step {index}", x.grad)
        record.note(f"batch after step {index}", x)
        record.note(f"random state after step {index}", torch.get_rng_state())
        for name, value in model.state_dict().items():
            record.note(f"{name} after step {index}", value)
    return record


@dataclass
class Outcome:
    """A recipe's plain and planned training, compared."""

    recipe: Recipe
    plan: Plan | None  # the plan of its last step, None where it was never planned
    peaks: list[int]  # measured peak of the last steps, resident bytes included
    # What differs from plain training, or where `deviation` is not 0, from the same captured graphs without
    # recomputation; empty where all is equal bit for bit
    differences: list[str]
    # How far the captured graphs are from plain training: the largest difference of a gradient in the first step, as a
    # share of the largest number in any of them. 0 for equal bit for bit
    deviation: float
    graphs: int
    corrected_bytes: int  # by how much an earlier plan was measured over the budget and replaced, 0 for not at all
    warnings: list[str]  # of the package

    @property
    def is_wrong(self) -> bool:
        """Whether recomputation changed a number, or the captured graphs give others than rounding explains."""
        names = {name for name, *_ in self.recipe.operations}
        return bool(self.differences) or self.deviation > (HALF_ROUNDING if HALF in names else ROUNDING)

    @property
    def is_over_budget(self) -> bool:
        """Whether a step took more than its budget, and no warning names that no plan takes less."""
        if self.plan is None or self.excess_bytes <= 0:
            return False
        texts = ["no plan leaves that margin", "with a margin"]
        return not any(words in text for text in self.warnings for words in texts) and not self.warns_that_nothing_fits

    @property
    def warns_that_nothing_fits(self) -> bool:
        """Whether a warning says that nothing fits the budget, or a budget as near as the peak may have grown since."""
        assert self.plan is not None
        if self.plan.planned_peak_bytes <= self.plan.budget_bytes:
            return False
        found = re.findall(r"Nothing fits the budget of ([\d.]+ \w+):", "\n".join(self.warnings))
        nearest_bytes = max((parse_budget(text).size_bytes or 0 for text in found), default=0)
        return self.plan.budget_bytes - nearest_bytes <= (CLEARLY_MORE - 1) * self.plan.planned_peak_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much the worst measured step is above the budget; negative for below."""
        assert self.plan is not None
        return max(self.peaks) - self.plan.budget_bytes


def compare(
    recipe: Recipe, time_limit_s: float = 5.0, tamper: Callable[[Record], None] = lambda record: None
) -> Outcome:
    """Train a recipe's network twice, plainly and under its budget.

    A value that several captured graphs read, or that is returned as a view of another one, gets its gradient added up
    in another order than in plain training. So where these differ, the same graphs without recomputation decide.

    Args:
        recipe: The network.
        time_limit_s: Of a solve.
        tamper: Called with the record of each planned run.

    Raises:
        RejectedError: If plain PyTorch can't train it.
        MiscompiledError: If torch.compile can't, whoever compiles.
    """
    plain = _train_plainly(recipe)
    share = SHARES[recipe.share]
    with recorded() as warned:
        try:
            planned, plan, session = _train_planned(recipe, share, time_limit_s)
            tamper(planned)
        except RuntimeError as error:
            _blame_torch_if_due(recipe, error)
            raise
    differences, deviation = _differences(planned, plain), 0.0
    if differences:
        captured, _, _ = _train_planned(recipe, "1 TiB", time_limit_s)
        tamper(captured)
        differences, deviation = _differences(planned, captured), _deviation(captured, plain)
    corrected = max((kind.recorded.margin_bytes for kind in session.model.history.recorded), default=0)
    return Outcome(recipe, plan, planned.peaks, differences, deviation, session.captured_count, corrected, warned)


def _train_planned(recipe: Recipe, budget: float | str, time_limit_s: float) -> tuple[Record, Plan | None, Session]:
    model = build(recipe)
    keys = list(model.state_dict())
    hiremate(model, budget, on_infeasible="warn", time_limit_s=time_limit_s, verbose=False)

    def loosen(index: int) -> None:
        if isinstance(budget, float):
            _loosen(model, budget, index)

    try:
        record = train(model, recipe, measured=MEASURED, before=loosen)
        targets, plan = targets_of(model), get_plan(model)
        assert targets is not None
    finally:
        remove_hiremate(model)
    assert list(model.state_dict()) == keys
    return record, plan, targets.session


def _loosen(model: FuzzNet, share: float, index: int) -> None:
    """Where the budget can't be met, ask for that share of what lies between the least memory and no plan."""
    plan = get_plan(model)
    if index == LOOSENED and plan is not None and plan.planned_peak_bytes > plan.budget_bytes:
        least, most = plan.planned_peak_bytes, max(plan.unplanned_peak_bytes, plan.planned_peak_bytes)
        hiremate(model, f"{least + int(share * (most - least))} B")


def _train_plainly(recipe: Recipe) -> Record:
    try:
        return train(build(recipe), recipe)
    except RuntimeError as error:
        raise RejectedError(str(error)) from error


def _blame_torch_if_due(recipe: Recipe, error: RuntimeError) -> None:
    """Raise another error where the same one comes of torch's own backend that only traces."""
    model = build(recipe)
    model.compile(backend="aot_eager")
    try:
        train(model, recipe)
    except RuntimeError as theirs:
        if str(theirs)[:60] == str(error)[:60]:
            raise MiscompiledError(str(error)) from error


def _differences(found: Record, expected: Record) -> list[str]:
    """List what is not the same, bit for bit: a NaN equals the same NaN."""
    assert found.values.keys() == expected.values.keys()
    return [name for name, value in expected.values.items() if not _is_same(found.values[name], value)]


def _deviation(found: Record, expected: Record) -> float:
    """Give the largest difference of a gradient in the first step, as a share of the largest number in any of them.

    A gradient may be nothing but rounding errors, that of a bias before a batch norm, say: its own numbers are no
    measure.
    """
    worst, largest = 0.0, TINY
    for name, value in expected.values.items():
        if name.startswith("gradient") and name.endswith("step 0") and isinstance(value, Tensor) and value.numel():
            worst = max(worst, (found.values[name].double() - value.double()).abs().max().item())
            largest = max(largest, value.double().abs().max().item())
    return worst / largest


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return type(found) is type(expected) and bool(found == expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (found, expected)))
