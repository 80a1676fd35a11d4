"""Modules that are alike are traced once, with the graph and the guards of a trace of each; others as they are."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch.nn import functional as F

from hiremate_lightning.torch_private import dynamo
from hiremate_lightning.torch_private.regions import module_traces, repeated_modules
from tests.exact import TORCH, network

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="all is traced before PyTorch 2.13")

WIDTH = 8
SHARED = SimpleNamespace(power=2.0)
COUNTED = {"calls": 0}
LABELS: dict[nn.Module, float] = {}


class Block(nn.Module):
    """What blocks of transformers have: norms, dropout, numbers of their own, a configuration that all share."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.drop, self.index, self.scale, self.flags, self.config = nn.Dropout(0.1), index, 0.5, [1, 2], SHARED

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.inner(self.norm(x))) ** self.config.power
        return x + self.scale * self.flags[1] * self.drop(self.outer(hidden))


@network(lambda _: {"one": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH), "other": nn.Linear(WIDTH, WIDTH)})
def counting(self, x: Tensor) -> Tensor:
    """A batch norm, whose buffers each call updates."""
    return x + self.other(torch.tanh(self.norm(self.one(x))))


@network(lambda _: {"attention": nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkv"})})
def paired(
    self, x: Tensor, turn: tuple[Tensor, Tensor], causal: bool = False, mask: Tensor | None = None
) -> tuple[Any, ...]:
    """Two results, one of them an argument, and arguments by name that are tuples and constants."""
    q, k, v = (self.attention[name](x * turn[0] + turn[1])[None] for name in "qkv")
    return (x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)[0], turn[0], None)


@network(lambda _: {"linear": nn.Linear(WIDTH, WIDTH), "act": nn.ReLU(inplace=True), "seen": torch.zeros(WIDTH)})
def in_place(self, x: Tensor) -> Tensor:
    hidden = self.act(self.linear(x))
    self.seen.add_(hidden.detach().mean(0))
    return hidden.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH).add_(self.seen)


@network(lambda _: {"linear": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, 3 * WIDTH)})
def returning(self, x: Tensor) -> tuple[Tensor, ...]:
    """Returns what operations gave that return what they are given, a part of a tuple, and a view."""
    hidden = torch.tanh(self.linear(x).float().contiguous()).to(x.dtype)
    parts = self.other(hidden + 1).split(WIDTH, -1)
    return hidden, parts[1], parts[2].transpose(0, 1)


class Stack(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(map(kind, range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class PairedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, turn = self.first(x), (x.sin(), x.cos())
        for block in self.blocks:
            x, _, nothing = block(x, turn, causal=True)
            assert nothing is None
        return x


class KeepingStack(Stack):
    """Keeps what each block gives in a list, as networks with skips do."""

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return torch.stack(kept).sum(0)


class TwiceStack(Stack):
    """Calls each block twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(self.first(x))
        return x


class BareStack(Stack):
    """Begins with its blocks, which all get its input, as experts do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class ReturningStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            hidden, part, view = block(x)
            x = hidden * part + view.t()
        return x


class GradientStack(Stack):
    """Takes gradients itself, for which Dynamo looks at how values came about."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        (gradient,) = torch.autograd.grad(x.sum(), self.first.weight, create_graph=True)
        return x * gradient.sum()


class Around(nn.Module):
    """Calls a module that is copied; what it does itself is copied in other ways."""

    def __init__(self, index: int, in_place: bool) -> None:
        super().__init__()
        self.one, self.other, self.in_place = Block(index), Block(index + 1), in_place
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.one(x)) + self.attention(x, x, x, need_weights=False)[0]
        return x.sin().mul_(2.0) if self.in_place else x


class LinesStack(Stack):
    """Calls its blocks from several lines, of its own code and of other code."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        x = self._further(self.blocks[1](x)) + 1
        (x,) = [nn.Sequential.forward(self.blocks[3:], x) for _ in range(1)]
        return x

    def _further(self, x: Tensor) -> Tensor:
        return self.blocks[2](x).sin()


class HandlingStack(Stack):
    """Calls one of its blocks while an error is handled."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        try:
            raise KeyError
        except KeyError:
            x = self.blocks[1](x)
        return self.blocks[2](self.blocks[3](x))


def trace(module: nn.Module, *inputs: Tensor, copies: bool, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Trace a module, each part of it or each kind of part once; give its graphs, guards, and the number of copies."""
    torch.compiler.reset()
    graphs, guards, made = [], [], itertools.count()

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        guards.append({_written(guard) for guard in TracingContext.get().guards_context.dynamo_guards.inner})
        return graph.forward

    def make(copied: Any) -> Any:
        next(made)
        return plain_make(copied)

    plain_make = module_traces.Copy.make
    with monkeypatch.context() as patch:
        patch.setattr(module_traces.Copy, "make", make)
        if not copies:  # everything is less than that
            patch.setattr(module_traces, "FEWEST_NODES", 10**6)
        with dynamo.capturing_for_plans():
            compiled = torch.compile(module, backend=backend)
            torch.manual_seed(0)
            result = compiled(*inputs)
    rows = [_rows(graph) for graph in graphs]
    return SimpleNamespace(call=compiled, result=result, rows=rows, guards=guards, copies=next(made))


def _written(guard: Any) -> tuple[str, ...]:
    details = {**getattr(guard.create_fn, "keywords", {})}
    if isinstance(details.get("key"), int):
        details["key"] = "a number of a hook"  # which is another one each time
    fields = [f"{key}={getattr(value, 'name', value)}" for key, value in details.items() if key != "value"]
    return tuple(re.sub(r"_\d+_c\d+|dict___\d+", "", text) for text in (guard.name, guard.create_fn_name(), *fields))


def _rows(graph: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Write each node with all that is known of it but its name."""
    number = {node: index for index, node in enumerate(graph.graph.nodes)}
    rows, places = [], dict[int, int]()
    for node in graph.graph.nodes:
        inside = [*node.meta.get("nn_module_stack", {}).values()]
        called = [target for _, target in node.meta.get("source_fn_stack", ())]
        target = node.target if node.op != "placeholder" else str(node.target)
        given = fx.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        trace = None if node.op == "placeholder" else node.meta.get("stack_trace")
        meta = sorted(set(node.meta) - {"creation_timestamp"})
        shown = _shown(node.meta.get("example_value"), places)
        rows.append((node.op, target, given, inside, called, trace, meta, shown))
    return rows


def _shown(value: Any, places: dict[int, int]) -> Any:
    """Write what a node gives, with the number of the storage that it lies on."""
    if isinstance(value, (tuple, list)):
        return [_shown(item, places) for item in value]
    if not isinstance(value, Tensor):
        return str(value)
    place = places.setdefault(value.untyped_storage()._cdata, len(places))
    where = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(), place
    return type(value), value.dtype, value.device, value.requires_grad, *where


def both(
    make: Callable[[], nn.Module], *inputs: Tensor, monkeypatch: pytest.MonkeyPatch, implied: str = "type(L["
) -> SimpleNamespace:
    """Trace a network in both ways; fail where graphs or guards differ; give the trace with copies.

    Args:
        make: Builds the network.
        *inputs: Its inputs.
        monkeypatch: Of the test.
        implied: In the names of what needs no guard with copies, since others imply it: a class that is known to be
            the same one.
    """
    traces = []
    for copies in (False, True):
        torch.manual_seed(0)
        traces.append(trace(make(), *inputs, copies=copies, monkeypatch=monkeypatch))
    plainly, found = traces
    assert plainly.copies == 0
    assert not repeated_modules._traced_whole  # no copy failed
    assert [len(rows) for rows in found.rows] == [len(rows) for rows in plainly.rows]
    for rows, expected in zip(found.rows, plainly.rows, strict=True):
        assert [(a, b) for a, b in zip(rows, expected, strict=True) if a != b] == []
    for guards, expected in zip(found.guards, plainly.guards, strict=True):
        assert {guard for guard in expected - guards if implied not in guard[0]} == set()
    return found


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), generator=torch.Generator().manual_seed(1))


ALIKE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "blocks": (lambda: Stack(Block), 3),
    "batch norms": (lambda: Stack(counting), 3),
    "in place": (lambda: Stack(in_place), 3),
    "two results": (lambda: PairedStack(paired), 3),
    "kept": (lambda: KeepingStack(Block), 3),
    "twice": (lambda: TwiceStack(Block, 2), 3),
    "bare": (lambda: BareStack(Block), 3),
    "returned": (lambda: ReturningStack(returning), 3),
    "gradient": (lambda: GradientStack(Block), 3),
    "around": (lambda: Stack(lambda i: Around(i, False)), 3),
    "around in place": (lambda: Stack(lambda i: Around(i, True)), 3),
    "lines": (lambda: LinesStack(Block), 3),
    "error": (lambda: HandlingStack(Block), 2),
    "nested": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block(i)) for i in range(4))),
        2,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 3, enable_nested_tensor=False),
        1,
    ),
}


@pytest.mark.parametrize(("make", "copies"), ALIKE.values(), ids=ALIKE)
def test_graph_and_guards_are_those_of_a_trace_of_each(make, copies, monkeypatch):
    assert both(make, batch(), monkeypatch=monkeypatch).copies >= copies


def edited(edit: Callable[[nn.ModuleList], None], kind: Callable[[int], nn.Module] = Block) -> Callable[[], Stack]:
    def make() -> Stack:
        stack = Stack(kind)
        edit(stack.blocks)
        return stack

    return make


def _patched(block: nn.Module) -> None:
    block.forward = lambda x: Block.forward(block, x) + 1


def _tied(blocks: nn.ModuleList) -> None:
    blocks[2].inner.weight = blocks[1].inner.weight


def _turned(blocks: nn.ModuleList) -> None:
    blocks[2].inner.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())


EDITS: dict[str, Callable[[nn.ModuleList], Any]] = {
    "number": lambda blocks: setattr(blocks[2], "scale", 0.25),
    "sign of zero": lambda blocks: [setattr(block, "scale", 0.0 * (-1) ** i) for i, block in enumerate(blocks)],
    "list": lambda blocks: setattr(blocks[2], "flags", [1, 3]),
    "dropout": lambda blocks: setattr(blocks[2].drop, "p", 0.2),
    "epsilon": lambda blocks: setattr(blocks[2].norm, "eps", 1e-3),
    "mode": lambda blocks: blocks[2].eval(),
    "inner mode": lambda blocks: blocks[2].drop.eval(),
    "frozen": lambda blocks: blocks[2].inner.weight.requires_grad_(False),
    "type": lambda blocks: blocks[2].double(),
    "no bias": lambda blocks: setattr(blocks[2], "inner", nn.Linear(WIDTH, 2 * WIDTH, bias=False)),
    "width": lambda blocks: [
        setattr(blocks[2], "inner", nn.Linear(WIDTH, WIDTH)),
        setattr(blocks[2], "outer", nn.Linear(WIDTH, WIDTH)),
    ],
    "strides": _turned,
    "class": lambda blocks: setattr(blocks[2], "drop", nn.AlphaDropout(0.1)),
    "tied weights": _tied,
    "tied modules": lambda blocks: setattr(blocks[2], "inner", blocks[1].inner),
    "a configuration of its own": lambda blocks: setattr(blocks[2], "config", SimpleNamespace(power=3.0)),
    "patched": lambda blocks: _patched(blocks[2]),
    "a hook": lambda blocks: blocks[2].register_forward_hook(lambda module, given, result: result * 2),
    "an inner hook": lambda blocks: blocks[2].norm.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "a gradient's hook": lambda blocks: blocks[2].register_full_backward_hook(lambda module, given, result: None),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_layer_that_differs_is_traced_as_it_is(edit, monkeypatch):
    if edit is EDITS["type"]:
        monkeypatch.setattr(Block, "forward", _in_own_precision(Block.forward))
    implied = "type(L[" if edit is not EDITS["tied modules"] else "['inner']"  # whose weights are known to be tied
    assert both(edited(edit), batch(), monkeypatch=monkeypatch, implied=implied).copies <= 3 - (implied[0] == "t")


def _in_own_precision(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def in_own(self: Block, x: Tensor) -> Tensor:
        return forward(self, x.to(self.norm.weight.dtype)).float()

    return in_own


@network(lambda index: {"linear": nn.Linear(WIDTH, WIDTH), "act": lambda x, by=index: x * by + 1})
def with_lambda(self, x: Tensor) -> Tensor:
    """A function of its own, whose code all blocks share."""
    return x + self.act(torch.tanh(self.linear(x)).sin())


linear = network(lambda _: {"linear": nn.Linear(WIDTH, WIDTH)})


class Labelled(nn.Module):
    """Looks itself up."""

    named: dict[nn.Module, float] = {}  # noqa: RUF012

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.named[self] = LABELS[self] = float(index)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).sin() * self.named[self]


class GloballyLabelled(Labelled):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).sin() * LABELS[self]


@linear
def counted(self, x: Tensor) -> Tensor:
    """Counts its calls outside, and computes with the number."""
    COUNTED["calls"] += 1
    return x + torch.tanh(self.linear(x)).sin() * COUNTED["calls"]


@linear
def drawing(self, x: Tensor) -> Tensor:
    """Draws in Python whether it runs, as stochastic depth does."""
    return x + torch.tanh(self.linear(x)).sin() * random.random()


@network(lambda _: {"linear": nn.Linear(WIDTH, WIDTH)}, last=None)
def remembering(self, x: Tensor) -> Tensor:
    """Keeps what it computed last."""
    self.last = x + torch.tanh(self.linear(x)).sin()
    return self.last.cos()


@linear
def first(self, x: Tensor) -> Tensor:
    """Compares itself with what it reaches."""
    x = x + torch.tanh(self.linear(x)).sin()
    return x * 2 if self.all[0] is self else x


def _with_the_same_list(blocks: nn.ModuleList) -> None:
    same: list[nn.Module] = [blocks[0]]
    for block in blocks:
        block.all = same


@linear
def giving(self, x: Tensor) -> Any:
    """Gives a parameter of its own beside what it computes."""
    return x + torch.tanh(self.linear(x)).sin(), self.linear.weight


class GivingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, weight = block(x)
            x = x @ weight
        return x


@linear
def marking(self, x: Tensor) -> Tensor:
    """Leaves a number on what it computes."""
    x = x + torch.tanh(self.linear(x)).sin() * getattr(x, "depth", 1)
    x.depth = 2
    return x


@linear
def parented(self, x: Tensor) -> Tensor:
    """Compares itself with a module that it reaches through what holds it."""
    x = x + torch.tanh(self.linear(x)).sin()
    return x * 2 if self.parent[0].blocks[1] is self else x


PARENT: list[nn.Module] = []


def _parented() -> Stack:
    stack = Stack(parented)
    PARENT[:] = [stack]
    for block in stack.blocks:
        block.parent = PARENT
    return stack


@linear
def listed(self, x: Tensor) -> Tensor:
    x = x + torch.tanh(self.linear(x)).sin()
    return x * 2 if PARENT[0] is self else x


class ListedStack(Stack):
    """Calls what is in a global list."""

    def forward(self, x: Tensor) -> Tensor:
        for block in PARENT:
            x = block(x)
        return x


def _listed() -> Stack:
    stack = ListedStack(listed)
    PARENT[:] = [*stack.blocks]
    return stack


class LabelledStack(Stack):
    """Calls the keys of a global dictionary, which look themselves up in it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in LABELS:
            x = block(x)
        return x


def _labelled() -> Stack:
    LABELS.clear()
    return LabelledStack(GloballyLabelled)


KEPT: dict[str, list[Tensor]] = {}


@linear
def leaving(self, x: Tensor) -> Tensor:
    """Leaves what it computes in a list that code around it has put outside."""
    x = x + torch.tanh(self.linear(x)).sin()
    KEPT["all"].append(x)
    return x


class LeavingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        KEPT["all"] = []
        return super().forward(x) + torch.stack(KEPT["all"]).sum(0)


@linear
def leaving_globally(self, x: Tensor) -> Tensor:
    x = x + torch.tanh(self.linear(x)).sin()
    LEFT.append(x)
    return x


LEFT: list[Tensor] = []


class GloballyLeavingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        global LEFT
        LEFT = []
        return super().forward(x) + torch.stack(LEFT).sum(0)


CONFIGURATIONS = [SimpleNamespace(power=float(i)) for i in range(4)]


@network(lambda index: {"linear": nn.Linear(WIDTH, WIDTH), "config": CONFIGURATIONS[index]})
def configured(self, x: Tensor) -> Tensor:
    return x + torch.tanh(self.linear(x)).sin() * self.config.power


class ConfiguredStack(Stack):
    """Has read all that the blocks read before, from a global list."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * sum(config.power for config in CONFIGURATIONS))


@linear
def cast(self, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.linear(torch.tanh(x).sin())
    return x + hidden.float()


class CountedOutside(Stack):
    """Changes between two calls what the blocks read."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            COUNTED["calls"] += 1
            x = block(x)
        return x


@linear
def reading(self, x: Tensor) -> Tensor:
    return x + torch.tanh(self.linear(x)).sin() * COUNTED["calls"]


UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "lambda": lambda: Stack(with_lambda),
    "by class": lambda: Stack(Labelled),
    "by global": lambda: Stack(GloballyLabelled),
    "counted": lambda: Stack(counted),
    "drawn": lambda: Stack(drawing),
    "remembered": lambda: Stack(remembering),
    "itself": edited(_with_the_same_list, first),
    "giving": lambda: GivingStack(giving),
    "marking": lambda: Stack(marking),
    "left": lambda: LeavingStack(leaving),
    "left in a global": lambda: GloballyLeavingStack(leaving_globally),
    "by parent": _parented,
    "listed": _listed,
    "keys": _labelled,
    "configured": lambda: ConfiguredStack(configured),
    "autocast": lambda: Stack(cast),
    "changed between calls": lambda: CountedOutside(reading),
}


@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_what_depends_on_more_than_guards_is_traced_as_it_is(make, monkeypatch):
    monkeypatch.setitem(COUNTED, "calls", 0)
    torch.manual_seed(0)
    found = trace(make(), batch(), copies=True, monkeypatch=monkeypatch)
    assert found.copies == 0


LATER: dict[str, Callable[[Block], Any]] = {
    "number": lambda block: setattr(block, "scale", 0.25),
    "list": lambda block: block.flags.__setitem__(1, 5),
    "dropout": lambda block: setattr(block.drop, "p", 0.7),
    "epsilon": lambda block: setattr(block.norm, "eps", 1e-2),
    "mode": lambda block: block.eval(),
    "inner mode": lambda block: block.drop.eval(),
    "configuration": lambda block: setattr(block, "config", SimpleNamespace(power=3.0)),
    "patched": _patched,
    "hook": lambda block: block.register_forward_hook(lambda module, given, result: result * 2),
    "inner hook": lambda block: block.norm.register_forward_hook(lambda module, given, result: result * 2),
    "module": lambda block: setattr(block, "drop", nn.Identity()),
    "weight": lambda block: setattr(block.inner, "weight", nn.Parameter(torch.randn(2 * WIDTH, WIDTH))),
    "no bias": lambda block: setattr(block.inner, "bias", None),
}


def train_on_after(change: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a stack, change something, and fail where the next call is not that of the changed stack."""
    torch.manual_seed(0)
    module = Stack(Block)
    found = trace(module, batch(), copies=True, monkeypatch=monkeypatch)
    assert found.copies == 3
    change(module)
    with dynamo.capturing_for_plans():
        torch.manual_seed(5)
        result = found.call(batch())
    torch.manual_seed(5)
    assert torch.equal(result, module(batch()))


@pytest.mark.parametrize(("name", "index"), [*zip(LATER, itertools.cycle((0, 2, 3)), strict=False)])
def test_a_later_change_of_any_one_layer_is_seen(name, index, monkeypatch):
    train_on_after(lambda module: LATER[name](module.blocks[index]), monkeypatch)


def test_one_object_that_all_share_may_become_another(monkeypatch):
    monkeypatch.setitem(vars(SHARED), "power", SHARED.power)  # is put back
    train_on_after(lambda _: setattr(SHARED, "power", 3.0), monkeypatch)


def test_a_copy_that_turns_out_other_is_traced_after_all(monkeypatch):
    facts = module_traces._facts
    monkeypatch.setattr(module_traces, "_facts", lambda *given: (facts(*given), object()))
    module = Stack(Block)
    found = trace(module, batch(), copies=True, monkeypatch=monkeypatch)
    assert found.copies == 1
    torch.manual_seed(0)
    assert torch.equal(found.result, module(batch()))
    forward = Stack.forward.__code__
    assert forward in repeated_modules._traced_whole
    repeated_modules._traced_whole.discard(forward)


def test_blocks_repeat_where_what_differs_is_never_read(monkeypatch):
    found = both(lambda: Stack(Block, 5), batch(), monkeypatch=monkeypatch)
    assert found.copies == 4  # each has an index of its own
    make = edited(lambda blocks: setattr(blocks[2], "config", SimpleNamespace(power=2.0)))
    assert both(make, batch(), monkeypatch=monkeypatch).copies == 3
