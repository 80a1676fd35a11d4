"""Where sizes vary, code is captured once more, with symbols for them, and traced for each size that comes."""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate, remove_hiremate
from hiremate_lightning.capturing import backend
from hiremate_lightning.testing import captured_count, plans, session_of
from tests.exact import captured_graphs, network, recorded, simple_loop, train_both
from tests.faults import change_captures

WIDTH = 24
BLOCK = 8  # of rows

pytestmark = pytest.mark.usefixtures("_captures_all", "without_made_code")


@pytest.fixture
def captures(planning_log) -> Callable[[], list[str]]:
    """List the code that Dynamo has captured."""
    return lambda: planning_log.of("capturing")


@pytest.fixture
def traced(planning_log) -> Callable[[], list[tuple[int, ...]]]:
    """List the sizes for which code was traced."""
    return lambda: [ast.literal_eval(sizes) for sizes in planning_log.of("tracing for the sizes")]


@network(
    lambda: {
        "positions": nn.Parameter(torch.randn(64, WIDTH)),
        "attention": nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
        "rest": nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, WIDTH)),
        "norm": nn.BatchNorm1d(WIDTH),
    }
)
def mixing(self, x: torch.Tensor) -> torch.Tensor:
    """Attention over a length that varies, dropout, batch norm, and a slice of a table of positions."""
    x = x + self.positions[: x.shape[1]]
    x = x + self.attention(x, x, x, need_weights=False)[0]
    return self.norm(self.rest(x).transpose(1, 2))


def small() -> nn.Module:
    """Make a network of one length, which is captured in a tenth of the time."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))


def batches(lengths: list[int], rows: list[int] | None = None) -> Callable[[int], torch.Tensor]:
    """Make a batch per step, of a length and a number of rows."""
    return lambda step: torch.randn((rows or [8] * len(lengths))[step], lengths[step], WIDTH)


@pytest.mark.parametrize(
    ("lengths", "rows", "count"),
    [([16, 12, 9, 17, 12, 30, 9], None, 3), ([16, 5, 1, 2, 16, 3, 1], [8, 4, 2, 3, 8, 1, 5], 5)],
)
def test_training_is_exact_at_each_size(lengths, rows, count, captures, traced):
    train_both(mixing, simple_loop(batches(lengths, rows), steps=7), "200 KiB", time_limit_s=1.0)
    assert len(captures()) == count, (
        "two sizes as they are, then with a symbol for each that was seen to vary; 1 has none"
    )
    assert traced()
    assert len(traced()) == len(set(traced()))


def test_sizes_seen_with_one_model_are_forgotten_with_it(planning_log, captures, traced):
    for _ in range(2):
        planning_log.texts.clear()
        model = hiremate(nn.Linear(8, 8), "1 MiB", verbose=False)
        for rows in (16, 17):
            model(torch.randn(rows, 8)).sum().backward()
        session = session_of(model)
        assert (len(captures()), session.captured_count) == (2, 2)
        assert not traced(), "two sizes are captured as they are"
        remove_hiremate(model)


@pytest.mark.filterwarnings("ignore:torch.compile captured code again")
def test_traces_of_sizes_that_come_no_more_are_dropped(change_thresholds, traced):
    change_thresholds(size_traces=2)
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 7, 7]
    model = hiremate(small(), "100 MiB", verbose=False)
    plain = small()
    plain.load_state_dict(model.state_dict())
    for step, length in enumerate(lengths):
        x = torch.randn(4, length, WIDTH)
        for module in (plain, model):
            torch.manual_seed(step)
            module(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    gc.collect()
    assert captured_count(model) == 9
    assert len(traced()) == 7, "7 came again when it had been dropped"
    most = 2 + 2 + len(plans(model))  # the first two, the last two, and those with a plan
    assert len(captured_graphs(model)) <= most
    remove_hiremate(model)


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "count": 1})
def counting(self, x: torch.Tensor) -> torch.Tensor:
    """Uses a number that changes at each step, which no size depends on, beside sizes that vary."""
    self.count += 1
    return self.linear(x) * self.count


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "rows": 1})
def first(self, x: torch.Tensor) -> torch.Tensor:
    """Looks at the given number of rows."""
    self.rows += 1
    return self.linear(x[:, : self.rows]).relu()


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def adding(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Overwrites its first input, which may overlap with the second."""
    x.mul_(2)
    return self.linear(x + y)


@network(lambda: {"adding": adding()})
def overlapping(self, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
    """Calls a module with tensors that overlap in one step and don't in the next."""
    x, overlap = batch
    rows = len(x) // 2
    return self.adding(x[:rows], x[1 : rows + 1] if overlap else x[rows : 2 * rows])


def test_inputs_that_overlap_are_traced_as_such():
    rows, overlap = [8, 10, 12, 12, 14, 12, 14], [False, False, True, False, False, True, True]

    loop = simple_loop(lambda step: (torch.randn(rows[step], WIDTH), overlap[step]), steps=7)
    train_both(overlapping, loop, "1 MiB", target="adding")


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def rooted(self, x: torch.Tensor) -> torch.Tensor:
    """Computes with a number that Dynamo has no symbols for."""
    for _ in range(x.shape[1] // 4):
        x = self.linear(x) / len(str(x.shape[1])) ** 0.5
    return x


@network(lambda: {"layer": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))})
def zooming(self, x: torch.Tensor) -> torch.Tensor:
    """A picture beside its half, interpolated. The batch norm counts its calls, which is a change in place."""
    x = self.layer(x)
    halved = nn.functional.max_pool2d(x, 2)
    return torch.cat([x, nn.functional.interpolate(halved, scale_factor=2, mode="bilinear")], 1)


def test_interpolated_images_keep_symbolic_sizes(captures, traced):
    model = hiremate(zooming(), "100%", verbose=False)
    for height, width in ((8, 16), (12, 24), (16, 12), (20, 8)):
        model(torch.randn(2, 3, height, width)).sum().backward()
    graphs = captured_graphs(model)
    assert (len(graphs), len(captures()), len(traced())) == (4, 3, 2)
    assert [graphs[0].graph.difference(other.graph) for other in graphs] == [None] * 4


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def in_blocks(self, x: torch.Tensor) -> torch.Tensor:
    """Goes through rows in blocks, and counts where they end."""
    x = x.flatten(0, 1)
    starts, rows = range(0, len(x), BLOCK), torch.empty_like(x)
    for start in starts:
        end = min(start + BLOCK, starts.stop)
        rows[start:end] = self.linear(x[start:end]).relu()
    return rows * starts.stop


@network(lambda: {"first": nn.Linear(WIDTH, WIDTH), "heads": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))})
def numbered(self, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Ends with the layer of a given number."""
    x, number = batch
    return self.heads[number](self.first(x).relu())


def test_what_symbols_can_not_capture_is_captured_once_without(monkeypatch):
    failed = []

    def fail(module, inputs):
        if any(isinstance(value, torch.SymInt) for value in inputs):
            failed.append(inputs)
            raise AssertionError("no symbols")
        return []

    monkeypatch.setattr(backend, "sizes_among", fail)
    train_both(mixing, simple_loop(batches([8, 9, 10, 11]), steps=4), "1 MiB")  # where a warning would be an error
    assert len(failed) == 1


def test_what_is_not_traced_for_a_size_runs_eager_and_says_so(monkeypatch):
    def fail_at_ten_rows(graph, capture):
        values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        if any(10 in value.shape for value in values if isinstance(value, torch.Tensor)):
            raise AssertionError("ten rows")
        return capture()

    change_captures(monkeypatch, fail_at_ten_rows)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(), nn.Linear(WIDTH, 1))
    model = hiremate(copy.deepcopy(plain), "1 MiB", verbose=False)
    texts = []
    for step, rows in enumerate((8, 9, 11, 10, 12, 10)):
        x = torch.randn(rows, WIDTH)
        with recorded() as warned:
            for module in (plain, model):
                torch.manual_seed(step)
                module(x).sum().backward()
        texts.append(warned)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    at_ten = texts.pop(3)
    assert at_ten[0] == (
        "torch.compile could not capture a part of Sequential, which runs without a plan: AssertionError: ten rows"
    )
    assert not any(texts), "one warning, and only once"
    remove_hiremate(model)


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def weighing(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Computes a weight of boxes, of which there is another number in each step, beside what is trained."""
    x, boxes = batch
    torch._dynamo.graph_break()
    weight = boxes.prod(dim=1).sort().values.cumsum(0).mean()
    torch._dynamo.graph_break()
    return self.linear(x) * weight


@network(
    lambda: {
        "layers": nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64)) for _ in range(4)),
            nn.Linear(64, 1),
        )
    }
)
def choosing(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Adds the mean of some of its results, of another number in each step: little beside what made them."""
    x, chosen = batch
    results = self.layers(x)
    torch._dynamo.graph_break()
    return results + nn.functional.dropout(results[chosen], 0.1).exp().mean()


SIZES, COUNTS = [16, 12, 9, 8, 7, 6, 5, 4, 3, 10], [7, 8, 9, 10, 11, 12, 13, 5, 6, 4]
CODE = {  # model, batches, steps and budget; how often it is captured and for which sizes traced, where that counts
    "a number that is no size": (counting, batches([6, 7, 8, 9, 8, 9, 8]), 7, "1 MiB", None, [(8,), (9,)]),
    "a number that makes a size": (first, batches([9] * 7), 7, "1 MiB", None, 6),  # a symbol from its second value on
    "a number as text": (rooted, batches([6, 9, 12, 14, 9, 11]), 6, "1 MiB", None, None),
    # Sizes of two blocks are of one capture, from the third size on; one of three blocks is of another.
    "blocks": (in_blocks, batches([5, 6, 7, 6, 8, 7, 9], [2] * 7), 7, "1 MiB", 4, [(7,), (8,), (9,)]),
    "a number that picks a module": (numbered, lambda i: (torch.randn(8, WIDTH), i % 3), 7, "1 MiB", None, None),
    "no gradients": (weighing, lambda i: (torch.randn(8, WIDTH), torch.rand(3 + i, 4)), 6, "1 MiB", None, []),
    "a third size that comes again": (small, batches([16, 17, 18, 19, 18]), 5, "1 MiB", 3, [(18,), (19,)]),
    "sizes that do not repeat": (small, batches(SIZES), 10, "1 GiB", None, [(size,) for size in SIZES[2:]]),
    "a small part": (
        choosing,
        lambda i: (torch.randn(512, 64), torch.randint(0, 512, (COUNTS[i],))),
        *(10, "60%", None, [(count,) for count in COUNTS[2:]]),
    ),
}


@pytest.mark.parametrize(("make", "make_batch", "steps", "budget", "count", "sizes"), CODE.values(), ids=CODE)
def test_code_is_captured_and_traced_as_seldom_as_possible(
    make, make_batch, steps, budget, count, sizes, captures, traced
):
    plan = train_both(make, simple_loop(make_batch, steps=steps), budget, time_limit_s=1.0)
    assert len(captures()) == count or (count is None and captures())
    assert sizes is None or (len(traced()) if isinstance(sizes, int) else traced()) == sizes
    assert plan.planned_peak_bytes < plan.budget_bytes
