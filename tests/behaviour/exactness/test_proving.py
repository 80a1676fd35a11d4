"""Captured code is proved at its first run: what gives other numbers than eager PyTorch runs as it was written."""

from __future__ import annotations

import copy
import html
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from hiremate_lightning import ConfigurationError, HiRemateWarning, get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.proofs.differences import differences
from hiremate_lightning.proofs.trials import Trial, TrialOutcome
from hiremate_lightning.reporting.html_report import write_html
from hiremate_lightning.rewriting import assignments, casts, kernels, losses, nodes, pooling
from hiremate_lightning.rewriting.overwriting import Finish
from hiremate_lightning.running import program
from hiremate_lightning.sessions import session
from hiremate_lightning.torch_private import captured_code, hacks
from tests.exact import TORCH, Log, differing, drawn, network, planned_alike, proved, simple_loop, table_of, take_steps
from tests.faults import change_absences, change_captures

WIDTH = 8
rows = drawn(16, WIDTH)


@network(lambda function, **members: {"layer": nn.Linear(WIDTH, WIDTH), "function": function, **members})
def written(self, x: Tensor) -> Tensor:
    """A layer before a function, with buffers."""
    return self.function(self, self.layer(x))


def train(make: Callable[[], nn.Module], is_planned: bool, **options: Any) -> tuple[Log, str, list[str]]:
    """Train a module; return what is left behind, what was proved, and the warnings."""
    torch.manual_seed(1)
    module = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_planned:
            hiremate(module, options.pop("budget", "1 GiB"), verbose=False, on_infeasible="warn", **options)
        torch.manual_seed(2)
        log = simple_loop(rows, steps=3)(module)
    words = proved(module) if is_planned else ""
    return log, words, [str(w.message) for w in caught if issubclass(w.category, HiRemateWarning)]


def check_refused(make: Callable[[], nn.Module], why: str) -> None:
    """Fail unless the planned module trains exactly, and one warning says why some code runs as it was written."""
    log, _, warned = train(make, True)
    assert not differing(log, train(make, False)[0])
    assert [why in text for text in warned].count(True) == 1, warned


def mixed(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return F.dropout(torch.sin(x), 0.2) * self.count + F.gelu(x)


def make_mixed() -> nn.Module:
    return nn.Sequential(written(mixed, count=torch.zeros(())), nn.LayerNorm(WIDTH))


@network(lambda dtype: {"dtype": dtype})
def cast(self, x: Tensor) -> Tensor:
    return x.to(self.dtype)


@network(lambda: {"layer": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, WIDTH)})
def with_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a loss, and the logits that it is computed from."""
    logits = self.head(self.layer(x).tanh())
    return logits.square().mean(), logits


@network(lambda: {name: nn.Linear(WIDTH, WIDTH) for name in ("layer", "one", "two")})
def two_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two results of one trunk."""
    trunk = self.layer(x).tanh()
    return self.one(trunk), self.two(trunk)


# ---------------------------------------------------------------- what is proved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_code_that_gives_the_numbers_of_eager_pytorch_is_proved(dtype):
    def make() -> nn.Module:
        return nn.Sequential(cast(dtype), make_mixed().to(dtype))

    log, words, warned = train(make, True)
    assert words == "forward 1 of 1 graph, gradients 1 of 1"
    assert not warned
    assert not differing(log, train(make, False)[0])


def test_a_proof_says_how_many_graphs_it_holds_for_in_the_plan():
    def broken(self, x):
        torch._dynamo.graph_break()
        return torch.sin(x)

    module = hiremate(written(broken), "1 GiB", verbose=False)
    plan = take_steps(module, rows, 2, loss_of=torch.sum, clears="never")
    assert plan.proved == "forward 2 of 2 graphs, gradients 2 of 2"
    assert plan.planning.prove_s > 0
    assert "forward 2 of 2 graphs, gradients 2 of 2" in table_of(plan)


def test_differences_by_rounding_are_named_in_the_plan(monkeypatch, tmp_path):
    make = session.Proof

    def nearly(run):
        return lambda *arguments: tuple(value * (1 + 2**-20) for value in run(*arguments))

    monkeypatch.setattr(session, "Proof", lambda written, run, *own, **given: make(written, nearly(run), *own, **given))
    module = hiremate(written(lambda self, x: torch.sin(x)), "1 GiB", verbose=False)
    plan = take_steps(module, rows, 2, loss_of=torch.sum, clears="never")
    assert plan.proved == "forward 1 of 1 graph (1 up to rounding), gradients 1 of 1 (1 up to rounding)"
    assert len(plan.rounded) == 3  # an output, and the gradients of weight and bias
    for words in plan.rounded:
        assert re.search(
            r" has \S+ where eager PyTorch has \S+, \d+ of \d+ values differ, by at most \S+: \S+ units", words
        )
    assert table_of(plan).count("units in the last place") == 3
    page = html.unescape(write_html(plan, tmp_path / "plan.html", curve_limit_s=0).read_text())
    assert "Differences by rounding" in page
    assert all(page.count(words) >= 2 for words in plan.rounded)  # in the table, and as JSON


def test_a_proof_leaves_gradients_hooks_and_generators_alone():
    heard: list[str] = []

    def make() -> nn.Module:
        module = make_mixed()
        module[0].layer.weight.register_hook(lambda gradient: heard.append("gradient"))
        module[0].layer.weight.register_post_accumulate_grad_hook(lambda weight: heard.append("accumulated"))
        return module

    log, words, _ = train(make, True)
    planned, heard = heard, []
    assert not differing(log, train(make, False)[0])
    assert words.startswith("forward 1 of 1")
    assert planned == ["gradient", "accumulated"] * 3


@pytest.mark.parametrize(("verify", "times"), [("off", 0), ("first", 1), (3, 3)])
def test_verify_says_how_often_code_is_proved(planning_log, verify, times):
    module = hiremate(written(lambda self, x: torch.sin(x)), "1 GiB", verbose=False, verify=verify)
    take_steps(module, rows, 4, loss_of=torch.sum, clears="never")
    assert len(planning_log.of("proving")) == times


@pytest.mark.parametrize("verify", [0, -1, True, "always", 1.5, None])
def test_verify_is_first_or_off_or_a_number_of_steps(verify):
    with pytest.raises(ConfigurationError, match="verify must be 'first', 'off' or a number of steps"):
        make_options("1 GiB", verify=verify)


@pytest.mark.parametrize("share", [0.6, 0.3])
def test_a_proof_keeps_the_first_step_within_its_budget(monkeypatch, share):
    """A budget that is too small for a plain backward of this code: what autograd saves is offloaded."""
    peaks, run = [], Trial.run

    def measured(*arguments: Any, **options: Any) -> TrialOutcome:
        found = list[TrialOutcome]()
        peaks.append(measure_peak(lambda: found.append(run(*arguments, **options))))
        return found[0]

    monkeypatch.setattr(Trial, "run", measured)

    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU(), nn.Tanh()) for _ in range(8)]
        return nn.Sequential(*layers)

    batch = torch.randn(4096, 128)
    plain, module = make(), make()
    added = measure_peak(lambda: plain(batch).sum().backward())
    resident = sum(p.nbytes for p in module.parameters()) + batch.nbytes
    budget = resident + int(share * added)
    hiremate(module, budget, verbose=False)
    peaks.append(measure_peak(lambda: module(batch).sum().backward()))
    assert proved(module) == "forward 1 of 1 graph, gradients 1 of 1"
    assert len(peaks) == 3  # as it was written, as captured; and the step itself
    assert resident + max(peaks) <= budget, f"{peaks} beside {resident:,} of {budget:,} bytes"


def test_code_that_takes_gradients_by_itself_is_proved():
    """A gradient penalty in a forward: it needs what it saves, which is offloaded where it does not fit."""

    @network(lambda: {"layers": nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])})
    def penalty(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    module = hiremate(penalty(), "70%", verbose=False)
    module(torch.randn(2048, 64)).backward()
    words = proved(module)
    assert re.fullmatch(r"forward (\d) of \1 graphs?, gradients (\d) of \2", words), words


def gradients_of_ones(module: nn.Module) -> list[Tensor | None]:
    module(torch.ones(1024, WIDTH)).square().sum().backward()
    return [p.grad for p in module.parameters()]


def test_code_inside_of_vmap_is_proved_in_little_memory():
    """Autograd saves what lies below a vmap, which has memory of its own."""

    layer = written(lambda self, y: torch.vmap(lambda row: self.norm(row).tanh())(y), norm=nn.LayerNorm(WIDTH))
    plain = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    found = planned_alike(plain, gradients_of_ones, "60%")
    assert proved(found) == "forward 1 of 1 graph, gradients 1 of 1"


@pytest.mark.parametrize("budget", ["60%", "30%"])
def test_wrong_gradients_are_seen_in_little_memory(scaled_gradients, budget):
    """What autograd saves is offloaded."""

    blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(8)]
    scaled_gradients(2.0)
    with pytest.warns(HiRemateWarning, match="as captured it gives other numbers: the gradient of"):
        planned_alike(nn.Sequential(*blocks), gradients_of_ones, budget, on_infeasible="warn")


class Halved(nn.Linear):
    """A layer whose frozen weight is kept as two tensors, as quantized ones are."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        half = self.weight.detach() / 2
        self.weight = nn.Parameter(TwoTensor(half, half.clone()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        halves = F.linear(x, self.weight)
        return halves.a + halves.b + self.bias


def test_code_that_is_not_proved_is_logged(caplog):
    """The plan, its page and one line of the log say so, with the reason, though nothing else is shown."""
    module = nn.Sequential(Halved(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    simple_loop(rows)(hiremate(module, "100%", verbose=False))
    plan, why = get_plan(module), "since it gets a TwoTensor, a tensor that is made of others"
    assert f"proved: forward 0 of 1 graph, gradients 0 of 1; not more, {why}" in str(plan)
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1


# ---------------------------------------------------------------- faults of PyTorch, their mendings taken out


def test_a_change_in_place_that_dynamo_loses_is_missed():
    """A single number in double precision on the CPU: the graph of Dynamo itself does not change it."""

    def count(self, x):
        self.count.add_(x.shape[0])
        return x * 2

    if TORCH == (2, 13):
        module = written(count, count=torch.zeros((), dtype=torch.float64))
        with hacks.without("unread numbers"):
            _, _, warned = train(lambda: module, True)
        assert any("does not change" in text and "in place as the code itself does" in text for text in warned)
        assert module.count == 3 * 16


def test_a_result_in_the_wrong_place_is_seen():
    """torchmetrics' MeanMetric, updated with the loss: its value came to be its weight."""

    def mean_of_loss(self, x):
        loss = x.square().mean()
        self.metric(loss)
        return x * loss

    if TORCH == (2, 13):
        with hacks.without("results that are inputs"):
            check_refused(lambda: written(mean_of_loss, metric=torchmetrics.MeanMetric()), "gives other numbers")


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch 2.15 does not refuse it")
def test_code_that_fails_in_pytorch_runs_as_it_was_written():
    """The check for aliases that refuses subclasses of tensors is one failure inside of PyTorch."""

    class Named(Tensor):
        pass

    module = hiremate(written(lambda self, x: torch.sin(x)), "1 GiB", verbose=False)
    with warnings.catch_warnings(record=True) as caught, hacks.without("unsought aliases"):
        warnings.simplefilter("always")
        found = module(rows(0).as_subclass(Named))
    warned = [str(warning.message) for warning in caught]
    assert any("runs as it was written" in text and "fails when it runs: TypeError" in text for text in warned), warned
    plain = written(lambda self, x: torch.sin(x))
    plain.load_state_dict(module.state_dict())
    assert torch.equal(found.as_subclass(Tensor), plain(rows(0)))


def test_changes_that_a_graph_still_makes_are_not_missed():
    graphs = []

    def note(module, inputs):
        graphs.append(module)
        return module.forward

    def change(x, count, mean):
        count.add_(1).mul_(2)
        mean[1:].mul_(0.9)
        return x * count

    torch.compile(change, backend=note)(torch.ones(2, requires_grad=True), torch.zeros(()), torch.ones(3))
    assert captured_code.lost_changes(graphs[0]) == []
    for node in reversed(graphs[0].graph.nodes):
        if node.op == "call_method" and node.target == "mul_" and not node.users:
            graphs[0].graph.erase_node(node)
            break
    graphs[0].recompile()
    assert captured_code.lost_changes(graphs[0]) == ["L_mean_"]


def beside_itself(self: Any, x: Tensor) -> Tensor:
    """A value and the same without gradients are two inputs of the code after the break."""
    same = x.detach()
    torch._dynamo.graph_break()
    return x.tanh() * same


def beside_its_weight(self: Any, x: Tensor) -> Tensor:
    return x + (self.layer.weight - self.weight).square().sum()


def changes_its_weight(self: Any, x: Tensor) -> Tensor:
    self.latest.add_(self.weight.mean())
    return x * self.latest + self.weight.sum()


@pytest.mark.parametrize("function", [beside_itself, beside_its_weight, changes_its_weight])
def test_inputs_that_share_memory_are_captured(function):
    """PyTorch's stand-in for the second of them counts a change that nobody made."""

    def make() -> nn.Module:
        module = written(function, latest=torch.zeros(WIDTH))
        module.weight = module.layer.weight.detach()
        return module

    log, _, warned = train(make, True)
    assert not [text for text in warned if "could not capture" in text]
    assert not differing(log, train(make, False)[0])


def dirty(number: float) -> None:
    """Leave a number in memory that the next tensors of this size may get."""
    [torch.full((3, 16, WIDTH), number) for _ in range(8)]


def partly_written(self: Any, x: Tensor) -> Tensor:
    """Fill a tensor step by step, as solvers of differential equations do, and leave a part of it."""
    steps = torch.empty(3, *x.shape)
    steps[0] = x.sin()
    torch._dynamo.graph_break()
    steps[1] = x.cos()
    self.latest.copy_(x.detach())
    torch._dynamo.graph_break()
    return steps[:2].sum(0)


def test_memory_that_nobody_has_written_to_is_no_difference(monkeypatch):
    found, numbers = Trial.run, iter(range(10**6))

    def run(self: Trial, *given: Any, **options: Any) -> Any:
        dirty(float(next(numbers)))
        return found(self, *given, **options)

    monkeypatch.setattr(Trial, "run", run)

    def make() -> nn.Module:
        return written(partly_written, latest=torch.zeros(16, WIDTH))

    log, words, warned = train(make, True)
    assert re.match(r"forward (\d+) of \1 graphs", words), words
    assert not any("runs as it was written" in text for text in warned), warned
    assert not differing(log, train(make, False)[0])


def test_only_what_depends_on_unwritten_memory_is_left_out():
    def partly(number: float) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            dirty(number)
            made = torch.empty(3, 16, WIDTH)
            made[0] = x
            return made

        return run

    trial = Trial([torch.ones(16, WIDTH)], ["x"])
    expected, refilled = trial.run(partly(3)), replace(trial, fill=0).run(partly(3))
    zeros = trial.run(lambda x: torch.cat([x[None], torch.zeros(2, 16, WIDTH)]))
    wrong = trial.run(lambda x: torch.cat([x[None] * 2, torch.zeros(2, 16, WIDTH)]))
    assert differences(expected, trial.run(partly(4))) == ([], [])
    assert differences(zeros, expected)[0], "what nobody has written is read in the place of numbers"
    assert (expected.has_fills, zeros.has_fills) == (True, False)
    assert differences(expected, zeros, refilled=refilled) == ([], [])
    assert differences(expected, wrong, refilled=refilled)[0]


def test_failures_that_a_proof_meets_are_not_printed(capfd):
    """What other code has computed is changed in place, in a proof too: there it is no leaf either."""

    def change(self: Any, x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.mul_(2) * 3

    log, words, warned = train(lambda: written(change), True)
    assert re.match(r"forward (\d+) of \1 graphs", words), words
    assert not any("runs as it was written" in text for text in warned), warned
    assert "Traceback" not in capfd.readouterr().err
    assert not differing(log, train(lambda: written(change), False)[0])


# ---------------------------------------------------------------- gradients that do not come


def lose_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: where some gradients of outputs do not come, that of the first parameter is left out too."""

    def wrong(captured: Any, absence: Any) -> Any:
        first = next(g for g in captured.backward_outputs if g is not None)
        return replace(absence, values=absence.values | {first}, overwrites={})

    change_absences(monkeypatch, wrong)


def differing_steps(module: nn.Module, loss_of: Callable[[Any], Tensor]) -> list[int]:
    """Train a module with a plan and a copy without one; return the steps whose gradients differ."""
    both, found = (copy.deepcopy(module), hiremate(module, "1 GiB", verbose=False)), list[int]()
    for index in range(3):
        for one in both:
            one.zero_grad()
            loss_of(one(rows(index))).backward()
        if differing(*([p.grad for p in one.parameters()] for one in both)):
            found.append(index)
    return found


@pytest.mark.parametrize(
    ("make", "loss_of", "wrong_steps"),
    [(with_logits, lambda out: out[0], []), (two_heads, lambda out: out[0].sum(), [0])],
    ids=["known before the first step", "seen in it"],
)
def test_a_backward_without_some_gradient_is_proved(monkeypatch, make, loss_of, wrong_steps):
    """What runs in the first step already, as of a loss beside its logits, is proved before it runs.

    That one of two results stays unused is seen in the first step: from the next one on its faults are seen too.
    """
    lose_a_gradient(monkeypatch)
    with pytest.warns(HiRemateWarning, match="gives other numbers"):
        assert differing_steps(make(), loss_of) == wrong_steps


def test_each_kind_of_backward_is_proved_once(planning_log):
    """Both results are used, then the first one, then both, then the second one, and all that again."""
    uses = [(0, 1), (0,), (0, 1), (1,)] * 2
    module, counts = hiremate(two_heads(), "1 GiB", verbose=False), []
    for index, used in enumerate(uses):
        results = module(rows(index))
        counts.append(len(planning_log.of("proving")))
        sum(results[i].sum() for i in used).backward()
    assert counts == [1, 1, 2, 2, 3, 3, 3, 3]
    assert proved(module) == "forward 1 of 1 graph, gradients 1 of 1"


def test_a_backward_that_was_not_proved_yet_is_not_called_proved():
    module = hiremate(two_heads(), "1 GiB", verbose=False)
    words = []
    for index in range(2):
        module(rows(index))[0].sum().backward()
        words.append(proved(module))
    why = "; not more, since other gradients came than were proved, and that code has not run again since"
    assert words == [f"forward 1 of 1 graph, gradients 0 of 1{why}", "forward 1 of 1 graph, gradients 1 of 1"]


# ---------------------------------------------------------------- faults planted in our own passes


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function give numbers that are off by a quarter."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        first, *others = result if isinstance(result, tuple) else (result,)
        return (first * 1.25, *others) if isinstance(result, tuple) else first * 1.25

    return wrong


def scale_what_replaces(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a pass put operators that give wrong numbers in the place of those that it found."""
    replace = nodes.replace_node

    def wrong(node: Any, target: Any, *given: Any) -> None:
        replace(node, scaled(target) if target.__module__ == module.__name__ else target, *given)

    monkeypatch.setattr(nodes, "replace_node", wrong)


def scale_what_is_made(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Let what a function returns, be it alone or the first of several things, give wrong numbers."""
    make = getattr(module, name)

    def wrong(*given: Any) -> Any:
        made = make(*given)
        return (scaled(made[0]), *made[1:]) if isinstance(made, tuple) else scaled(made)

    monkeypatch.setattr(module, name, wrong)


def swap_first(captured: Any, field: str) -> Any:
    first, second, *others = getattr(captured, field)
    return replace(captured, **{field: (second, first, *others)})


def drop_assignments(captured: Any) -> Any:
    """Drop what the forward writes to its inputs."""
    graph = captured.graph
    kept = tuple(n for n in graph.forward if captured.fx_nodes[n].target is not torch.ops.aten.copy_.default)
    assert len(kept) < len(graph.forward)
    return replace(captured, graph=replace(graph, forward=kept))


def scale_what_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Finish.calls

    def wrong(self: Finish) -> Iterator[Any]:
        for step, target, args in calls(self):
            yield step, target if nodes.is_view(step.target) else scaled(target), args

    monkeypatch.setattr(Finish, "calls", wrong)


def have_one_shape(value: Any, other: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == other.shape


def two_results(self: Any, x: Tensor) -> Tensor:
    one, other = x.sin(), x.cos()
    torch._dynamo.graph_break()
    return one - 2 * other


def counted(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return x.sin() * self.count


def half(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (self.second(x) + self.second(x.sin())).float()


def filled(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 2:6] = x[:, 2:6].sin()
    return y + x


@network(lambda: {"one": nn.Parameter(torch.ones(WIDTH)), "two": nn.Parameter(torch.ones(WIDTH))})
def pair(self, x: Tensor) -> Tensor:
    """Two weights of one shape."""
    return (x * self.one).sin() + x * self.two


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], nn.Module]]] = {
    "assignments: what is assigned": (
        lambda patch: scale_what_replaces(patch, assignments),
        lambda: written(filled),
    ),
    "casts: sums of terms": (
        lambda patch: patch.setattr(casts, "_sum", lambda total, terms: total),
        lambda: written(half, second=nn.Linear(WIDTH, WIDTH)),
    ),
    "losses: cross entropies": (
        lambda patch: scale_what_replaces(patch, losses),
        lambda: written(lambda self, x: F.cross_entropy(x.repeat(1, 512), torch.zeros(16, dtype=torch.long))),
    ),
    "pooling: largest values": (
        lambda patch: scale_what_replaces(patch, pooling),
        lambda: written(lambda self, x: F.max_pool2d(x.sin().view(2, 4, 4, 4).repeat(1, 64, 4, 4), 2)),
    ),
    "views: pairs that are no inverses": (
        lambda patch: patch.setattr(assignments.nodes, "show_the_same", have_one_shape),
        lambda: written(lambda self, x: x.sin().view(2, 2, 2, 16).permute(1, 2, 0, 3).permute(1, 2, 0, 3).cos()),
    ),
    "kernels: masks of a dropout": (
        lambda patch: patch.setattr(kernels, "eager_scale", lambda source, probability: 1 / (1 - probability) ** 2),
        lambda: written(lambda self, x: F.dropout(x, 0.2)),
    ),
    "finishing: what runs over a result": (
        scale_what_finishes,
        lambda: written(lambda self, x: (self.second(x) * 2).sin(), second=nn.Linear(WIDTH, WIDTH)),
    ),
    "overwriting: gradients in the memory of others": (
        lambda patch: scale_what_is_made(patch, program, "overwriting"),
        lambda: written(lambda self, x: self.second(x.sin()).tanh(), second=nn.Linear(WIDTH, WIDTH)),
    ),
    "capture: two outputs in each other's place": (
        lambda patch: change_captures(patch, lambda _, capture: swap_first(capture(), "forward_outputs")),
        lambda: written(two_results),
    ),
    "capture: two gradients in each other's place": (
        lambda patch: change_captures(patch, lambda _, capture: swap_first(capture(), "backward_outputs")),
        pair,
    ),
    "capture: a change of a buffer that is dropped": (
        lambda patch: change_captures(patch, lambda _, capture: drop_assignments(capture())),
        lambda: written(counted, count=torch.zeros(())),
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_planted_in_a_pass_are_seen_and_do_no_harm(monkeypatch, fault):
    plant, make = PLANTED[fault]
    plant(monkeypatch)
    check_refused(make, "gives other numbers")
