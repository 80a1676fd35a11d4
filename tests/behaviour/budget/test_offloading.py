"""Values offloaded to the host's memory: the same bits, the predicted peak, and no more than the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate, remove_hiremate
from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.measuring import profiling
from hiremate_lightning.memory.allocator import LEAST_REST_BYTES
from hiremate_lightning.out_of_memory import InfeasibleBudgetError
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.records.costs import Link
from hiremate_lightning.testing import changed_thresholds, plans, session_of
from tests.exact import assert_same, network, recorded, take_steps
from tests.training import build

FAST, SLOW = Link(1e9, 1e9), Link(1.0, 1.0)  # bytes a millisecond
STEPS = 5


@pytest.fixture
def link(monkeypatch) -> Iterator[Callable[[Link], None]]:
    """Set the speed of copies that plans count with. All other times are estimates."""

    def tell(link: Link) -> None:
        monkeypatch.setattr("hiremate_lightning.measuring.profiling.measure_link", lambda device: link)

    with changed_thresholds(measures_times=False):
        yield tell


def wide(layers: int = 6) -> nn.Module:
    """A net whose activations are most of its memory."""
    torch.manual_seed(1)
    layer = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)]
    return nn.Sequential(*layer, nn.Linear(64, 1))


def rows(count: int = 2048) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def trained(
    module: nn.Module, batches: list[torch.Tensor], loss_of=lambda y: y.float().square().mean()
) -> tuple[list[torch.Tensor], list[int]]:
    """Train on the device; return all that must be equal, and the peak of each step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(11)
    same, peaks = [], []
    for batch in batches:
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = loss_of(module(batch))
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        same += [loss.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
    return [*same, *(t.detach().cpu() for t in module.state_dict().values()), torch.cuda.get_rng_state()], peaks


def offloading(steps: int = 3, layers: int = 6, **options: object) -> nn.Module:
    """Train a net whose plan may offload for some steps; return it."""
    module = hiremate(wide(layers).cuda(), **{"budget": "60%", "verbose": False, "offload": "auto", **options})
    trained(module, [rows().cuda()] * steps)
    return module


def check_peak(plan: Plan, peak: int) -> None:
    above = peak - plan.planned_peak_bytes
    assert peak <= plan.budget_bytes
    assert -0.01 * peak <= above <= LEAST_REST_BYTES, f"measured {peak:,}, predicted {plan.planned_peak_bytes:,}"


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "unet", "resnet"])
def test_training_with_offloaded_values_is_plain_training(link, name):
    link(FAST)
    found = {}
    for offload in ("off", "auto"):
        model = build(name)
        module = hiremate(model.module.cuda(), "70%", verbose=False, offload=offload)
        batches = [model.make_batch(index)[0].cuda() for index in range(STEPS)]
        found[offload], peaks = trained(module, batches, model.loss_of)
        plan = get_plan(module)
        check_peak(plan, peaks[-1])
        assert bool(plan.solution.offloads) == (offload == "auto")
        remove_hiremate(module)
    assert_same(found["off"], found["auto"])


@pytest.mark.gpu
def test_on_a_slow_link_the_plan_is_the_one_without(link):
    link(SLOW)
    without, allowed = (get_plan(offloading(offload=offload)).schedule for offload in ("off", "always allowed"))
    assert without == allowed


@pytest.mark.gpu
def test_sizes_that_vary_train_bit_for_bit_with_offloaded_values(link):
    link(FAST)
    found = []
    for offload in ("off", "auto"):
        module = hiremate(wide().cuda(), "60%", verbose=False, offload=offload)
        batches = [rows(count).cuda() for count in (2048, 1024, 2048, 1024, 2048, 512, 1024, 2048, 2048)]
        same, peaks = trained(module, batches)
        found.append(same)
        largest = max(plans(module), key=lambda plan: plan.unplanned_peak_bytes)
        check_peak(largest, peaks[-1])
    assert any(plan.solution.offloads for plan in plans(module))
    assert_same(*found)


@pytest.mark.gpu
def test_a_budget_that_is_impossible_otherwise_is_kept(link):
    link(FAST)

    def smallest_bytes(offload: str) -> int:
        with pytest.raises(InfeasibleBudgetError) as error:
            trained(hiremate(wide().cuda(), "1 MiB", verbose=False, offload=offload), [rows().cuda()] * 10)
        size_bytes = error.value.smallest_bytes
        del error  # it holds the model
        gc.collect()
        return size_bytes

    alone, offloaded = smallest_bytes("off"), smallest_bytes("auto")
    assert offloaded < alone
    module = hiremate(wide().cuda(), offloaded, verbose=False, offload="auto")
    _, peaks = trained(module, [rows().cuda()] * STEPS)
    check_peak(get_plan(module), peaks[-1])
    assert get_plan(module).solution.offloads


@pytest.mark.gpu
def test_several_calls_offload_what_is_their_own(link):
    link(FAST)

    @network(lambda: {"one": wide(), "two": wide()})
    def two(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one[:-1](x)
        torch._dynamo.graph_break()
        return self.two(y)

    found = []
    for offload in ("off", "auto"):
        torch.manual_seed(3)
        module = hiremate(two().cuda(), "60%", verbose=False, offload=offload)
        same, peaks = trained(module, [rows().cuda()] * STEPS)
        found.append(same)
        check_peak(get_plan(module), peaks[-1])
    assert get_plan(module).solution.offloads
    assert_same(*found)


@pytest.mark.gpu
def test_no_more_of_the_host_is_taken_than_is_named(link):
    link(FAST)
    module = offloading(STEPS, layers=12, budget="50%", offload="always allowed", host_budget="3 MiB")
    memory = session_of(module).model.offloading.memory
    assert 0 < memory.size_bytes <= 3 * 2**20


@pytest.mark.gpu
def test_a_host_with_less_memory_than_named_warns(link):
    link(FAST)
    with pytest.warns(HiRemateWarning, match=r"has too little memory free for host_budget=1000 TiB: plans offload at"):
        module = offloading(host_budget="1000 TiB")
    assert get_plan(module).solution.offloads


@pytest.mark.gpu
def test_what_no_margin_helps_is_planned_with_all_on_the_device(link):
    """Copies leave the allocator other gaps: a plan without them may fit where one with them was measured above."""
    link(FAST)
    module = offloading(steps=4)
    life = session_of(module)
    ((kind, plan),) = life.plans.items()
    assert plan.solution.offloads
    kind = life.model.history.get_or_make(kind)
    resident = kind.recorded.resident
    life.planned.peak_measured(kind, 2 * plan.budget_bytes, resident)
    stays = get_plan(module)
    assert not stays.solution.offloads
    assert stays.planned_peak_bytes <= stays.budget_bytes
    _, peaks = trained(module, [rows().cuda()] * 3)
    check_peak(get_plan(module), peaks[-1])
    assert not get_plan(module).solution.offloads
    with pytest.warns(HiRemateWarning, match="no plan leaves that margin: the plan stays"):
        life.planned.peak_measured(kind, 2 * plan.budget_bytes, kind.recorded.resident)


@pytest.mark.gpu
def test_the_summary_says_what_is_offloaded_and_what_that_costs(link):
    link(FAST)
    assert "in the host's memory meanwhile, waits for copies +0." in get_plan(offloading()).summary()


@pytest.mark.gpu
def test_the_link_is_measured_and_kept_with_other_costs(tmp_path):
    found, again = (get_plan(offloading(cache_dir=tmp_path)).profile.link for _ in range(2))
    assert found is not None
    assert min(found.out_bytes_per_ms, found.in_bytes_per_ms) > 0
    assert again == found
    assert profiling.measure_link(torch.device("cuda")).latency_ms >= 0


@pytest.mark.gpu
def test_graphs_that_wait_for_a_later_backward_keep_their_values(link):
    link(FAST)
    module, before = offloading(steps=0), None
    with recorded() as warned:
        for _ in range(6):
            loss = module(rows().cuda()).square().mean()
            if before is not None:
                before.backward()
            before = loss
    assert any("graphs wait for a backward" in text for text in warned)


# ---------------------------------------------------------------- on a CPU


def test_on_a_cpu_it_does_nothing_and_says_so_once():
    module = hiremate(wide(), "60%", verbose=False, offload="auto")
    with recorded() as warned:
        plan = take_steps(module, lambda _: rows(256), 3, clears="end")
    assert ["offload='auto' does nothing here: the model is on cpu" in text for text in warned] == [True]
    assert plan.solution.offloads == ()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "yes"}, "offload must be 'off', 'auto' or 'always allowed', found 'yes'"),
        ({"host_budget": "50%"}, 'host_budget must be bytes such as "64 GiB", or "auto"'),
    ],
)
def test_options_that_can_not_be_read_are_refused_by_name(options, text):
    with pytest.raises(ConfigurationError, match=text):
        hiremate(wide(), "1 GiB", verbose=False, **options)
