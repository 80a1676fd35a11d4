"""Capture without memory: the same records as training, at sizes that no machine has."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.command_line.arguments import read_inputs
from hiremate_lightning.command_line.factory import Workload
from hiremate_lightning.command_line.offline import OfflineOptions, capture_offline
from hiremate_lightning.command_line.without_device import rates_of
from hiremate_lightning.errors import CaptureError, ConfigurationError
from hiremate_lightning.measuring.profiling import CostCache
from hiremate_lightning.records.costs import estimate, step_time_ms
from hiremate_lightning.records.graph_template import GraphTemplate
from hiremate_lightning.records.simulation import simulate_plain
from hiremate_lightning.records.sized_numbers import FittedLines
from hiremate_lightning.rewriting.replays import DRAW_MASK
from hiremate_lightning.torch_private import tensor_state
from tests.exact import captured_by, network

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mix(x)


@network(lambda: {"qkv": nn.Linear(32, 96)})
def attention(self, x, mask=None):
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


@network(lambda: {"before": Mixed(), "after": Mixed()})
def broken(self, x):
    x = self.before(x)
    torch._dynamo.graph_break()
    return self.after(x)


@network(lambda: {"layer": nn.Linear(4, 4)})
def choosy(self, x):
    return self.layer(x) if bool((x > 0).all()) else self.layer(-x)


def work(factory, inputs="64x16"):
    return Workload(factory, "factory", read_inputs(inputs))


def capture(factory, inputs="64x16", size=None, **options):
    return capture_offline(work(factory, inputs), OfflineOptions(**options), size)


def estimated(step):
    return step.estimated(rates_of(step.options.device))


def ops(step):
    return [node.op for node in estimated(step).graph.nodes]


def test_the_graph_is_that_of_training():
    training = captured_by(Mixed(), torch.zeros(64, 16)).graph
    offline = capture(Mixed).captured[0].graph

    assert [n.key for n in offline.nodes] == [n.key for n in training.nodes]
    assert offline.storages == training.storages
    assert [t.storage for t in offline.tensors] == [t.storage for t in training.tensors]
    assert {n.module for n in offline.nodes} >= {"mix.0", "mix.4"}


@pytest.mark.parametrize("zero_grad", ["before", "after-forward", "accumulate"])
def test_peaks_are_those_that_training_plans_with(zero_grad):
    class Scored(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    def make():
        return Scored(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))

    model, batch = make(), torch.zeros(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, budget="60%", optimizer=optimizer, verbose=False, time_limit_s=2)
    for _ in range(4):
        if zero_grad == "before":
            optimizer.zero_grad()
        loss = model(batch)
        if zero_grad == "after-forward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plan = get_plan(model)
    remove_hiremate(model)
    step = capture(make, "512x64", zero_grad=zero_grad)

    assert plan is not None
    assert step.resident_bytes == plan.resident_bytes
    assert estimated(step).plain_bytes == simulate_plain(plan.graph, estimate(plan.graph)).peak_bytes


def test_what_fits_no_machine_is_captured():
    step = capture(lambda: nn.Linear(1_000_000, 1_000_000), "1000000x1000000")

    assert dict(step.resident)["parameters"] == 4 * (10**12 + 10**6)
    assert estimated(step).plain_bytes > 4 * 10**12


def test_all_that_exists_before_the_step_is_resident():
    step = capture(Mixed, zero_grad="after-forward")

    sizes = dict(step.resident)
    weights = sum(4 * p.numel() for p in Mixed().parameters())
    scalars = 4 * len(list(Mixed().parameters()))
    assert sizes["parameters"] == weights
    assert sizes["buffers"] == 4 * (32 + 32) + 8
    assert sizes["optimizer state"] == 2 * weights + scalars
    assert sizes["batch"] == 4 * 64 * 16
    assert step.stale_bytes == weights
    assert step.resident_bytes == sum(sizes.values())


@pytest.mark.parametrize(("optimizer", "share"), [("SGD", 0), ("none", 0), ("Adagrad", 1)])
def test_the_state_of_the_named_optimizer_counts(optimizer, share):
    step = capture(lambda: nn.Linear(16, 16, bias=False), optimizer=optimizer)

    assert dict(step.resident)["optimizer state"] // (4 * 16 * 16) == share


def test_gradients_are_freed_as_the_loop_of_the_module_does():
    class Lightning(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.mix = Mixed()

        def forward(self, x):
            return self.mix(x)

    assert [capture(kind).zero_grad for kind in (Mixed, Lightning)] == ["before", "after-forward"]
    assert capture(Mixed).stale_bytes == 0


def test_the_masks_of_a_gpu_are_booleans_in_plain_training_too():
    peaks = {}
    for device in (CPU, CUDA):
        step = estimated(capture(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), "512x16", device=device))
        (mask,) = (n.outputs[1] for n in step.graph.nodes if n.op == "aten.native_dropout.default")
        peaks[device.type] = step.graph.storages[step.graph.tensors[mask].storage].plain_times

    assert peaks == {"cpu": 4, "cuda": 1}


def test_a_module_that_exists_stays_as_it_is():
    module = Mixed().eval()
    tied = nn.Sequential(module, module.mix[0])

    step = capture_offline(work(lambda: tied), OfflineOptions())

    assert not any(tensor_state.is_fake(p) for p in tied.parameters())
    assert not module.training
    assert dict(step.resident)["parameters"] == sum(4 * p.numel() for p in tied.parameters())


class Tabled(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.table = torch.ones(16)  # neither a parameter nor a buffer

    def forward(self, x):
        return super().forward(x) * self.table


@pytest.mark.parametrize(
    "factory",
    [
        lambda: Tabled(),
        lambda: nn.Sequential(Tabled().bfloat16(), nn.Linear(16, 16)).float(),
        lambda: nn.Sequential(nn.Dropout(torch.linspace(0, 0.1, 3).tolist()[-1]), Tabled().double().float()),
    ],
    ids=["plain", "other type", "values"],
)
def test_factories_are_met_with_what_they_need(factory):
    assert estimated(capture(factory)).plain_bytes > 4 * 64 * 16


def test_changing_the_type_in_a_factory_takes_no_memory():
    step = capture(lambda: nn.Linear(1_000_000, 1_000_000).bfloat16(), "2x1000000:bfloat16")

    assert dict(step.resident)["parameters"] == 2 * (10**12 + 10**6)


def test_an_error_of_the_factory_is_its_own():
    def fails():
        raise LookupError("no weights")

    with pytest.raises(LookupError, match="no weights"):
        capture(fails)


def test_calls_on_both_sides_of_a_graph_break_are_linked():
    step = capture(broken)
    calls, order = step.describe([estimate(captured.graph) for captured in step.captured])

    assert len(step.captured) == 2
    assert calls[1].links
    assert order == [1, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU's tensors can be captured themselves")
class TestAGpuThatIsNotThere:
    def test_blocks_are_rounded_as_there(self):
        step = capture(Mixed, device=CUDA)
        graph = estimated(step).graph

        assert step.options.is_stand_in
        assert all(storage.size_bytes % 512 == 0 for storage in graph.storages)
        assert all(size % 512 == 0 for size in step.resident.values())

    def test_attention_does_not_fall_apart(self):
        on_gpu, on_cpu = (ops(capture(attention, "2x8x32", device=device)) for device in (CUDA, CPU))

        assert "aten._scaled_dot_product_efficient_attention.default" in on_gpu
        assert not any("bmm" in op for op in on_gpu)
        assert any("bmm" in op for op in on_cpu)

    def test_half_precision_runs_another_kernel(self):
        found = ops(capture(attention, "2x8x32", device=CUDA, autocast=torch.bfloat16))

        assert "aten._scaled_dot_product_flash_attention.default" in found

    def test_a_mask_becomes_a_bias(self):
        found = ops(capture(attention, "x=2x8x32,mask=2x1x1x8:bool", device=CUDA))

        assert "aten._scaled_dot_product_efficient_attention_backward.default" in found

    def test_sums_in_no_fixed_order_are_not_run_again(self):
        class Scattered(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return y.index_add(0, torch.zeros(64, dtype=torch.long), y)

        nodes = {n.op: n for n in estimated(capture(lambda: Scattered(16, 16), device=CUDA)).graph.nodes}

        assert nodes["aten.index_add.default"].is_random
        assert not nodes["aten.addmm.default"].is_random

    def test_measuring_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"no CUDA device here to measure on\. Leave --measure out"):
            capture(Mixed, device=CUDA).measured(CostCache())


def test_half_precision_is_estimated_at_its_own_rate():
    full = capture(lambda: nn.Linear(4096, 4096), "4096x4096", device=CUDA)
    half = capture(lambda: nn.Linear(4096, 4096).bfloat16(), "4096x4096:bfloat16", device=CUDA)
    times = [step_time_ms(s.graph, s.profile) for s in (estimated(full), estimated(half))]

    assert times[1] < times[0] / 5


def test_rates_are_as_given():
    rates = rates_of(CPU, tflops=2, gb_per_s=100)

    assert rates.machine.half_flops_per_ms is None
    assert str(rates) == "2 TFLOP/s, 100 GB/s: as given"
    assert "312 in half precision" in str(rates_of(CUDA))


def test_costs_can_be_measured_where_the_device_is():
    step = capture(Mixed).measured(CostCache())

    assert step.profile.device.startswith("cpu")
    assert step_time_ms(step.graph, step.profile) > 0


def test_a_step_scales_from_two_sizes_to_what_is_captured_at_a_third():
    steps = {size: estimated(capture(Mixed, size=size)) for size in (4, 8, 96)}
    template = GraphTemplate([(steps[size].graph, steps[size].profile) for size in (4, 8)], FittedLines((4, 8)))

    assert template.at((96,))[0].storages == steps[96].graph.storages


class Losses(nn.Linear):
    def __init__(self, form):
        super().__init__(16, 1)
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y.mean(),
        lambda y: {"loss": y.mean(), "logits": y},
        lambda y: (y.mean(), y),
    ],
    ids=["scalar", "dict", "tuple"],
)
def test_the_loss_that_a_module_returns_is_found(form):
    step = capture(lambda: Losses(form), loss="model")

    assert "aten.mean.default" in ops(step)


def test_outputs_are_added_up_where_there_is_no_loss():
    assert capture(lambda: Losses(lambda y: y)).record.backwards

    with pytest.raises(ConfigurationError, match=r"The module returns no loss \(found a tensor\).* or use --loss sum"):
        capture(lambda: Losses(lambda y: y), loss="model")


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ConfigurationError, match="Nothing that the module returns requires a gradient"):
        capture(lambda: Losses(lambda y: y.detach()))


def test_what_the_capture_refuses_is_said():
    class Broken(Losses):
        def forward(self, x, *args):
            with torch._dynamo.error_on_graph_break(True):
                torch._dynamo.graph_break("a wall")
            return super().forward(x, *args)

    with pytest.raises(CaptureError, match=r"torch\.compile could not capture Broken: .*graph_break"):
        capture(lambda: Broken(lambda y: y))


def test_a_step_that_depends_on_values_is_refused():
    with pytest.raises(CaptureError, match="The step of factory depends on values of its tensors"):
        capture(choosy, "2x4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "Optimist"}, "torch.optim has no optimizer 'Optimist'"),
        ({"optimizer": "lr_scheduler"}, "torch.optim has no optimizer 'lr_scheduler'"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ConfigurationError) as error:
        OfflineOptions(**options)
    assert words in str(error.value)


@network(lambda: {"scale": nn.Parameter(torch.ones(2**18)), "layer": nn.Linear(2**18, 8)})
def dropping(self, x):
    """Drops from a tensor of a TiB."""
    return self.layer(nn.functional.dropout(x * self.scale, 0.5))


def test_a_dropout_is_not_tried_while_it_is_captured():
    (captured,) = capture(dropping, "1048576x262144").captured
    assert DRAW_MASK in {node.op for node in captured.graph.nodes}


def test_operators_that_call_graphs_are_counted_without_memory():
    @network(lambda: {"linear": nn.Linear(8, 8)})
    def branches(self, x):
        y = self.linear(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).square().mean()

    workload = Workload(branches, "branches", read_inputs("16x8"))
    captured = capture_offline(workload, OfflineOptions())
    assert any("cond" in node.op for part in captured.captured for node in part.graph.nodes)
