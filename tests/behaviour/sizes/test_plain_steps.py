"""Steps of sizes that were never seen run as the user wrote them where they fit the budget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.calls.module_call import ModuleCall
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.records.graph import StorageKind
from hiremate_lightning.signatures.eager_predictions import (
    NEAR,
    ROUNDING,
    UNMEASURED_RATIO,
    UNMEASURED_WAY_RATIO,
    EagerPredictions,
    LearnedStep,
    Prediction,
    SavedTensors,
)
from hiremate_lightning.signatures.step_signature import EAGER_TRIES, StepSignature
from hiremate_lightning.testing import captured_count
from tests.behaviour.sizes.test_saved_offload import budget_of
from tests.exact import network, simple_loop, take_steps, train_both
from tests.tiny import Builder

pytestmark = pytest.mark.usefixtures("without_made_code")
WIDTH = 32
SIGNATURE, OTHER = StepSignature((0,)), StepSignature((1,))
CHANNELS = 7  # of the tensor that a step keeps: a number of the model


def call(*sizes: int, name: str = "", dtype: torch.dtype = torch.float32) -> ModuleCall:
    return ModuleCall(name, (dtype,), (sizes,))


def bytes_at(rows: int, length: int) -> int:
    return 4 * rows * length * CHANNELS


def captured(
    rows: int, length: int, code: StepSignature = SIGNATURE, times: int = 1, margin_bytes: int = 0, width: int = 8
) -> LearnedStep:
    """A step that keeps tensors of its rows, its length and channels."""
    b = Builder()
    weight, x = b.input("w", width), b.input("x", 8, StorageKind.INPUT)
    kept = [x]
    for number in range(times):
        kept.append(b.op(f"kept{number}", (kept[-1], weight), bytes_at(rows, length)))
        b.tensors[kept[-1]] = replace(b.tensors[kept[-1]], shape=(rows, length, CHANNELS), dtype="float32")
    out, gradient = b.op("out", (kept[-1],), 4), b.tangent("t", 4)
    for tensor in reversed(kept[1:]):
        gradient = b.op(f"grad{tensor}", (gradient, tensor), 8, backward=True)
    graph, profile = b.graph(outputs=(out,), gradients=(gradient,))
    recorded = SimpleNamespace(
        calls=[
            SimpleNamespace(call=SimpleNamespace(graph=graph), captured=SimpleNamespace(device=torch.device("cpu")))
        ],
        merge=lambda: SimpleNamespace(graph=graph, profile=profile),
        bytes_from=lambda first: times * rows * length,
        margin_bytes=margin_bytes,
    )
    return LearnedStep((call(rows, length),), code, recorded)


def known(*steps: LearnedStep) -> EagerPredictions:
    """Make predictions from captured steps: one of SIGNATURE, one of OTHER, and more."""
    plain, more = EagerPredictions(), (StepSignature((number,)) for number in range(2, len(steps)))
    for signature, step in zip((SIGNATURE, OTHER, *more), steps, strict=False):
        signature.calls, signature.code, signature.step = step.calls, step.code, step.step
        plain.learn(signature)
    return plain


def takes(
    plain: EagerPredictions, rows: int, length: int, saved: SavedTensors = SavedTensors.IN_MEMORY
) -> float | None:
    """Return what the captured graph is predicted to take, without the few bytes that always remain."""
    found = plain.predict([call(rows, length)], SIGNATURE, 10**9, saved)
    return None if found is None else found.captured_bytes


def test_what_a_step_keeps_follows_from_its_sizes():
    """Other code that may come counts too."""
    plain = known(captured(4, 100), captured(4, 60))
    for length in (10, 60, 77, 100, 150):
        assert takes(plain, 4, length) == pytest.approx(bytes_at(4, length), abs=20)
    plain = known(captured(4, 100), captured(4, 60, code=OTHER, times=3))
    assert takes(plain, 4, 50) == pytest.approx(bytes_at(4, 3 * 50), abs=20)


def test_a_step_fits_or_it_does_not():
    plain = known(captured(4, 100))
    most = plain.predict([call(4, 60)], SIGNATURE, 10**9)
    assert plain.predict([call(4, 60)], SIGNATURE, most.added_bytes) is not None
    assert plain.predict([call(4, 60)], SIGNATURE, most.added_bytes - 1, saved=SavedTensors.IN_MEMORY) is None


def test_the_first_way_that_fits_is_chosen():
    plain = known(captured(400, 100, times=8))
    rooms = 10**9, 4 * bytes_at(400, 100), 4
    found = [plain.predict([call(400, 100)], SIGNATURE, room) for room in rooms]
    ways = [None if prediction is None else prediction.saved for prediction in found]
    assert ways == [SavedTensors.IN_MEMORY, SavedTensors.OFFLOADED, None]


def test_calls_of_another_form_predict_nothing():
    """Signatures that are called like a step are found by its first calls."""
    plain = known(captured(4, 100))
    for others in ([call(4)], [call(4, 60, dtype=torch.float64)], [call(4, 60, name="other")], [call(4, 60)] * 2):
        assert plain.predict(others, SIGNATURE, 10**9) is None
    plain = known(captured(4, 100), captured(4, 60))
    SIGNATURE.plan = OTHER.plan = None
    assert plain.called_like([call(4, 60)]) == []
    OTHER.plan = object()
    assert plain.called_like([call(4, 60)]) == [OTHER]
    assert plain.called_like([call(4, 100)]) == []


def test_a_step_without_rows_predicts_none_with_rows():
    plain = known(captured(0, 100))
    assert takes(plain, 4, 50) is None
    assert takes(plain, 0, 50) is not None


def prediction(plain: EagerPredictions, length: int, saved: SavedTensors = SavedTensors.IN_MEMORY) -> Prediction:
    return plain.predict([call(4, length)], SIGNATURE, 10**9, saved)


def added(plain: EagerPredictions, length: int) -> int:
    return prediction(plain, length).added_bytes


def measure(plain: EagerPredictions, length: int, ratio: float | None) -> None:
    """Let a plain step of a length have taken so many times what the captured graph takes."""
    found = prediction(plain, length)
    plain.measured([call(4, length)], SIGNATURE, found, None if ratio is None else round(ratio * found.captured_bytes))


def test_what_eager_takes_beyond_the_captured_graph_is_left_free():
    """And so is a measured margin."""
    plain = known(captured(4, 100))
    assert added(plain, 60) == pytest.approx(ROUNDING * UNMEASURED_RATIO * bytes_at(4, 60), rel=0.01)
    assert added(known(captured(4, 100, margin_bytes=500)), 60) == added(known(captured(4, 100)), 60) + 500


def test_measured_steps_set_the_ratio_the_largest_ones_most():
    plain = known(captured(4, 100))
    for length, ratio, expected in [(20, 1.3, 1.3), (25, 1.2, 1.3), (60, 1.1, 1.1), (70, 1.4, 1.4), (80, 0.7, 1.4)]:
        measure(plain, length, ratio)
        assert added(plain, 90) == pytest.approx(ROUNDING * expected * bytes_at(4, 90), rel=0.01)


def test_a_bound_that_lies_high_does_not_lower_the_ratio():
    """The weight's dimension is a multiple of the length, so that nothing shows what becomes smaller with it."""
    plain = known(captured(4, 56, width=112))
    measure(plain, 28, 0.9)
    assert added(plain, 56) >= ROUNDING * bytes_at(4, 56)


def test_a_way_that_was_not_measured_has_a_margin_of_its_own():
    plain = known(captured(4, 100))
    measure(plain, 90, 1.05)
    found = prediction(plain, 90, saved=SavedTensors.OFFLOADED)
    assert found.added_bytes > UNMEASURED_WAY_RATIO * (found.captured_bytes - 8)
    measure(plain, 91, 1.4)
    assert prediction(plain, 90, saved=SavedTensors.OFFLOADED).added_bytes > 1.4 * (found.captured_bytes - 8)


def test_clearly_larger_steps_are_measured():
    """Those that take little of their room are not; one that was not seen whole is measured again."""
    plain = known(captured(4, 100))
    found = [prediction(plain, length) for length in (50, 51, 60)]
    rooms = (int(found[0].added_bytes / share) for share in (NEAR - 0.01, NEAR + 0.01))
    assert [plain.is_to_be_measured(found[0], room_bytes) for room_bytes in rooms] == [False, True]
    for _ in range(EAGER_TRIES):
        assert plain.is_to_be_measured(found[0], found[0].added_bytes)
        measure(plain, 50, None)
    assert not plain.is_to_be_measured(found[0], found[0].added_bytes)

    plain = known(captured(4, 100))
    assert plain.is_to_be_measured(found[0], found[0].added_bytes)
    measure(plain, 50, 1.2)
    assert [plain.is_to_be_measured(step, step.added_bytes) for step in found] == [False, False, True]


@network(
    lambda: {
        "attention": nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
        "rest": nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, WIDTH)),
        "norm": nn.BatchNorm1d(WIDTH),
    }
)
def attending(self, x: torch.Tensor) -> torch.Tensor:
    """Attention over a length that varies, dropout and batch norm: memory grows with the square of the length."""
    x = x + self.attention(x, x, x, need_weights=False)[0]
    return self.norm(self.rest(x).transpose(1, 2))


LENGTHS = [64, 64, 8, 8, 24, 31, 9, 12, 17, 63, 24, 30, 64]


def lengths_of(step: int) -> torch.Tensor:
    return torch.randn(8, LENGTHS[step], WIDTH, generator=torch.Generator().manual_seed(step))


def test_new_sizes_that_fit_capture_nothing_and_are_exact():
    """All are smaller than 64; 63 fits with what is saved offloaded."""
    budget, counts = budget_of(56, attending), []
    train_both(attending, simple_loop(lengths_of, steps=len(LENGTHS)), budget)
    model = hiremate(attending(), budget, verbose=False)
    take_steps(model, lengths_of, 4)
    resident_bytes = get_plan(model).resident_bytes
    for step in range(3, len(LENGTHS)):
        batch = lengths_of(step)

        def train(batch: torch.Tensor = batch) -> None:
            model.zero_grad()
            model(batch).square().mean().backward()

        assert measure_peak(train) + resident_bytes <= budget + 2**16
        counts.append(captured_count(model))
    assert len(set(counts)) == 1


class Sentence:
    """What torch has no rule to look into, as the graphs of torch_geometric are."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words


@network(lambda: {"inner": attending()})
def on_objects(self, sentence: Sentence) -> Sentence:
    """Is given an object that holds a tensor, and returns one."""
    return Sentence(self.inner(sentence.words))


def test_sizes_of_tensors_that_objects_hold_are_seen():
    torch.manual_seed(0)
    model = hiremate(on_objects(), budget_of(96, attending), verbose=False)
    take_steps(
        model, lambda step: Sentence(lengths_of(step)), 12, loss_of=lambda y: y.words.square().mean(), clears="end"
    )
    assert captured_count(model) < 4
