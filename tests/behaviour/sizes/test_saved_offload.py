"""What autograd saves is offloaded where steps of new sizes fit the budget in no other way."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.measuring.saved_offload import LEAST_OFFLOAD, SavedOffload
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.planner import make_options
from hiremate_lightning.sessions import offloading
from hiremate_lightning.sessions.session import Session
from hiremate_lightning.signatures.eager_predictions import SavedTensors
from hiremate_lightning.targets.training_step import TrainingStepTarget
from hiremate_lightning.testing import captured_count, session_of
from hiremate_lightning.torch_private.tensor_state import storage_id
from tests.exact import simple_loop, take_steps, train_both

pytestmark = pytest.mark.usefixtures("without_made_code")
WIDTH = 32
LENGTHS = [60, 8, 90, 33, 90, 72, 96, 90, 24]


class Net(nn.Module):
    """Blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, 128) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(128, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            y = nn.functional.gelu(first(x))
            x = x + nn.functional.dropout(second(y * y), 0.1)
        return x


class Gradients(Net):
    """Takes a gradient of its own by `torch.func`, which refuses hooks on what is saved."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.grad(lambda y: y.square().sum())(x)


def of_step(step: int) -> Tensor:
    return torch.randn(8, LENGTHS[step], WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(of_step(step)).square().mean().backward()


def budget_of(length: int, make=Net) -> int:
    """Return what a plain step of a length takes."""
    model = hiremate(make(), "100%", verbose=False)
    take_steps(model, lambda _: torch.randn(8, length, WIDTH), 3)
    return get_plan(model).unplanned_peak_bytes


def ways(model: nn.Module) -> list[str]:
    """Train, and return how each step ran."""
    found = []
    for step in range(len(LENGTHS)):
        train(model, step)
        found.append(way_of(session_of(model)))
    return found


def way_of(session: Session) -> str:
    """Return how the latest step ran."""
    plain = session.steps.eager
    return "plan" if plain is None else "offloaded" if plain.prediction.saved is SavedTensors.OFFLOADED else "plain"


@pytest.mark.parametrize("make", [Net, Gradients])
def test_training_is_exact_and_nothing_more_is_captured(make):
    """Steps stay within the budget."""
    budget, added, found = budget_of(60, make), [], []
    train_both(make, simple_loop(of_step, steps=len(LENGTHS)), budget)
    model = hiremate(make(), budget, verbose=False)
    for step in range(len(LENGTHS)):
        added.append(measure_peak(lambda step=step: train(model, step)))
        found.append(way_of(session_of(model)))
        assert step == 0 or make is not Net or added[-1] + get_plan(model).resident_bytes <= budget + 2**16
    assert [found[step] for step in (1, 2, 3, 4, 6)] == ["plain", "offloaded", "plain", "offloaded", "offloaded"]
    assert captured_count(model) == 1


def test_files_are_used_again_until_steps_run_by_plans(change_thresholds):
    model = hiremate(Net(), budget_of(60), verbose=False)
    files, sizes_bytes = session_of(model).model.offloading.files, []
    for step in (0, 6, 4, 2, 5, 6):  # lengths 60, 96, 90, 90, 72, 96
        train(model, step)
        sizes_bytes.append(files.size_bytes)
    assert sizes_bytes[1] > 0
    assert set(sizes_bytes[1:]) == {sizes_bytes[1]}, "the longest came first"
    change_thresholds(worth_a_plan=0)
    train(model, 4)
    assert files.size_bytes == 0


def test_a_size_that_comes_often_gets_a_plan(change_thresholds):
    change_thresholds(worth_a_plan=0)
    found = ways(hiremate(Net(), budget_of(60), verbose=False))
    assert [found[step] for step in (2, 4, 7)] == ["offloaded", "plan", "plan"], "all are of length 90"


def test_sizes_are_captured_where_nothing_can_be_offloaded(monkeypatch):
    budget = budget_of(60)
    monkeypatch.setattr(offloading, "free_host_bytes", lambda: 2**10)
    assert "offloaded" not in ways(hiremate(Net(), budget, verbose=False))


@pytest.mark.filterwarnings("ignore:A step of a new input size ran without a plan")  # it took more
def test_without_room_for_files_training_goes_on(monkeypatch):
    budget = budget_of(60)
    monkeypatch.setattr(tempfile, "TemporaryFile", _refuse)
    train_both(Net, simple_loop(of_step, steps=len(LENGTHS)), budget)
    with pytest.warns(HiRemateWarning, match="There was no room in temporary files"):
        assert ways(hiremate(Net(), budget, verbose=False)).count("offloaded") == 1


def _refuse(*_: object) -> None:
    raise OSError("No space left on device")


def test_each_storage_is_copied_once_and_no_given_or_small_one():
    copied = list[int]()

    class Noting(SavedOffload):
        def _copy(self, storage: int, tensor: Tensor, version: int) -> object:
            before = len(self._copies)
            made = super()._copy(storage, tensor, version)
            copied.extend([storage] * (len(self._copies) - before))
            return made

    weight = torch.randn(LEAST_OFFLOAD // 4, requires_grad=True)
    small = torch.randn(8, requires_grad=True)
    with Noting({weight.untyped_storage()._cdata}, on_full=_refuse):
        y = weight * 2
        loss = (y * y.view(2, -1).view(-1)).sum() + (weight * weight).sum() + (small * 2).square().sum()
    expected = torch.autograd.grad(loss, (weight, small))
    assert copied == [y.untyped_storage()._cdata]
    assert torch.equal(expected[0], 8 * weight.detach() + 2 * weight.detach())
    assert torch.equal(expected[1], 8 * small.detach())


def changed_after_it_was_saved(device: str) -> tuple[Tensor, Tensor]:
    """Offload a value, change it in place, and offload it again; return the gradient, and what it is."""
    x = torch.randn(2**18, device=device, requires_grad=True)
    with SavedOffload({storage_id(x)}):
        y = x * 1
        loss = y.sin().sum()
        with torch.no_grad():
            y.add_(1)
        loss = loss + y.cos().sum()
        del y
    plain = x.detach()
    return torch.autograd.grad(loss, x)[0], plain.cos() - (plain + 1).sin()


def test_values_changed_after_they_were_saved_are_as_saved():
    assert torch.equal(*changed_after_it_was_saved("cpu"))


def test_views_with_own_version_counters_come_back_as_saved():
    """As the gates of a GRU's cell: parts of one storage, each changed in place."""
    x = torch.randn(2, LEAST_OFFLOAD, requires_grad=True)

    def act() -> Tensor:
        first, second = (x * 1).unsafe_chunk(2)
        return torch.autograd.grad((first.sigmoid_() * second.tanh_()).sum(), x)[0]

    expected = act()
    with SavedOffload(set()):
        assert torch.equal(act(), expected)


def test_a_change_in_place_of_what_stays_is_the_error_of_pytorch():
    weight, small = torch.randn(LEAST_OFFLOAD, requires_grad=True), torch.randn(8, requires_grad=True)
    for changed, given in ((weight, {weight.untyped_storage()._cdata}), (small, set())):
        with SavedOffload(given, on_full=_refuse):
            loss = (changed * changed).sum()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
            loss.backward()


class WithStep(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


def test_a_whole_training_step_offloads_what_it_saves():
    losses, ran = [], []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = WithStep()
        session = Session(model, make_options(budget_of(60), verbose=False))
        target = TrainingStepTarget(model, session)
        if is_planned:
            target.attach()
        torch.manual_seed(1)
        for step in range(len(LENGTHS)):
            model.zero_grad()
            losses.append(model.training_step(of_step(step)))
            losses[-1].backward()
            ran.append(way_of(session) if is_planned else "eager")
        session.close()
    half = len(LENGTHS)
    assert (ran[half + 2], ran[half + 3]) == ("offloaded", "plain")
    assert all(map(torch.equal, losses[:half], losses[half:]))
