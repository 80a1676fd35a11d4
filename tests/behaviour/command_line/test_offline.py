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
from hiremate_lightning.measuring.recorded_calls import calls_of
from hiremate_lightning.records.costs import estimate, step_time_ms
from hiremate_lightning.records.expressions import on_line
from hiremate_lightning.records.graph_at_sizes import GraphAtSizes
from hiremate_lightning.records.simulation import simulate_eager
from hiremate_lightning.rewriting.replays import DRAW_MASK
from hiremate_lightning.torch_private import tensor_state
from tests.exact import captured_by, network

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@network(
    lambda: {"mix": nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))}
)
def mixed(self, x):
    return x + self.mix(x)


@network(lambda: {"qkv": nn.Linear(32, 96)})
def attention(self, x, mask=None):
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


@network(lambda: {"before": mixed(), "after": mixed()})
def broken(self, x):
    x = self.before(x)
    torch._dynamo.graph_break()
    return self.after(x)


def work(factory, inputs="64x16"):
    return Workload(factory, "factory", read_inputs(inputs))


def capture(factory, inputs="64x16", size=None, **options):
    return capture_offline(work(factory, inputs), OfflineOptions(**options), size)


def estimated(step):
    return step.estimated(rates_of(step.options.device))


def ops(step):
    return [node.op for node in estimated(step).graph.nodes]


def test_the_graph_is_that_of_training():
    training = captured_by(mixed(), torch.zeros(64, 16)).graph
    offline = capture(mixed).captured[0].graph

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
    assert estimated(step).eager_bytes == simulate_eager(plan.graph, estimate(plan.graph)).peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fits_no_machine_is_captured(dtype):
    """Changing the type in a factory takes no memory either."""
    inputs = "1000000x1000000" if dtype is torch.float32 else "2x1000000:bfloat16"
    step = capture(lambda: nn.Linear(1_000_000, 1_000_000).to(dtype), inputs)

    assert dict(step.resident)["parameters"] == dtype.itemsize * (10**12 + 10**6)
    assert dtype is not torch.float32 or estimated(step).eager_bytes > 4 * 10**12


def test_all_that_exists_before_the_step_is_resident():
    step = capture(mixed, zero_grad="after-forward")

    sizes = dict(step.resident)
    weights = sum(4 * p.numel() for p in mixed().parameters())
    scalars = 4 * len(list(mixed().parameters()))
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
            self.mix = mixed()

        def forward(self, x):
            return self.mix(x)

    assert [capture(kind).zero_grad for kind in (mixed, Lightning)] == ["before", "after-forward"]
    assert capture(mixed).stale_bytes == 0


def test_the_masks_of_a_gpu_are_booleans_in_plain_training_too():
    peaks = {}
    for device in (CPU, CUDA):
        step = estimated(capture(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), "512x16", device=device))
        (mask,) = (n.outputs[1] for n in step.graph.nodes if n.op == "aten.native_dropout.default")
        peaks[device.type] = step.graph.storages[step.graph.tensors[mask].storage].eager_times

    assert peaks == {"cpu": 4, "cuda": 1}


def test_a_module_that_exists_stays_as_it_is():
    module = mixed().eval()
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
    assert estimated(capture(factory)).eager_bytes > 4 * 64 * 16


def test_an_error_of_the_factory_is_its_own():
    def fails():
        raise LookupError("no weights")

    with pytest.raises(LookupError, match="no weights"):
        capture(fails)


def test_calls_on_both_sides_of_a_graph_break_are_linked():
    step = capture(broken)
    estimated(step)
    calls, order = calls_of(step.measurement)

    assert len(step.captured) == 2
    assert calls[1].links
    assert order == [1, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU's tensors can be captured themselves")
class TestAGpuThatIsNotThere:
    def test_blocks_are_rounded_as_there(self):
        step = capture(mixed, device=CUDA)
        graph = estimated(step).graph

        assert step.options.is_stand_in
        assert all(storage.size_bytes % 512 == 0 for storage in graph.storages)
        assert all(size % 512 == 0 for size in step.resident.values())

    def test_attention_does_not_fall_apart(self):
        """Half precision runs another kernel; a mask becomes a bias."""
        on_gpu, on_cpu = (ops(capture(attention, "2x8x32", device=device)) for device in (CUDA, CPU))
        masked = ops(capture(attention, "x=2x8x32,mask=2x1x1x8:bool", device=CUDA))

        assert "aten._scaled_dot_product_efficient_attention.default" in on_gpu
        assert not any("bmm" in op for op in on_gpu)
        assert any("bmm" in op for op in on_cpu)
        half = ops(capture(attention, "2x8x32", device=CUDA, autocast=torch.bfloat16))
        assert "aten._scaled_dot_product_flash_attention.default" in half
        assert "aten._scaled_dot_product_efficient_attention_backward.default" in masked

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
            capture(mixed, device=CUDA).measured()


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
    step = capture(mixed).measured()

    assert step.profile.device.startswith("cpu")
    assert step_time_ms(step.graph, step.profile) > 0


def test_a_step_scales_from_two_sizes_to_the_capture_of_a_third():
    steps = {size: estimated(capture(mixed, size=size)) for size in (4, 8, 96)}
    at_sizes = GraphAtSizes([(steps[size].graph, steps[size].profile) for size in (4, 8)], [(4,), (8,)], on_line)

    assert at_sizes.at((96,))[0].storages == steps[96].graph.storages


def by_values(y):
    return y if bool((y > 0).all()) else -y


@network(lambda form: {"layer": nn.Linear(16, 1), "form": form})
def losses(self, x):
    return self.form(self.layer(x))


@pytest.mark.parametrize(
    "form",
    [lambda y: y.mean(), lambda y: {"loss": y.mean(), "logits": y}, lambda y: (y.mean(), y)],
    ids=["scalar", "dict", "tuple"],
)
def test_the_loss_that_a_module_returns_is_found(form):
    assert "aten.mean.default" in ops(capture(lambda: losses(form), loss="model"))


def test_outputs_are_added_up_where_there_is_no_loss():
    assert capture(lambda: losses(lambda y: y)).measurement.backwards


def wall(y):
    with torch._dynamo.error_on_graph_break(True):
        torch._dynamo.graph_break("a wall")
    return y


NO_LOSS = r"The module returns no loss \(found a tensor\).* or use --loss sum"
REFUSED = {
    "no loss": (lambda y: y, {"loss": "model"}, ConfigurationError, NO_LOSS),
    "no gradient": (torch.detach, {}, ConfigurationError, "Nothing that the module returns requires a gradient"),
    "a graph that ends": (wall, {}, CaptureError, r"torch\.compile could not capture Losses: .*graph_break"),
    "values": (by_values, {}, CaptureError, "The step of factory depends on values of its tensors"),
    "no such optimizer": (torch.mean, {"optimizer": "Adan"}, ConfigurationError, "torch.optim has no optimizer 'Adan'"),
    "no optimizer": (torch.mean, {"optimizer": "lr_scheduler"}, ConfigurationError, "no optimizer 'lr_scheduler'"),
}


@pytest.mark.parametrize(("form", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_steps_that_cannot_be_planned_are_refused_by_name(form, options, error, words):
    with pytest.raises(error, match=words):
        capture(lambda: losses(form), **options)


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

    captured = capture(branches, "16x8").captured
    assert any("cond" in node.op for part in captured for node in part.graph.nodes)
