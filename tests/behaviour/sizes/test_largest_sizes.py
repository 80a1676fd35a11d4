"""Sizes that a user names: a step of the largest ones is planned before it comes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hiremate_lightning import ConfigurationError, InfeasibleBudgetError, get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.planning.headroom import GUARD_BYTES
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.testing import captured_count, session_of
from tests.exact import recorded

WIDTH, ROWS, SHORT, LONG = 24, 2, 40, 3200
NAMED = {"words": {1: (1, LONG)}}

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler.config, "dynamic_values"), reason="this torch has symbols from a second size on only"
)


class Reader(nn.Module):
    """A chain of layers over a sequence of words, in two graphs where it is to break between them."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks, self.table, self.head = breaks, nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7)
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = _through(self.first, self.table(words) * mask.unsqueeze(-1))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(_through(self.second, x))


def _through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = nn.functional.gelu(layer(x - x.mean(1, keepdim=True)))
    return x


def batch_of(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(7, (ROWS, length), generator=generator)
    return {"words": words, "mask": (words > 0).float()}


def train(model: nn.Module, *lengths: int) -> list[torch.Tensor]:
    """Do one step for each length; list the losses and the gradients."""
    found = []
    for index, length in enumerate(lengths):
        model.zero_grad()
        loss = model(**batch_of(length, index)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    gc.collect()
    return found


def reader(budget="75%", breaks: bool = False, kind: type[Reader] = Reader, **options) -> Reader:
    torch.manual_seed(1)
    model, asked = kind(breaks), {"verbose": False, "sizes": NAMED, "verify": "off", **options}
    return model if budget is None else hiremate(model, budget, **asked)


@pytest.mark.parametrize("breaks", [False, True], ids=["one_graph", "after_a_break"])
def test_the_first_step_of_the_largest_size_has_its_own_plan(breaks: bool):
    model = reader(breaks=breaks)
    found = train(model, SHORT, SHORT + 1)
    captured = captured_count(model)
    ahead = max(session_of(model).plans.values(), key=lambda plan: plan.unplanned_peak_bytes)
    assert ahead.solution.recompute_ms > 0

    found += train(model, LONG, LONG)

    assert captured_count(model) == captured
    plan = get_plan(model)
    assert plan.solution is ahead.solution
    assert plan.planned_peak_bytes - GUARD_BYTES < plan.measured.peak_bytes <= plan.budget_bytes
    plain = reader(None, breaks=breaks)
    expected = train(plain, SHORT, SHORT + 1) + train(plain, LONG, LONG)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_shares_are_of_the_largest_size():
    model = reader()
    train(model, SHORT, SHORT)
    assert get_plan(model).solution.recompute_ms == 0
    assert get_plan(model).budget_bytes > get_plan(model).unplanned_peak_bytes


def test_a_budget_too_small_for_the_largest_size_is_refused():
    train(reader("1 MiB", sizes=None), SHORT, SHORT)

    with pytest.raises(InfeasibleBudgetError, match="too small for Reader") as caught:
        train(reader("1 MiB"), *[SHORT] * 12)
    assert "for the largest sizes: dimension 1 of words is 3200" in "".join(
        [str(caught.value), *caught.value.__notes__]
    )

    train(reader(caught.value.smallest_bytes), SHORT, SHORT, LONG)


def test_a_mark_on_a_tensor_names_its_sizes():
    model, batch = reader(sizes=None), batch_of(SHORT)
    torch._dynamo.mark_dynamic(batch["words"], 1, min=1, max=LONG)
    model(**batch).square().mean().backward()
    assert captured_count(model) == 2


def test_a_mark_names_sizes_for_the_backend():
    """It asks for marks in the place of names."""
    torch.manual_seed(1)
    model = Reader()
    call = torch.compile(model, backend="hiremate", options={"budget": "75%", "verbose": False, "time_limit_s": 7})
    for seed in range(2):
        batch = batch_of(SHORT, seed)
        torch._dynamo.mark_dynamic(batch["words"], 1, min=2, max=LONG)
        torch._dynamo.mark_dynamic(batch["mask"], 1, min=2, max=LONG)
        call(**batch).square().mean().backward()
        model.zero_grad()
    from hiremate_lightning.targets.compiled import sessions

    plans = [session.plans for session, _ in sessions() if session.options.time_limit_s == 7]
    assert [len(own) for own in plans] == [2]
    with pytest.raises(Exception, match=r"Mark the tensors instead, before the first call: torch._dynamo.mark_dynamic"):
        torch.compile(Reader(), backend="hiremate", options={"sizes": NAMED})(**batch_of(SHORT))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"words": (1, 4)}, r"must be like .*Found \(1, 4\)"),
        ([("words", 1)], "must be like"),
        ({"words": {1: 4}}, "Found 'words': {1: 4}"),
        ({"words": {"length": (1, 4)}}, "Found 'words': {'length'"),
        ({"words": {1: (1, True)}}, "must be like"),
        ({"words": {1: (5, 4)}}, "found 5 to 4 for dimension 1 of words"),
        ({"words": {1: (0, 4)}}, "at least 1"),
    ],
)
def test_sizes_that_are_no_ranges_are_refused(sizes, words: str):
    with pytest.raises(ConfigurationError, match=f"sizes .*{words}"):
        make_options("1 GiB", sizes=sizes)


@pytest.mark.parametrize(
    ("sizes", "steps", "words"),
    [
        ({"word": {1: (1, LONG)}}, 2, r"names 'word', and no .* Did you mean 'words'\? Found: words \(2, 40"),
        ({"words": {2: (1, LONG)}}, 1, r"dimension 2 of words, which has 2 dimensions.*\(2, 40\)"),
    ],
    ids=["argument", "dimension"],
)
def test_an_argument_or_dimension_that_no_call_has_is_refused(sizes, steps, words):
    with pytest.raises(ConfigurationError, match=words):
        train(reader(sizes=sizes), *[SHORT] * steps)


def test_a_size_beyond_those_named_is_announced_once():
    model = reader(sizes={"words": {1: (1, SHORT)}})
    with recorded() as warned:
        train(model, SHORT + 8, SHORT + 8)
    (text,) = warned
    assert "The size 48 of dimension 1 of words is not among those named, 1 to 40" in text


class Fixed(Reader):
    """Computes with its length as a number."""

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(words, mask) * float(f"{words.shape[1]}")


@pytest.mark.parametrize(
    ("kind", "budget", "length", "words"),
    [
        (Fixed, "75%", SHORT, "can't be planned ahead (dimension 1 of words)"),
        (Reader, "1 GiB", ROWS, "Two dimensions of a batch have the size 2"),
    ],
    ids=["fixed in captured code", "not told apart"],
)
def test_a_size_that_can_not_be_planned_ahead_is_announced(kind, budget, length, words):
    model = reader(budget, kind=kind)
    with recorded() as warned:
        train(model, length, length)
    assert any(words in text for text in warned)
    assert len(session_of(model).plans) == 1


class OfBatches(Reader):
    """Is given one dictionary."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch["words"], batch["mask"])


def test_keys_of_a_batch_are_names():
    """The callback takes sizes too."""
    model = reader(kind=OfBatches)
    model(batch_of(SHORT)).square().mean().backward()
    assert captured_count(model) == 2
    (named,) = HiRemateCallback("1 GiB", sizes=NAMED).options.sizes
    assert (named.argument, named.dimension, named.least, named.most) == ("words", 1, 1, LONG)
