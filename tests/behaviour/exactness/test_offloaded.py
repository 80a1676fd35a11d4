"""Values that are offloaded and come back, on a CPU at once, on a GPU beside what is computed: the same bits."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from hiremate_lightning.capturing.backend import planning_backend
from hiremate_lightning.errors import ScheduleError
from hiremate_lightning.measuring.profiling import CostCache, measure
from hiremate_lightning.records.costs import Link
from hiremate_lightning.records.offload import Idle, Offload, idle_storages, with_offloads
from hiremate_lightning.records.schedule import Schedule, keep_all, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.running import copies
from hiremate_lightning.running.copies import HostMemory, pinned_storages
from hiremate_lightning.running.execution import GraphRuntime
from hiremate_lightning.running.program import Program, build
from tests.behaviour.exactness.test_execution import Conductor, every_other_kept, make, net
from tests.exact import assert_same, differing, network
from tests.training import build as build_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEAST_BYTES = 4096


def soonest(idle: Idle, schedule: Schedule, rng: random.Random) -> Offload:
    return Offload(idle.storage, idle.made, idle.last, 0)


def latest(idle: Idle, schedule: Schedule, rng: random.Random) -> Offload:
    return Offload(idle.storage, idle.last, idle.last, idle.first)


def anywhere(idle: Idle, schedule: Schedule, rng: random.Random) -> Offload:
    out = rng.randint(idle.made, idle.last)
    return Offload(idle.storage, out, idle.last, rng.randint(0, idle.first))


class Puts(Conductor):
    """Runs each runtime with all offloaded that may be, or some of it, where a rule says."""

    def __init__(self, rule, decide=keep_all, share: float = 1.0) -> None:
        super().__init__(decide)
        self.rule, self.share, self.rng = rule, share, random.Random(3)
        self.host = HostMemory()
        self.programs: dict[GraphRuntime, Program] = {}
        self.offloaded = 0

    def start(self, runtime, arguments):
        if runtime not in self.programs:
            self.programs[runtime] = build(runtime.captured, self.schedule(runtime), self.host)
        return self.programs[runtime], "run"

    def schedule(self, runtime) -> Schedule:
        captured = runtime.captured
        schedule = lower(captured.graph, self.decide(captured.graph))
        idle = idle_storages(captured.graph, schedule, pinned_storages(captured))
        chosen = [i for i in idle if captured.graph.sizes[i.storage] >= LEAST_BYTES and self.rng.random() < self.share]
        self.offloaded += len(chosen)
        offloads = [self.rule(i, schedule, self.rng) for i in chosen]
        return with_offloads(captured.graph, schedule, offloads)


def compiled(model: nn.Module, conductor: Conductor):
    torch.compiler.reset()
    return torch.compile(lambda x: model(x), backend=planning_backend(conductor.take_in), dynamic=False)


def trained(model: nn.Module, batches, loss_of, call) -> list[torch.Tensor]:
    """Do some steps and list all that must be equal."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(call(batch))
        loss.backward()
        found += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*found, *(b.cpu().clone() for b in model.buffers()), torch.get_rng_state()]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def both_ways(device: str, conductor: Puts, steps: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train a net with everything kept, and by a conductor."""
    found = []
    for own in (Conductor(keep_all), conductor):
        model, x = make()
        model, batches = model.to(device), [x.detach().to(device) + i for i in range(steps)]
        found.append(trained(model, batches, mean_square, compiled(model, own)))
    return found[0], found[1]


@pytest.mark.parametrize("decide", [keep_all, every_other_kept])
@pytest.mark.parametrize("rule", [soonest, latest, anywhere])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_offloaded_comes_back_bit_for_bit(device, rule, decide):
    conductor = Puts(rule, decide)
    expected, found = both_ways(device, conductor)
    assert conductor.offloaded >= 2
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["gpt", "unet", "resnet"])
@pytest.mark.parametrize("device", DEVICES)
def test_whole_models_train_bit_for_bit_with_offloaded_values(device, name):
    found, conductor = [], Puts(anywhere, every_other_kept, share=0.7)
    for own in (Conductor(keep_all), conductor):
        model = build_model(name)
        module = model.module.to(device)
        batches = [model.make_batch(index)[0].to(device) for index in range(2)]
        found.append(trained(module, batches, model.loss_of, compiled(module, own)))
    assert conductor.offloaded >= 5
    assert_same(*found)


def test_blocks_of_the_host_are_used_again_in_each_step():
    conductor = Puts(soonest)
    both_ways("cpu", conductor, steps=1)
    after_one = conductor.host.size_bytes
    again = Puts(soonest)
    both_ways("cpu", again, steps=4)
    (runtime,) = again.runtimes
    offloaded = {o.storage for o in again.programs[runtime].schedule.forward if hasattr(o, "storage")}
    assert again.host.size_bytes == after_one == sum(runtime.captured.graph.sizes[s] for s in offloaded)


def test_a_backward_that_runs_twice_brings_values_back_twice():
    gradients = []
    for own in (Conductor(keep_all), Puts(soonest)):
        model, x = make()
        loss = compiled(model, own)(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_same(*gradients)


def test_a_forward_without_a_backward_gives_its_blocks_back():
    conductor = Puts(soonest)
    model, x = make()
    call = compiled(model, conductor)
    for _ in range(3):
        call(x)
        gc.collect()
    blocks = [block for idle in conductor.host._idle.values() for block in idle]
    assert sum(block.memory.nbytes for block in blocks) == conductor.host.size_bytes > 0


def test_a_gradient_that_does_not_arrive_changes_no_other():
    @network(lambda: {"one": net(), "two": net()})
    def two(self, x):
        return self.one(x), self.two(x)

    gradients = []
    for own in (Conductor(keep_all), Puts(soonest)):
        torch.manual_seed(5)
        model, x = two(), torch.randn(256, 16)
        torch.manual_seed(6)
        compiled(model, own)(x)[1].square().mean().backward()
        gradients.append([p.grad for p in model.two.parameters()])
        assert all(p.grad is None for p in model.one.parameters())
    assert_same(*gradients)


def test_what_must_stay_on_the_device_is_refused_by_name(monkeypatch):
    conductor = Puts(soonest)
    model, x = make()
    compiled(model, conductor)(x)
    (runtime,) = conductor.runtimes
    schedule = conductor.programs[runtime].schedule
    offloaded = [o.storage for o in schedule.forward if hasattr(o, "storage")]
    monkeypatch.setattr("hiremate_lightning.running.program.pinned_storages", lambda captured: frozenset(offloaded[:1]))
    with pytest.raises(ScheduleError, match=r"must stay on the device: \w+"):
        build(runtime.captured, schedule)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "most"), [(soonest, 1.0), (latest, 0.75)])
def test_the_peak_with_offloaded_values_is_the_predicted_one(rule, most):
    """What the caller holds is held in the prediction too. All back at once, values save nothing in the backward."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(64, 1, bias=False)).cuda()
    x = torch.randn(4096, 64, device="cuda")
    peaks = {}
    for own in (Conductor(keep_all), Puts(rule)):
        call = compiled(model, own)
        for _ in range(2):  # the first call captures
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            output = call(x)
            output.backward(torch.ones_like(output))
            peaks[own] = torch.cuda.max_memory_allocated() - before
            del output
        (runtime,) = own.runtimes
        graph = runtime.captured.graph
        profile = replace(measure(runtime.captured, CostCache(None)), link=Link(1e6, 1e6))
        schedule = own.schedule(runtime) if isinstance(own, Puts) else lower(graph, keep_all(graph))
        held = replace(graph, held=(*graph.outputs, *graph.tangents))
        assert peaks[own] == simulate(held, profile, schedule).peak_bytes
    kept, offloaded = peaks.values()
    assert offloaded <= most * kept


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.cuda is not None, reason="on a real GPU copies may end in time by chance")
@pytest.mark.parametrize(
    "missing",
    [(copies.Leaving, "wait"), (copies.Arriving, "_wait")],
    ids=["before memory is freed", "before it is read"],
)
def test_a_missing_wait_is_seen_as_other_numbers(monkeypatch, missing):
    monkeypatch.setattr(*missing, lambda self: None)
    expected, found = both_ways("cuda", Puts(latest))
    assert differing(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.cuda is not None, reason="a real GPU does not complain")
def test_a_copy_that_does_not_wait_for_what_is_computed_is_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(RuntimeError, match="does not wait for what was computed before it"):
        both_ways("cuda", Puts(soonest))


@pytest.mark.gpu
def test_a_copy_on_its_way_when_a_step_fails_harms_nobody():
    block = torch.arange(2**16, dtype=torch.uint8, device="cuda")
    expected = block.cpu()
    leaving = copies.Leaving(block, HostMemory())
    leaving.wait()
    del block
    arriving = copies.Arriving(leaving)
    del arriving  # as where an operation fails before it is read
    others = torch.zeros(2**16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert not others.any()
    assert torch.equal(copies.place_of(others)(copies.Arriving(leaving).storage()).cpu(), expected)
