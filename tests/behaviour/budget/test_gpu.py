"""On a CUDA device: the same numbers, within the budget by the caching allocator's own count."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from hiremate_lightning import find_max_batch_size, get_plan, hiremate, remove_hiremate
from hiremate_lightning.measuring.saved_offload import SavedOffload
from hiremate_lightning.memory.allocator import LEAST_REST_BYTES
from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.rewriting import losses
from hiremate_lightning.rewriting.overwriting import overwriting
from hiremate_lightning.running.copies import Block, HostMemory, Leaving
from hiremate_lightning.signatures.eager_predictions import SavedTensors
from hiremate_lightning.testing import session_of
from hiremate_lightning.torch_private.tensor_state import storage_id
from tests.behaviour.exactness.test_accumulation import batch, weight_bytes, wide
from tests.behaviour.exactness.test_execution import compiled, keep_all, nothing_kept, results
from tests.behaviour.exactness.test_replays import NOISES, NORMS, make_normed
from tests.behaviour.exactness.test_replays import make as make_noisy
from tests.behaviour.sizes.test_saved_offload import Net as Saving
from tests.behaviour.sizes.test_saved_offload import changed_after_it_was_saved
from tests.exact import assert_same, planned_alike, square_error
from tests.training import build

pytestmark = pytest.mark.gpu
STEPS = 6


@pytest.fixture(autouse=True)
def _deterministic():
    """Let cuDNN and cuBLAS choose the same kernels in each run."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def train(name: str, budget: str | None, half: bool, **options: str) -> tuple[list[torch.Tensor], int, nn.Module]:
    """Train on the device; give all that must be equal, the peak of the last step, and the model."""
    model = build(name)
    module = model.module.cuda()
    if budget is not None:
        hiremate(module, budget, verbose=False, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(11)
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        batch = tuple(t.cuda() for t in model.make_batch(index))
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            loss = model.loss_of(module(*batch))
        loss.backward()
        peak = torch.cuda.max_memory_allocated()
        losses.append(loss.detach())
        del loss
        optimizer.step()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    same = [*losses, *gradients, *module.parameters(), *module.buffers(), torch.cuda.get_rng_state()]
    return [t.detach().cpu() for t in same], peak, module


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("budget", ["75%", "60%"], ids=["loose", "tight"])
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_training_by_a_plan_equals_eager_within_the_budget(name, budget, half):
    eager, plain_peak = train(name, None, half)[:2]
    captured = train(name, "100%", half)[0]

    found, peak, module = train(name, budget, half)

    plan = get_plan(module)
    assert_same(found, captured)
    if name == "gpt":  # the batch norms of the other are cuDNN's in eager
        assert_same(found, eager)
        assert plan.proved == "forward 1 of 1 graph, gradients 1 of 1"  # with what its dropouts draw on the device
    assert peak < plain_peak
    assert peak <= plan.budget_bytes, f"peak {peak:,}, budget {plan.budget_bytes:,}"
    rest = LEAST_REST_BYTES  # up to this much of a larger block goes to a request, if the allocator has no better one
    above = peak - plan.planned_peak_bytes
    assert -0.01 * peak <= above <= rest, f"measured {peak:,}, predicted {plan.planned_peak_bytes:,}"
    remove_hiremate(module)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_fused_kernels_run_again_bit_for_bit_within_the_budget(name):
    pytest.importorskip("triton")
    expected, _, kept = train(name, "100%", half=False, compile="inductor")
    found, peak, module = train(name, "75%", half=False, compile="inductor")
    plan = get_plan(module)
    assert any(node.op.startswith("hiremate.fused") for node in plan.graph.nodes)
    assert peak <= plan.budget_bytes <= get_plan(kept).unplanned_peak_bytes
    assert_same(found, expected)


def test_two_calls_in_one_block_of_autocast_are_exact():
    def act(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        for index in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = square_error(model(batch(index).cuda()) - model(batch(index + 5).cuda()))
            loss.backward()
        return [p.grad for p in model.parameters()]

    remove_hiremate(planned_alike(wide().cuda(), act, "100%"))


def test_accumulated_gradients_are_added_where_they_appear():
    peaks = []

    def act(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(4)
        for index in range(4):
            x = batch(index).cuda()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            square_error(model(x)).backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        return [p.grad for p in model.parameters()]

    model = planned_alike(wide().cuda(), act, "1 GiB")
    plan = get_plan(model)
    assert plan.planned_peak_bytes - plan.resident_bytes < weight_bytes(model) / 2
    assert peaks[-1] <= plan.planned_peak_bytes - plan.resident_bytes


def test_every_operation_takes_time_and_recomputing_too():
    _, _, module = train("gpt", "60%", half=False)
    (profile,) = (graph.profile for graph in session_of(module).model.runtimes.all)
    plan = get_plan(module)
    assert all(time_ms > 0 for time_ms in profile.time_ms)
    assert torch.cuda.get_device_name() in profile.device
    assert plan.measured.step_ms > plan.measured.recompute_ms > 0
    remove_hiremate(module)


def test_auto_leaves_a_model_that_fits_as_fast_as_it_was():
    _, _, module = train("gpt", "auto", half=False)
    assert get_plan(module).predicted_overhead == 0
    remove_hiremate(module)


def test_the_peak_of_known_allocations_is_exact():
    def allocate():
        a = torch.empty(1024, device="cuda")
        b = torch.empty(2048, device="cuda")
        del a, b

    assert measure_peak(allocate, "cuda") == 3 * 4096


def test_what_is_offloaded_leaves_the_device_and_comes_back_once():
    x = torch.randn(2**18, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    with SavedOffload({storage_id(x)}):
        y = x * 2
        loss = (y * y.view(2, -1).view(-1)).sum()
        del y
    assert torch.cuda.memory_allocated() - before < x.nbytes
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 5 * x.nbytes, "three gradients on their way, and one copy"
    assert torch.equal(x.grad, 8 * x.detach())


def test_what_is_offloaded_may_be_changed_in_place_afterwards():
    assert torch.equal(*changed_after_it_was_saved("cuda"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="on a real GPU copies may end in time by chance")
def test_a_missing_wait_for_what_is_offloaded_is_seen(monkeypatch):
    monkeypatch.setattr(Leaving, "wait", lambda self: None)
    assert not torch.equal(*changed_after_it_was_saved("cuda"))


def test_blocks_of_what_was_offloaded_are_used_again():
    host, x = HostMemory(), torch.randn(2**18, device="cuda", requires_grad=True)
    for _ in range(3):
        with SavedOffload({storage_id(x)}, host):
            loss = (x * 2).square().sum()
        loss.backward()
        del loss
        gc.collect()
    assert host.size_bytes == x.nbytes


class Full(HostMemory):
    """A host that has no memory left."""

    def take(self, size_bytes: int, is_pinned: bool) -> Block:
        return super().take(2**60, is_pinned)


def test_what_finds_no_room_on_the_host_stays_on_the_device():
    x, errors = torch.randn(2**18, device="cuda", requires_grad=True), []
    with SavedOffload({storage_id(x)}, Full(), errors.append):
        loss = (x * 2).square().sum()
    loss.backward()
    assert torch.equal(x.grad, 8 * x.detach())
    assert len(errors) == 1
    with pytest.raises(MemoryError, match=r"The host has no .* left for a value that is offloaded from the device"):
        Leaving(x, Full())


@pytest.mark.usefixtures("without_made_code")
def test_steps_of_new_sizes_offload_within_the_budget():
    def step(model: nn.Module, length: int) -> torch.Tensor:
        model.zero_grad()
        batch = torch.randn(8, length, 32, generator=torch.Generator().manual_seed(length)).cuda()
        torch.cuda.reset_peak_memory_stats()
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    model = Saving().cuda()
    plain = copy.deepcopy(model)
    step(plain, 600)
    budget = torch.cuda.max_memory_allocated()
    hiremate(model, budget, verbose=False)
    for length in (600, 80, 900, 330, 900):
        found = []
        for net in (model, plain):
            torch.manual_seed(length)
            found.append([step(net, length), *(p.grad for p in net.parameters())])
            assert net is plain or torch.cuda.max_memory_allocated() <= budget
        assert all(map(torch.equal, *found))
    session = session_of(model)
    assert session.captured_count == 1
    assert session.steps.eager.prediction.saved is SavedTensors.OFFLOADED
    assert session.model.offloading.memory.size_bytes > 0


def test_intervals_start_with_what_lives():
    with MemoryMeter(torch.device("cuda")) as meter:
        kept = torch.empty(1024, device="cuda")
        meter.mark("second")
        del kept
    assert [i.start_bytes for i in meter.intervals] == [0, 4096]


def test_a_search_for_the_largest_batch_never_runs_out_of_memory():
    """With a real cap on what the process may allocate; a plain step at that size passes it."""
    total = torch.cuda.get_device_properties(0).total_memory
    cap = max(2 * 2**30, torch.cuda.memory_reserved() + 2**30)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        torch.manual_seed(0)
        block = [nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)]
        model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(8) for layer in block)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(module: nn.Module, batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()

        before = torch.cuda.memory_stats().get("num_ooms", 0)
        result = find_max_batch_size(
            model,
            lambda size: torch.randn(64 * size, 512, device="cuda"),
            step,
            budget=int(0.8 * cap),
            max_overhead=9.0,
            verbose=False,
        )
        assert torch.cuda.memory_stats().get("num_ooms", 0) == before
        assert result.trial.measured_peak_bytes <= result.budget_bytes
        assert int(result) > result.unplanned_size > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


AGAIN = [*((make_noisy, noise, None) for noise in NOISES), *((make_normed, norm, keep_all) for norm in NORMS)]


@pytest.mark.parametrize(("make", "name", "first"), AGAIN, ids=[name for _, name, _ in AGAIN])
def test_random_results_and_norms_recompute_bit_for_bit(make, name, first):
    """What was drawn is compared with eager PyTorch, norms with those that are kept."""
    found = []
    for decide in (first, nothing_kept):
        model, x = make(name)
        model.cuda()
        x = x.detach().cuda().requires_grad_()
        call = model if decide is None else compiled(model, decide)[0]
        found.append([*results(model, x, call), torch.cuda.get_rng_state()])
    assert_same(*found)


def test_masks_of_channels_last_pictures_are_drawn_again():
    found = []
    for decide in (None, keep_all, nothing_kept):
        torch.manual_seed(1)
        layers = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 4, 1)
        model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(4, 8, 20, 20).cuda().to(memory_format=torch.channels_last).requires_grad_()
        found.append(results(model, x, model if decide is None else compiled(model, decide)[0]))
    assert_same(found[1:], found[:1] * 2)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("classes", [37, 1024, 4096, 50257])
def test_softmaxes_over_what_they_read_are_those_of_eager(classes, dim):
    """The kernels are others for few classes, for many, for many in a row that is not aligned, and by columns."""
    aten = torch.ops.aten
    source, gradient = torch.randn(67, classes, device="cuda").mul(9), torch.randn(67, classes, device="cuda")
    for forward, backward in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        expected = forward(source, dim, False)
        wanted = backward(gradient, expected, dim, torch.float32)
        with torch.no_grad():
            copy, dying = source.clone(), gradient.clone()
            strides = ((0, dying.stride()),)
            assert torch.equal(overwriting(forward, 0)(strides, copy, dim, False), expected)
            found = overwriting(backward, 0)(strides, dying, expected, dim, torch.float32)
        assert torch.equal(copy, expected)
        assert found is dying
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("classes", [37, 1024, 4096, 50257])
@pytest.mark.parametrize("reduction", [0, 1], ids=["none", "mean"])
def test_cross_entropy_by_rows_equals_eager(change_thresholds, classes, reduction):
    change_thresholds(part_bytes=1)
    aten, rows = torch.ops.aten, 333
    logits = torch.randn(rows, classes, device="cuda").mul(9).bfloat16()
    logarithms = logits.float().log_softmax(1)
    target = torch.arange(rows, device="cuda") % classes
    gradient = torch.randn(rows, device="cuda") if reduction == 0 else torch.tensor(0.37, device="cuda")
    shape, arguments = [rows, classes], (target, None, reduction, -100)
    expected = aten.nll_loss_forward(logarithms, *arguments)
    found = losses.cross_entropy(logits, target, reduction, -100, shape, torch.float32)
    assert all(map(torch.equal, found, expected))
    arguments = (*arguments, expected[1])
    single = aten._log_softmax_backward_data(
        aten.nll_loss_backward(gradient, logarithms, *arguments), logarithms, 1, torch.float32
    )
    found = losses.cross_entropy_gradient(gradient, logits, *arguments, shape, torch.float32, shape, torch.bfloat16)
    assert torch.equal(found, single.bfloat16())
