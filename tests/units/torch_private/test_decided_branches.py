"""Branches on tensors that are computed from sizes, or from integers, are decided while the code is traced."""

from __future__ import annotations

import operator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hiremate_lightning.torch_private import dynamo
from tests.exact import network


class Counted:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@contextmanager
def capturing(function, backend, *, fullgraph=False, **options):
    """Give a function that is captured as for plans."""
    with dynamo.capturing_for_plans(**options):
        yield torch.compile(function, backend=backend, fullgraph=fullgraph)
    torch.compiler.reset()


def graphs_of(function, *calls, sizes_vary=False, **options):
    """Call a function captured and as it is, with each of some inputs; return how many graphs were captured."""
    backend = Counted()
    with capturing(function, backend, sizes_vary=sizes_vary, **options) as captured:
        for inputs in calls:
            assert torch.equal(captured(*inputs), function(*inputs))
    return backend.graphs


def positions_of(x):
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(x.shape[0], -1)


def has_gaps(positions):
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)[:, -1]


def asks_for_gaps(x):
    return x.sin() if (has_gaps(positions_of(x)) == 0).all() else x.cos()


def asks_whether_not(x):
    if not (positions_of(x) > 2).any():
        return x.sin()
    return x.cos() if not_short(x) else x


def not_short(x):
    return not (positions_of(x).max() < 7)


def asks_for_a_number(x):
    return x * positions_of(x).max().item() + sum(positions_of(x)[0, :3].tolist())


def asserts(x):
    assert (positions_of(x) >= 0).all(), "positions begin at 0"
    return x.sin()


def names_devices_and_other_things(x):
    rows, columns = torch.meshgrid(torch.arange(3, device="cpu"), torch.arange(3).to("cpu"), indexing="ij")
    return x.sin() if ((rows - columns).clamp(min=0) == 0).any() else x.cos()


@pytest.mark.parametrize(
    "function", [asks_for_gaps, asks_whether_not, asks_for_a_number, asserts, names_devices_and_other_things]
)
def test_a_branch_on_a_constant_tensor_does_not_break_the_graph(function):
    assert graphs_of(function, [torch.ones(2, 5)], [torch.ones(2, 9)]) == 2  # one for each size


@pytest.mark.parametrize("function", [asks_for_gaps, asserts])
def test_one_graph_serves_all_sizes_of_one_decision(function):
    sizes = [torch.ones(2, length) for length in (5, 9, 12, 17)]
    assert graphs_of(function, *([x] for x in sizes), sizes_vary=True) <= 2


def test_a_size_of_another_decision_is_captured_again():
    def is_long(x):
        return x.sin() if positions_of(x).max() > 10 else x.cos()

    sizes = [torch.ones(2, length) for length in (5, 6, 7, 8, 20, 21, 9, 22, 4)]
    assert graphs_of(is_long, *([x] for x in sizes), sizes_vary=True) <= 3


def test_a_number_read_at_one_size_is_not_used_at_another():
    sizes = [torch.ones(2, length) for length in (5, 6, 7, 8, 20, 5)]
    graphs_of(asks_for_a_number, *([x] for x in sizes), sizes_vary=True)


def changes_in_place(x):
    positions = positions_of(x).clone()
    positions[:, 0] = x.long()[:, 0]
    return x.sin() if (positions == 0).all() else x.cos()


def changes_a_view(x):
    positions = positions_of(x).clone()
    positions.view(-1).add_(x.long().view(-1))
    return x.sin() if (positions == 0).all() else x.cos()


def draws(x):
    return x.sin() if torch.randint(0, 5, (3,)).sum() > 50 else x.cos()


@pytest.mark.parametrize("function", [changes_in_place, changes_a_view, draws])
def test_branches_on_inputs_or_random_numbers_are_read_each_call(function):
    graphs_of(function, [torch.zeros(2, 1)], [torch.ones(2, 1)], [torch.zeros(2, 1)])


@torch.library.custom_op("hiremate_branches::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(5)


@bump.register_fake
def _(x: torch.Tensor) -> None: ...


def add_five(x):
    return x.add_(5).clone()


torch.compiler.allow_in_graph(add_five)


def add_five_checkpointed(x):
    checkpoint(add_five_to, x, use_reentrant=False)


def add_five_to(x):
    x.add_(5)
    return x * 1.0


CHANGES = {
    "an operator of aten": lambda x: torch.ops.aten.add_.Tensor(x, 5),
    "an operator of a user": bump,
    "a view given to an operator of a user": lambda x: bump(x[1:]),
    "a function that Dynamo does not look into": add_five,
    "a function with inplace=True": lambda x: F.relu(x, inplace=True),
    "a function with True for inplace": lambda x: F.relu(x, True),
    "a module with inplace=True": nn.ReLU(inplace=True),
    "a method of an array": lambda x: x.numpy().fill(9),
    "an operator on an array": lambda x: operator.iadd(x.numpy(), 9),
    "checkpointed code": add_five_checkpointed,
    "an operation on a list": lambda x: torch._foreach_add_([x], 5),
    "out=": lambda x: torch.add(x, 5, out=x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_constant_is_not_taken_for_what_it_was(change):
    def branches(x):
        positions = torch.arange(-3, 0)
        change(positions)
        return x.sin() if (positions >= 0).any() else x.cos()

    graphs_of(branches, [torch.ones(2)])


def test_sizes_at_which_a_constant_cannot_be_computed_are_traced():
    def looks_up(x):
        if x.shape[1] < 7:
            return x.sin() if torch.arange(7)[x.shape[1]] > 3 else x.cos()
        return x.tan()

    graphs_of(looks_up, *([torch.ones(2, length)] for length in (5, 6, 4, 9, 2, 1)), sizes_vary=True)


def test_no_guard_computes_what_is_too_large(change_thresholds):
    def has_far(x):
        positions = torch.arange(x.shape[1])
        return x.sin() if (positions[:, None] - positions > 2).any() else x.cos()

    change_thresholds(decided_values=100)
    assert graphs_of(has_far, *([torch.ones(2, length)] for length in (5, 6, 9, 8)), sizes_vary=True) == 2
    assert graphs_of(has_far, *([torch.ones(2, length)] for length in (5, 6, 50)), sizes_vary=True) == 4


def masks(*texts):
    """Return a batch and a mask for each text: "110" is one whose third token is padding."""
    return [[torch.ones(2, len(text)), torch.tensor([[int(c) for c in text]] * 2)] for text in texts]


def has_padding(x, mask):
    return x.sin() if mask.all() else x.cos() * mask


WAYS = {
    "all": has_padding,
    "a count of tokens": lambda x, mask: x.sin() if mask[:, : x.shape[1]].sum() == mask.numel() else x.cos(),
    "a truth value": lambda x, mask: x.sin() if (mask == 0).any().item() else x.cos(),
    "whether all are true": lambda x, mask: x.sin() if mask.bool()._is_all_true().item() else x.cos(),
    "a product": lambda x, mask: x.sin() if mask.prod() == 1 else x.cos(),
}


@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_a_branch_on_an_input_is_captured_for_each_way_it_goes(function):
    assert graphs_of(function, *masks("111", "111")) == 1
    assert graphs_of(function, *masks("110", "011", "111", "101", "111")) == 2


@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_both_ways_serve_all_sizes(function):
    batches = masks("11", "110", "1111", "1011", "11111", "01", "11", "110000", "111111")
    larger = masks("1111111", "0111111", "11111111", "11110000")
    options = {"sizes_vary": True, "vary": (2, 3), "fullgraph": True}  # a graph that breaks is an error
    few, many = (graphs_of(function, *calls, **options) for calls in (batches, [*batches, *larger]))
    assert few == many <= 5  # with numbers and with symbols for each way, and one more before PyTorch 2.13


def checks_with_a_message(x, mask):
    """What transformers' models of pictures and texts do: the message shows a tensor, then a size, and is dropped."""
    there = mask.sum()
    text = f"found {there}, expected {x.shape[1]:>3}"
    torch._check_tensor_all(there == mask.numel())
    return x if text is None else x.sin()


def test_a_check_of_integers_and_its_message_serve_all_sizes():
    options = {"sizes_vary": True, "vary": (2, 3), "fullgraph": True}
    assert graphs_of(checks_with_a_message, *masks("11", "111", "1111", "11111", "111111"), **options) <= 2


def test_a_message_that_shows_a_tensor_and_then_a_size_is_right():
    def function(x, mask):
        return x.sin(), f"found {mask.sum()}, expected {x.shape[1]:>3} of {x.shape[0]!r}"

    with capturing(function, "eager", sizes_vary=True) as captured:
        for x, mask in masks("11", "111", "1111", "11111"):
            assert captured(x, mask)[1] == function(x, mask)[1]


def test_what_changes_between_calls_is_seen():
    x, mask = torch.ones(2, 3), torch.ones(2, 3).long()
    with capturing(has_padding, Counted()) as captured:
        for value in (1, 1, 0, 1, 0):
            mask[0, 1] = value
            assert torch.equal(captured(x, mask), has_padding(x, mask))


def shifted(ids):
    """Shift tokens to the right, as models that translate do."""
    result, last = ids.clone(), (ids.ne(1).sum(dim=1) - 1).unsqueeze(-1)
    result[:, 0] = ids.gather(1, last).squeeze()
    result[:, 1:] = ids[:, :-1]
    return result


def filled(ids):
    result = torch.zeros_like(ids)
    result.view(-1)[1:].copy_(ids.view(-1)[1:])
    return result.masked_fill_(result == 3, 0).add_(1)


def shifted_input(ids):
    """As above, in a tensor that the code is called with; the caller finds it as it was."""
    before = ids.clone()
    result = shifted(ids.masked_fill_(ids == 4, 1)).clone()
    ids.copy_(before)
    return result


def read_before_it_changes(ids):
    result = ids.clone()
    sums = result.sum(1, keepdim=True)
    result.fill_(1)
    return sums


@pytest.mark.parametrize("make", [shifted, shifted_input, filled, read_before_it_changes])
def test_what_code_makes_and_changes_in_place_decides(make):
    def branches(x, ids):
        return x.sin() if (make(ids) == 1).any() else x.cos()

    tokens = [torch.tensor(rows) for rows in ([[3, 4, 5], [3, 4, 5]], [[0, 3, 4], [1, 0, 0]], [[3, 3, 3], [3, 3, 1]])]
    assert graphs_of(branches, *[[torch.ones(2), ids] for ids in (*tokens, *tokens)]) <= 2


def asks_of_a_pooled_mask(x, mask):
    pooled = F.max_pool1d(mask.float().unsqueeze(1), 2).squeeze(1)
    return x.sin() if pooled.to(torch.bool).all() and (pooled == 1.0).all() else x.cos()


def asks_of_a_filled_mask(x, mask):
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))
    return x.sin() if (bias == 0).all() else x.cos()


@pytest.mark.parametrize("function", [asks_of_a_pooled_mask, asks_of_a_filled_mask])
def test_a_mask_may_be_of_fractions(function):
    texts = ["1111", "0000", "1111", "0000"]
    assert graphs_of(function, *masks(*texts)) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: mask.float().sum() > 2,
        lambda mask: (mask.float() * 0.3 > 0.2).any(),
        lambda mask: torch.zeros(mask.shape).masked_fill(mask == 0, float("inf")).long().sum() > 2,
        lambda mask: torch.linspace(0, 1, 4).sum() > 2,
    ],
    ids=["sum", "product", "integers", "fractions"],
)
def test_what_devices_may_compute_otherwise_breaks_the_graph(read):
    assert graphs_of(lambda x, mask: x.sin() if read(mask) else x.cos(), *masks("1111")) == 2


@pytest.mark.parametrize("share", [lambda ids: ids, lambda ids: ids[:, 1:], lambda ids: ids.view(-1)])
def test_no_input_is_changed_to_decide_a_branch(share):
    def branches(x, ids):
        copy = ids.clone()
        share(ids).mul_(2)
        copy[:, 0] = ids[:, 1]
        return x.sin() if (copy > 4).any() else x.cos()

    with capturing(branches, Counted()) as captured:
        for number in (1, 3, 1, 2):
            ids, others = torch.full((2, 3), number), torch.full((2, 3), number)
            assert torch.equal(captured(torch.ones(2), ids), branches(torch.ones(2), others))
            assert torch.equal(ids, others)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("share", [lambda mask: mask, lambda mask: mask.view(-1), lambda mask: mask.detach()[1:]])
def test_an_input_that_is_changed_is_read_after_that(change, share):
    def branches(x, mask, other):
        change(other)
        return x.sin() if (mask >= 0).all() else x.cos()

    with capturing(branches, Counted()) as captured:
        for values in (-3, 3):
            results = []
            for function in (captured, branches):
                mask = torch.full((4,), values)
                results.append(function(torch.ones(2), mask, share(mask)))
            assert torch.equal(*results)


@network(lambda: {"is_ready": torch.tensor(0, dtype=torch.uint8), "scale": torch.ones(3)})
def initializing(self, x):
    """Normalizes by what it sees first, as flows do."""
    if not self.is_ready:
        self.scale.copy_(1 / x.std(0))
        self.is_ready.fill_(1)
    return x * self.scale


def test_a_flag_that_the_code_sets_is_read_as_it_was():
    modules, backend = (initializing(), initializing()), Counted()
    with capturing(modules[0], backend) as captured:
        for scale in (1.0, 2.0, 3.0):
            x = torch.randn(5, 3) * scale
            assert torch.equal(captured(x), modules[1](x))
    assert backend.graphs == 2


def test_what_code_raises_on_a_bad_input_is_its_own_error():
    def function(x, mask):
        if (mask < 0).any():
            raise ValueError("below 0")
        return x.sin()

    x, mask = torch.ones(2), torch.ones(3).long()
    with capturing(function, Counted()) as captured:
        for _ in range(2):
            assert torch.equal(captured(x, mask), x.sin())
            with pytest.raises(ValueError, match="below 0"):
                captured(x, -mask)


def asks_in_a_loop(x, mask):
    for column in range(mask.shape[1]):
        x = x.sin() if mask[:, column].all() else x.cos()
    return x


def asks_in_many_places(x, mask):
    x = x.sin() if mask[:, 0].all() else x.cos()
    x = x.sin() if mask[:, 1].all() else x.cos()
    x = x.sin() if mask[:, 2].all() else x.cos()
    x = x.sin() if mask[:, 3].all() else x.cos()
    return x.sin() if mask[:, 4].all() else x.cos()


@pytest.mark.parametrize("function", [asks_in_a_loop, asks_in_many_places])
def test_only_few_ways_through_code_are_captured(function):
    texts = [format(number, "05b") for number in range(32)]
    assert graphs_of(function, *masks(*texts[:4])) == 4
    assert graphs_of(function, *masks(*texts)) < len(texts)


def test_numbers_of_an_input_are_read_in_each_call():
    def branches(x, mask):
        return x * mask.sum().item() + sum(mask[0].tolist())

    assert graphs_of(branches, *masks("111", "110", "100")) > 1


def pads(x, sizes):
    """Pad rows to a size that is an input, and cut them at lengths that are one."""
    size, *lengths = sizes.tolist()
    padded = F.pad(x, (0, size - x.shape[1])).sin()
    return sum(row[:length].sum() for row, length in zip(padded, lengths, strict=True)) * sizes[0].item()


def sizes_of(*numbers):
    return [torch.ones(2, 3).cumsum(1), torch.tensor(numbers)]


def test_numbers_that_change_break_the_graph_from_then_on():
    """Code is captured once for the first numbers, and once more for all others; those that stay break nothing."""
    assert graphs_of(pads, *[sizes_of(5, 2, 3)] * 3) == 1
    shapes = [sizes_of(5, 2, 3), sizes_of(6, 2, 4), sizes_of(7, 1, 3), sizes_of(5, 2, 3), sizes_of(8, 4, 4)]
    backend = Counted()
    counts = []
    with capturing(lambda x, sizes: x.sin() * sizes[1].item(), backend) as captured:
        for x, sizes in shapes:
            assert torch.equal(captured(x, sizes), x.sin() * sizes[1].item())
            counts.append(backend.graphs)
    assert counts[:3] == [1, 1, 3]  # the second number is the same in the first two calls
    assert counts[3] == counts[4] == 4  # what follows the break, with a number that varies
    graphs_of(pads, *shapes)


def test_large_inputs_are_not_read_before_each_call(change_thresholds):
    def number(x, mask):
        return x * mask.sum().item()

    for size, graphs in ((65, 2), (64, 1)):
        assert graphs_of(number, *[[torch.ones(2), torch.ones(size, dtype=torch.long)]] * 2) == graphs
    change_thresholds(decided_values=5)
    assert graphs_of(has_padding, *masks("111")) > 1
    assert graphs_of(has_padding, *masks("11")) == 1


@network(lambda: {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
def layer(self, x, positions):
    x = self.two(self.one(x).sin())
    return x.sin() if (positions > 3).any() else x.cos()


@network(lambda: {"layers": nn.ModuleList(layer() for _ in range(6))})
def stack(self, x):
    for index, each in enumerate(self.layers):
        x = each(x, torch.arange(3) + index)
    return x


def test_equal_layers_are_decided_one_by_one():
    assert graphs_of(stack(), [torch.ones(2, 4)]) == 1


def test_numbers_that_code_counts_up_are_not_decided():
    def function(x, count):
        count.add_(1)
        return x.sin() * int(count)

    count = torch.zeros((), dtype=torch.long)
    backend, graphs = Counted(), []
    with capturing(function, backend) as captured:
        for number in range(1, 5):
            assert torch.equal(captured(torch.ones(3), count), torch.ones(3).sin() * number)
            graphs.append(backend.graphs)
    assert graphs[-1] <= graphs[0] + 1  # what follows the break takes the number as an input from its second value on
