"""Gradients are overwritten where they die, nowhere else, and no number changes by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.capturing import absent, capture
from hiremate_lightning.records.costs import estimate
from hiremate_lightning.records.graph import StorageKind
from hiremate_lightning.rewriting.assignments import assign
from hiremate_lightning.rewriting.nodes import Into, _registered, name_of
from hiremate_lightning.rewriting.overwriting import _INTO, _INTO_FIRST, _INTO_FIRST_BY_ROWS, Strides, overwriting
from tests.behaviour.exactness.test_execution import compiled, nothing_kept
from tests.exact import added_peaks, captured_by, drawn, network, simple_loop, square_error, take_steps, train_both

aten = torch.ops.aten
ROWS, WIDTH = 64, 32
pictures = drawn(4, 3, 16, 16)
rows = drawn(ROWS, WIDTH)

# ---------------------------------------------------------------- kernels


def pair(make: Callable[[], Tensor]) -> tuple[Any, ...]:
    return make(), make()


CALLS: dict[Any, tuple[Callable[..., tuple[Any, ...]], dict[str, Any]]] = {
    aten.add.Tensor: (pair, {"alpha": -0.3}),
    aten.sub.Tensor: (pair, {"alpha": 0.7}),
    aten.mul.Tensor: (pair, {}),
    aten.div.Tensor: (pair, {}),
    aten.neg.default: (lambda make: (make(),), {}),
    aten.where.self: (lambda make: (make() > 0, make(), make()), {}),
    aten.mul.Scalar: (lambda make: (make(), 0.3), {}),
    aten.div.Scalar: (lambda make: (make(), 0.3), {}),
    aten.elu_backward.default: (lambda make: (make(), 1.1, 0.9, 1.2, False, make()), {}),
    aten.gelu_backward.default: (pair, {"approximate": "tanh"}),
    aten.hardsigmoid_backward.default: (pair, {}),
    aten.hardtanh_backward.default: (lambda make: (*pair(make), -0.5, 0.5), {}),
    aten.leaky_relu_backward.default: (lambda make: (*pair(make), 0.01, False), {}),
    aten.sigmoid_backward.default: (pair, {}),
    aten.silu_backward.default: (pair, {}),
    aten.softplus_backward.default: (lambda make: (*pair(make), 1.5, 0.5), {}),
    aten.tanh_backward.default: (pair, {}),
    aten.threshold_backward.default: (lambda make: (*pair(make), 0), {}),
    aten.exp.default: (lambda make: (make(),), {}),
    aten.leaky_relu.default: (lambda make: (make(), 0.2), {}),
    aten.relu.default: (lambda make: (make(),), {}),
    aten.rsqrt.default: (lambda make: (make(),), {}),
    aten.sigmoid.default: (lambda make: (make(),), {}),
    aten.sqrt.default: (lambda make: (make(),), {}),
    aten.tanh.default: (lambda make: (make(),), {}),
}
AT = torch.arange(5).flip(0)
WRITES: dict[Any, tuple[Callable[..., tuple[Any, ...]], dict[str, Any]]] = {
    aten._log_softmax_backward_data.default: (lambda make: (make(), make().log_softmax(1), 1, torch.float32), {}),
    aten._softmax_backward_data.default: (lambda make: (make(), make().softmax(-1), -1, torch.float32), {}),
    aten._log_softmax.default: (lambda make: (make(), 1, False), {}),
    aten._softmax.default: (lambda make: (make(), -1, False), {}),
    assign: (lambda make: (make(), (("slice", (0, 1, 3, 1)), ("select", (1, 2))), make()[:2, 0]), {}),
    aten.clone.default: (lambda make: (make(),), {}),
    aten.index_add.default: (lambda make: (make(), 0, AT, make()), {"alpha": 2}),
    aten.index_put.default: (lambda make: (make(), [AT], make(), True), {}),
    aten.masked_fill.Scalar: (lambda make: (make(), make() > 0, 0.3), {}),
    aten.scatter_add.default: (lambda make: (make(), 0, torch.zeros(5, 7, 33, 35, dtype=torch.int64), make()), {}),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}


def strides_of(arguments: Sequence[Any]) -> Strides:
    return tuple((i, a.stride()) for i, a in enumerate(arguments) if isinstance(a, Tensor))


def same_bits(found: Tensor, expected: Tensor) -> bool:
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    return torch.equal(found.view(as_integers), expected.view(as_integers))


def test_every_operator_that_overwrites_is_compared():
    assert set(CALLS) == set(_INTO)
    ours = {function for function, promised in _registered.items() if promised.into is Into.FIRST}
    assert set(WRITES) == set(_INTO_FIRST) | ours


def numbers(dtype: torch.dtype) -> Tensor:
    values = torch.randn(5, 7, 33, 35) * torch.randn(5, 7, 33, 35).exp()
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("target", CALLS, ids=str)
def test_what_overwrites_an_argument_is_what_would_be_allocated(target, layout, dtype):
    arguments, options = CALLS[target]

    def make() -> Tensor:
        return layout(numbers(dtype))

    written = 0
    for position in range(3):
        call = arguments(make)
        if position >= len(call) or not isinstance(call[position], Tensor) or call[position].dtype != dtype:
            continue
        expected = target(*call, **options)
        with torch.no_grad():
            found = overwriting(target, position)(strides_of(call), *call, **options)
        assert found is call[position]
        assert same_bits(found, expected)
        written += 1
    assert written


@pytest.mark.parametrize(
    ("target", "layout"),
    [(target, how) for target in WRITES for how in (("contiguous",) if target in _INTO_FIRST_BY_ROWS else LAYOUTS)],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_writes_into_a_tensor_are_those_into_a_copy(target, layout):
    arguments, options = WRITES[target]
    call = arguments(lambda: LAYOUTS[layout](numbers(torch.float32)))
    before = call[0].clone()
    expected = target(*call, **options)
    with torch.no_grad():
        kept = overwriting(target, 0)(((0, (1, 1, 1, 1)),), *call, **options)
        assert same_bits(call[0], before)
        found = overwriting(target, 0)(strides_of(call[:1]), *call, **options)
    assert found is call[0]
    for result in (found, kept):  # some give what they allocate other strides than their argument has
        assert same_bits(result.contiguous(), expected.contiguous())


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default], ids=str)
def test_complex_numbers_are_overwritten_as_others_are(target):
    call = CALLS[target][0](lambda: torch.complex(numbers(torch.float32), numbers(torch.float32)))
    expected = target(*call)
    with torch.no_grad():
        found = overwriting(target, 0)(strides_of(call), *call)
    assert found is call[0]
    assert same_bits(torch.view_as_real(found), torch.view_as_real(expected))


@network(lambda combine: {"weight": nn.Parameter(torch.randn(WIDTH, 1)), "combine": combine})
def spectra(self, x: Tensor) -> Tensor:
    """Complex products and quotients of numbers that lie otherwise than each other."""
    spectrum = torch.fft.rfft(x.unflatten(1, (8, -1)), n=2 * WIDTH - 2).transpose(1, 2)
    return torch.view_as_real(self.combine(spectrum, spectrum * self.weight).contiguous()).square().mean()


@pytest.mark.parametrize(
    "combine",
    [lambda a, b: b, torch.mul, lambda a, b: a / (b + 2), lambda a, b: torch.sigmoid(b), lambda a, b: torch.tanh(b)],
    ids=["weighted", "product", "quotient", "sigmoid", "tanh"],
)
def test_complex_products_round_as_where_nothing_is_overwritten(combine):
    loop = simple_loop(lambda index: torch.randn(ROWS, 8 * WIDTH), loss_of=Tensor.sum)
    train_both(lambda: spectra(combine), loop, "100%")


@pytest.mark.parametrize(
    ("other", "dtype"),
    [
        (torch.randn(7, 1, 1), torch.float32),
        (torch.randn(5, 1, 33, 1), torch.bfloat16),
        (torch.tensor(0.3, dtype=torch.float64), torch.bfloat16),
        (torch.randn(5, 7, 33, 35) > 0, torch.float32),
        (torch.randn(5, 7, 33, 35).bfloat16(), torch.float32),
        (0.3, torch.float16),
    ],
    ids=["row", "column", "number on the host", "mask", "other dtype", "number"],
)
@pytest.mark.parametrize("target", [aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor], ids=str)
def test_other_operands_may_be_smaller_or_of_another_type(target, other, dtype):
    call = (torch.randn(5, 7, 33, 35).to(dtype), other.to(dtype) if _is_broadcast(other) else other)
    expected = target(*call)
    assert expected.dtype == dtype
    with torch.no_grad():
        found = overwriting(target, 0)(strides_of(call), *call)
    assert found is call[0]
    assert same_bits(found, expected)


def _is_broadcast(other: Any) -> bool:
    return isinstance(other, Tensor) and other.dim() > 0 and other.numel() < 1000


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("change", [Tensor.t, expanded], ids=["transposed", "expanded"])
@pytest.mark.parametrize("position", [0, 1])
def test_arguments_with_other_strides_than_traced_are_left_alone(change, position):
    traced = (torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH))
    call = [t.clone() for t in traced]
    call[position] = change(call[position])
    before = [t.clone() for t in call]
    with torch.no_grad():
        found = overwriting(aten.mul.Tensor, 0)(strides_of(traced), *call)
    assert same_bits(found, aten.mul.Tensor(*before))
    assert all(torch.equal(a, b) for a, b in zip(call, before, strict=True))


def test_only_memory_that_nobody_else_has_is_overwritten():
    """Neither another tensor nor a storage that somebody holds; and nothing where autograd records."""
    x, y = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)

    def is_overwritten(x: Tensor) -> bool:
        return overwriting(aten.mul.Tensor, 0)(strides_of((x, y)), x, y) is x

    assert not is_overwritten(x)
    with torch.no_grad():
        other = x.view(-1)
        before = other.clone()
        assert not is_overwritten(x)
        assert torch.equal(other, before)
        del other
        held = x.untyped_storage()
        assert not is_overwritten(x)
        del held
        assert is_overwritten(x)
        is_gone = is_overwritten(torch.mm(y, y).view(-1).view(WIDTH, WIDTH))  # an assertion holds all that stands in it
        assert is_gone, "a view of what is gone"


# ---------------------------------------------------------------- choice


@network(lambda function: {"function": function, "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))})
def computes(self, *inputs: Tensor) -> Any:
    """Runs a function of layers and its inputs."""
    return self.function(self.layers, *inputs)


def captured_of(function: Callable[..., Any], *inputs: Tensor) -> capture.Captured:
    return captured_by(computes(function), *(inputs or (torch.randn(ROWS, WIDTH),)))


def overwriting_ops(captured: capture.Captured) -> list[str]:
    return sorted(node.target.overloadpacket.__name__ for node in captured.overwrites)


@torch.library.custom_op("hiremate_tests::passing", mutates_args=())
def passing(x: Tensor) -> Tensor:
    """Its gradient is seen by code that may keep it."""
    return x.clone()


passing.register_fake(torch.empty_like)
torch.library.register_autograd("hiremate_tests::passing", lambda ctx, gradient: passing(gradient))

CHOICES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "made by the backward": (lambda f, x: f[1](f[0](x).relu()), ["threshold_backward"]),
    "chain": (
        lambda f, x: f[1](f[0](x).tanh().sigmoid().relu()),
        ["sigmoid_backward", "tanh_backward", "threshold_backward"],
    ),
    "view": (lambda f, x: f[1](F.gelu(f[0](x.view(4, -1, WIDTH)))), ["gelu_backward"]),
    "rows": (lambda f, x: f[1](f[0](x).softmax(1)), ["_softmax_backward_data"]),
    "rows of a loss": (
        lambda f, x: F.cross_entropy(f[0](x), torch.arange(ROWS) % WIDTH),
        ["_log_softmax_backward_data"],
    ),
    "columns": (lambda f, x: f[1](f[0](x).t().softmax(1).t().contiguous()), []),
    "given by the caller": (lambda f, x: f[0](x).relu(), []),
    "read for the last time": (lambda f, x: f[1](f[0](x).relu() + f[2](x)), ["threshold_backward"]),
    "laid out by the caller": (lambda f, x: f[0](x).tanh().clone().relu(), []),
    "added to what the caller laid out": (lambda f, x: (lambda y: (f[1](y), y))(f[0](x).relu()), []),
    "still read": (lambda f, x: f[1](f[2](x) + f[0](x).relu()), []),
    "still read as a view": (lambda f, x: f[1](f[2](x).view(2, -1).view(ROWS, WIDTH) + f[0](x).relu()), []),
    "read by others": (lambda f, x: f[1](f[0](x).relu() + passing(f[2](x))), []),
    "made by others": (lambda f, x: f[1](f[0](passing(f[2](x).relu()))), []),
    "of an input": (lambda f, x: f[1](x.relu()), ["threshold_backward"]),
    "of a view of an input": (lambda f, x: f[1](x.view(2, -1).relu().view(ROWS, WIDTH)), []),
    "written over a view": (
        lambda f, x: f[1](x.view(2, -1).tanh().relu().view(ROWS, WIDTH)),
        ["threshold_backward"],
    ),
    "part of a block": (lambda f, x: f[1](torch.cat([h.relu() for h in f[0](x).chunk(2, 1)], 1)), []),
}


@pytest.mark.parametrize("name", CHOICES)
def test_only_unread_values_of_the_backward_are_overwritten(name):
    """The caller gets no view of what was overwritten, where an input has a gradient."""
    function, expected = CHOICES[name]
    x = torch.randn(ROWS, WIDTH, requires_grad=("view" in name.split() and "read" not in name) or name == "of an input")
    assert overwriting_ops(captured_of(function, x)) == expected


def test_a_gradient_that_is_returned_is_not_overwritten():
    def function(f, x, shift):
        return f[1](f[0](x).relu() + shift)

    x, shift = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    assert overwriting_ops(captured_of(function, x, shift)) == ["threshold_backward"]
    assert not overwriting_ops(captured_of(function, x, shift.requires_grad_()))


def test_what_overwrites_has_its_argument_s_storage_and_is_work():
    captured = captured_of(lambda f, x: f[1](f[0](x).relu()))
    graph = captured.graph
    index = next(i for i, node in enumerate(captured.fx_nodes) if node in captured.overwrites)
    node = graph.nodes[index]
    storages = [graph.tensors[t].storage for t in (*node.outputs, *node.inputs)]
    assert storages[0] in storages[1:]
    assert graph.storages[storages[0]].kind is StorageKind.GRADIENT
    assert not graph.allocates[index]
    assert graph.has_work(index)
    assert captured.allocating.allocates[index]


# ---------------------------------------------------------------- training


@network(
    lambda width, norm=nn.BatchNorm2d: {
        "body": nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )
    }
)
def residual(self, x: Tensor) -> Tensor:
    return torch.relu(x + self.body(x))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), residual(8), residual(8), nn.AdaptiveAvgPool2d(4), nn.SiLU()
    )


def dense() -> nn.Module:
    layers: list[nn.Module] = []
    for activation in (nn.GELU(), nn.SiLU(), nn.ELU(), nn.Hardtanh(), nn.Softplus(), nn.LeakyReLU()):
        layers += [nn.Linear(WIDTH, WIDTH), activation, nn.Dropout(0.2), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers)


@network(lambda inner: {"inner": inner})
def autocast(self, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.inner(x)


@network(
    lambda: {
        "first": nn.Linear(WIDTH, WIDTH),
        "gate": nn.Linear(WIDTH, WIDTH),
        "scale": nn.Parameter(torch.full((WIDTH,), 0.5)),
    }
)
def gated(self, x: Tensor) -> Tensor:
    """A long-lived gate, layer scale, and weights that are used twice."""
    for _ in range(2):
        x = x + self.scale * (self.first(x).tanh() * self.gate(x).sigmoid()) / 3
    return self.first(x - x.mean(0))


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "convolutions": (convolutions, pictures),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda seed: pictures(seed).contiguous(memory_format=torch.channels_last),
    ),
    "pictures channels last": (convolutions, lambda seed: pictures(seed).contiguous(memory_format=torch.channels_last)),
    "dense": (dense, rows),
    "bfloat16": (lambda: dense().bfloat16(), lambda seed: rows(seed).bfloat16()),
    "autocast": (lambda: autocast(dense()), rows),
    "autocast convolutions": (lambda: autocast(convolutions()), pictures),
    "gated": (gated, rows),
    "rows": (lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.Softmax(1)] * 2, nn.LogSoftmax(1)), rows),
    "channels": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax(1), nn.Conv2d(8, 8, 3), nn.Softmax(1)), pictures),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": square_error,
    "sum": lambda y: y.sum(),  # its gradient is one number, expanded
    "mean": lambda y: y.mean(0).square().sum(),
    "transposed": lambda y: (y.transpose(0, 1).contiguous() ** 3).sum(),
}


def train(module: nn.Module, call: Callable[[Tensor], Tensor], batches: Any, loss_of: Any) -> list[Tensor]:
    torch.manual_seed(7)
    optimizer, log = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for step in range(3):
        optimizer.zero_grad()
        x = batches(step).requires_grad_()
        loss_of(call(x)).backward()
        optimizer.step()
        log += [x.grad, *(t.detach().clone() for t in module.state_dict().values())]
    return log


@pytest.mark.parametrize(
    ("training", "loss"),
    [*((name, "square") for name in TRAININGS), *product(["pictures channels last", "dense"], [*LOSSES][1:])],
)
def test_training_is_exact(training, loss):
    (make, batches), loss_of = TRAININGS[training], LOSSES[loss]
    plain = make()
    planned = copy.deepcopy(plain)
    call, conductor = compiled(planned, nothing_kept)
    logs = [train(plain, plain, batches, loss_of), train(planned, call, batches, loss_of)]
    assert all(torch.equal(a, b) for a, b in zip(*logs, strict=True))
    assert all(runtime.captured.overwrites for runtime in conductor.runtimes)
    assert [a.stride() for a in logs[0]] == [b.stride() for b in logs[1]]


@network(lambda: {"first": nn.Linear(WIDTH, 16 * WIDTH), "second": nn.Linear(16 * WIDTH, 1)})
def wide(self, x: Tensor) -> Tensor:
    return square_error(self.second(self.first(x).relu()))


def test_the_peak_falls_and_is_what_was_planned(monkeypatch):
    batch = torch.randn(32 * ROWS, WIDTH)
    _, planned = added_peaks(wide(), batch)
    monkeypatch.setattr(capture, "overwrite", lambda graph, *_: (graph, {}, {}))
    assert planned < added_peaks(wide(), batch)[1] - 15 * WIDTH * len(batch) * 4


def test_a_retained_graph_gives_the_same_gradients_again():
    torch.manual_seed(1)
    module = hiremate(dense(), "60%", on_infeasible="warn", verbose=False)
    for _ in range(3):
        loss = square_error(module(rows(0)))
        gradients = [torch.autograd.grad(loss, module.parameters(), retain_graph=again) for again in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@network(lambda: {name: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for name in ("layers", "heads")})
def residues(self, x: Tensor) -> tuple[Tensor, ...]:
    """Returns its loss and what it passed through: sums, of which one term never comes."""
    passed = []
    for index, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
        x = torch.relu(x + torch.sigmoid(layer(x)))
        passed.append(x if index == 1 else head(x))
    return (x.sum(), *passed)


@pytest.mark.parametrize(
    ("used", "loss_of"),
    [((0,), Tensor.sum), ((0, 2), square_error), ((1, 3), Tensor.sum), ((4,), square_error), (range(5), square_error)],
    ids=["0 summed", "0 and 2", "1 and 3 summed", "4", "all"],
)
def test_gradients_that_never_come_change_nothing(used, loss_of):
    plan = train_both(residues, simple_loop(rows, loss_of=lambda out: sum(loss_of(out[i]) for i in used)), "100%")
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes


def test_a_sum_that_is_but_one_of_its_terms_is_left_alone():
    captured = captured_of(lambda f, x: (lambda y: (f[1](y), f[2](y)))(f[0](x).relu()))
    assert overwriting_ops(captured) == ["add", "threshold_backward"]
    for missing in (0, 1):
        assert not absent.find_absent(captured, frozenset({missing})).overwrites


@pytest.mark.parametrize("missing", [frozenset[int](), frozenset({0}), frozenset({1}), frozenset({0, 2})], ids=str)
def test_graphs_lacking_gradients_overwrite_as_their_programs(missing):
    captured = captured_by(residues(), rows(0))
    found = absent.find_absent(captured, missing)
    graph, _ = absent.without_missing(captured, missing, estimate(captured.graph))
    shared = {n for i, n in enumerate(captured.fx_nodes) if captured.allocating.allocates[i] and not graph.allocates[i]}
    assert {n for n in shared if n not in found.values and n not in found.replaced} == set(found.overwrites)


def test_what_a_hook_keeps_of_a_gradient_stays_as_it_was():
    kept: list[list[Tensor]] = [[], []]

    def make(log: list[Tensor]) -> nn.Module:
        def function(f, x):
            y = f[0](x).relu() * 2
            y.register_hook(log.append)
            return f[1](y.sigmoid()).relu()

        torch.manual_seed(5)
        return computes(function)

    plain, planned = make(kept[0]), hiremate(make(kept[1]), "100%", verbose=False)
    for module in (plain, planned):
        take_steps(module, rows, 2, clears="never")
    assert len(kept[0]) == len(kept[1]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_gradients_that_are_returned_may_be_changed_in_place():
    module = hiremate(gated(), "100%", verbose=False)
    for step in range(3):
        x = rows(step).requires_grad_()
        square_error(module(x)).backward()
        for gradient in (x.grad, *(p.grad for p in module.parameters())):
            gradient.add_(torch.ones((), requires_grad=True))
            gradient.detach_()
