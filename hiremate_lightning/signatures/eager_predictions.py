"""Predicts the memory of eager steps at sizes that were never captured: a step that fits runs without a capture.

A capture takes seconds. The memory of an eager step at a new size follows from captured steps of the same code
(`records.resizing`), both with and without offloading of its saved tensors until the backward reads them. They are
offloaded only if the step does not fit otherwise.

Eager PyTorch holds more than a captured graph that recomputes nothing, for example dropout masks as floats. The first
eager step shows how much more; it must be small enough to fit in any case. Larger steps correct the ratio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil
from typing import Any

from ..calls.module_call import ModuleCall
from ..housekeeping import Latest
from ..measuring.saved_offload import LEAST_OFFLOAD
from ..records.costs import in_eager
from ..records.graph import OUTSIDE, bytes_of
from ..records.offload import can_be_offloaded
from ..records.resizing import Resizing, Sample
from ..records.schedule import eager_decisions, lower
from ..records.simulation import Allocations, allocations
from .recorded_step import RecordedStep
from .step_signature import EAGER_TRIES, StepSignature

# Ratios of growing bytes (all but gradients, which don't grow with sizes) in eager PyTorch to growing bytes in the
# captured graph:
UNMEASURED_RATIO = 1.3  # before an eager step was measured
RANDOM_RATIO = 1.5  # likewise for code with random operators: eager PyTorch may keep their results in a larger type
COUNTED_DRAW = "aten.native_dropout.default"  # an exception: the graph counts its masks as eager PyTorch keeps them
UNMEASURED_WAY_RATIO = 1.1  # at least, with offloading, if only steps without it were measured
LEAST_RATIO = 1.03  # at least, after an eager step was measured
CLEARLY_LARGER = 1.1  # measure a step that is predicted to take so many times as much as each measured one,
NEAR = 0.5  # and at least this share of its room
SIMILAR = 0.5  # compare steps of at least this share of the bytes of the largest measured one
COMPARED = 16  # number of measured steps that are kept, the largest
SAMPLES = 4  # number of sizes of one code that a prediction is made from
ROUNDING = 1.01  # factor for the blocks of an allocator
OFFLOAD_BYTES_PER_MS = 3e6  # bytes offloaded and brought back in a millisecond; on a CPU, in files that are used again


class SavedTensors(Enum):
    """Where an eager step holds its saved tensors until the backward reads them."""

    IN_MEMORY = "in memory"
    OFFLOADED = "offloaded"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory of an eager step."""

    saved: SavedTensors  # where it holds its saved tensors
    added_bytes: int  # most bytes that it adds to the resident bytes at its peak
    captured_bytes: int  # most bytes that its captured graph would add
    offloaded_bytes: int = 0  # most bytes that it offloads

    @property
    def extra_ms(self) -> float:
        """The time in milliseconds that offloading adds."""
        return self.offloaded_bytes / OFFLOAD_BYTES_PER_MS


@dataclass(frozen=True, eq=False)
class LearnedStep:
    """A captured step from which predictions are made."""

    calls: tuple[ModuleCall, ...]  # types and shapes of the tensors of each call of a planned module, in order
    code: StepSignature  # equal for all steps that run the same code, at any sizes (`StepSignature.of_code`)
    step: RecordedStep  # the recorded step

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all its values."""
        return self.step.bytes_from(0)

    def takes_as(self, other: LearnedStep) -> bool:
        """Whether predictions from it are those from another record of the same step."""
        is_same = self.calls == other.calls and self.step.calls is other.step.calls
        return is_same and (self.step.margin_bytes, self.step.state) == (other.step.margin_bytes, other.step.state)

    def sample(self, count: int) -> Sample:
        """Return the step as one graph, with the shapes of the arguments of its first calls as sizes."""
        merged, storages = self.step.merge(), sum(len(call.call.graph.storages) for call in self.step.calls)
        return Sample(_shapes(self.calls[:count]), merged.graph, merged.profile, storages)


@dataclass(frozen=True, slots=True)
class _Takes:
    """The bytes that captured code takes at some sizes."""

    peaks: tuple[int, int]  # lower and upper bound of its peak
    growing: tuple[int, int]  # the bytes of each bound without gradients: they grow with the sizes, in eager more
    offloaded_bytes: int  # most bytes that are offloaded


class _EagerCode:
    """The memory of steps of the same code, as a function of the sizes of their first calls.

    Attributes:
        offload: The storages that can be offloaded.
        margin_bytes: The largest margin of such a step, for peaks measured above the prediction.
        unmeasured_ratio: The ratio of growing bytes in eager PyTorch to those here, until an eager step was measured.
    """

    def __init__(self, steps: Sequence[LearnedStep], count: int) -> None:
        samples = [step.sample(count) for step in steps]
        base, self._resizing = samples[0], Resizing(samples)
        # On a CPU, values that are read back from files occupy the same memory again.
        self._is_on_host = steps[0].step.calls[0].captured.device.type == "cpu"
        self._gradient_bytes = bytes_of(self._resizing.graph, self._resizing.graph.gradients)
        self.offload = sorted(can_be_offloaded(self._resizing.graph, base.storages))
        self._graph, _ = in_eager(base.graph, base.profile)
        draws = any(node.is_random and node.op not in (OUTSIDE, COUNTED_DRAW) for node in base.graph.nodes)
        self.unmeasured_ratio = RANDOM_RATIO if draws else UNMEASURED_RATIO
        self.margin_bytes = max(captured.step.margin_bytes for captured in steps)

    @cached_property
    def _eager(self) -> Allocations:
        return allocations(self._graph, lower(self._graph, eager_decisions(self._graph)))

    @cached_property
    def _offloading(self) -> Allocations:
        schedule = lower(self._graph, eager_decisions(self._graph))
        return allocations(self._graph, schedule, self.offload, () if self._is_on_host else self.offload)

    def at(self, sizes: tuple[int, ...], saved: SavedTensors) -> _Takes:
        """Return the bytes that it takes at some sizes."""
        is_offloaded = saved is SavedTensors.OFFLOADED
        bounds, allocated = self._resizing.at(sizes), self._offloading if is_offloaded else self._eager
        offloaded = bounds.high[self.offload if is_offloaded else []]
        low = allocated.peak_bytes(bounds.low, bounds.low_workspaces)
        high = allocated.peak_bytes(bounds.high, bounds.high_workspaces)
        high += int(offloaded[offloaded < LEAST_OFFLOAD].sum())  # smaller storages are not offloaded
        growing = max(low // 10, low - self._gradient_bytes), max(high // 10, high - self._gradient_bytes)
        return _Takes((low, high), growing, int(offloaded.sum()))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A measured eager step: its calls, its likely signature, and the bytes that it added at its peak."""

    calls: tuple[ModuleCall, ...]
    likely: StepSignature
    added_bytes: int


class EagerPredictions:
    """Predicts the memory of eager steps at sizes without a plan, and corrects predictions by measured steps."""

    def __init__(self) -> None:
        self._learned: dict[StepSignature, LearnedStep] = {}  # planned steps from which predictions are made
        self._foreseen = deque[LearnedStep](maxlen=SAMPLES)
        self._codes = Latest[tuple[object, ...], _EagerCode](16)
        self._predicted = Latest[tuple[object, ...], Prediction | None](1024)
        self._measured: dict[SavedTensors, list[_Measured]] = {}  # measured steps
        self._largest_bytes: dict[SavedTensors, int] = {}  # captured bytes of the largest measured step
        self._tries = 0  # steps measured in a row without showing their peak
        self._ratios: dict[tuple[SavedTensors, float], float] = {}

    def learn(self, signature: StepSignature) -> None:
        """Predict also from the step of a planned signature; replace an older record of it."""
        earlier = self._learned.get(signature)
        step = LearnedStep(signature.calls or (), signature.of_code, signature.recorded)
        if earlier is None or not step.takes_as(earlier):
            self._learned[signature] = step
            self._forget_predictions()

    def learn_foreseen(self, step: LearnedStep) -> None:
        """Predict also from a captured step without its own plan, if its code has few such steps or smaller ones."""
        known_bytes = [other.total_bytes for other in self._foreseen if other.code == step.code]
        if len(known_bytes) < SAMPLES or step.total_bytes > max(known_bytes):
            self._foreseen.append(step)
            self._forget_predictions()

    def _forget_predictions(self) -> None:
        self._predicted.clear()
        self._ratios.clear()

    def called_like(self, calls: Sequence[ModuleCall]) -> list[StepSignature]:
        """List the planned signatures whose first calls had the types and shapes of these calls."""
        called, count = tuple(calls), len(calls)
        planned = ((signature, step) for signature, step in self._learned.items() if signature.plan is not None)
        return [signature for signature, step in planned if step.calls[:count] == called]

    def predict(
        self, calls: Sequence[ModuleCall], likely: StepSignature, room_bytes: int, saved: SavedTensors | None = None
    ) -> Prediction | None:
        """Predict the memory of the step under way if it runs eager.

        Args:
            calls: Types and shapes of the tensors of its calls so far.
            likely: The signature whose code it most likely runs.
            room_bytes: Most bytes that it may add to the resident bytes.
            saved: Where it holds its saved tensors; None to offload them only if it does not fit otherwise.

        Returns:
            The prediction; None if the step may not fit.
        """
        key = tuple(calls), likely, room_bytes, saved
        return self._predicted.get_or(key, lambda: self._predict(*key))

    def _predict(
        self, calls: tuple[ModuleCall, ...], likely: StepSignature, room_bytes: int, asked: SavedTensors | None
    ) -> Prediction | None:
        codes = self._codes_called(calls, likely)
        if not codes:
            return None
        ways = tuple(SavedTensors) if codes[0].offload else (SavedTensors.IN_MEMORY,)
        for saved in ways if asked is None else (asked,):
            predictions = [self._takes(code, _sizes(calls), saved) for code in codes]  # the step may run any of these
            most = max(predictions, key=lambda prediction: prediction.added_bytes)
            if most.added_bytes <= room_bytes:
                return most
        return None

    def with_margin(self, added_bytes: int) -> int:
        """Return the bytes of an eager step, from those of its captured graph."""
        return ceil(added_bytes * self._ratio(SavedTensors.IN_MEMORY, RANDOM_RATIO))

    def _takes(self, code: _EagerCode, sizes: tuple[int, ...], saved: SavedTensors) -> Prediction:
        takes = code.at(sizes, saved)
        excess_bytes = (self._ratio(saved, code.unmeasured_ratio) - 1) * takes.growing[1]
        added_bytes = ceil(ROUNDING * (takes.peaks[1] + excess_bytes)) + code.margin_bytes
        return Prediction(saved, added_bytes, takes.peaks[1], takes.offloaded_bytes)

    def _codes_called(self, calls: tuple[ModuleCall, ...], likely: StepSignature) -> list[_EagerCode]:
        """List the codes whose first calls look like these, the likely signature's first; none if it is not among them.

        Steps with a size of 0 are left out, unless these calls have it too: bytes don't follow from a size of 0.
        """
        form, count, sizes = _form(calls), len(calls), _sizes(calls)
        steps_of = dict[StepSignature, list[LearnedStep]]()
        for step in (*self._learned.values(), *self._foreseen):
            begun = step.calls[:count]
            if _form(begun) == form and all(
                known_size or not size for known_size, size in zip(_sizes(begun), sizes, strict=True)
            ):
                steps_of.setdefault(step.code, []).append(step)
        first = self._learned[likely].code if likely in self._learned else likely
        if first not in steps_of:
            return []
        codes = [first, *(code for code in steps_of if code != first)]
        return [self._code(steps_of[code], count) for code in codes]

    def _code(self, steps: Sequence[LearnedStep], count: int) -> _EagerCode:
        """Return the memory of a code, by its largest step and the latest ones with other sizes."""
        largest = max(steps, key=lambda step: step.total_bytes)
        latest = {step.calls: step for step in steps if step.calls != largest.calls}
        chosen = largest, *list(latest.values())[1 - SAMPLES :]
        return self._codes.get_or((chosen, count), lambda: _EagerCode(chosen, count))

    # ---------------------------------------------------------------- measured steps

    def is_to_be_measured(self, prediction: Prediction, room_bytes: int) -> bool:
        """Whether to measure an eager step: it takes much of its room, and clearly more than each measured step."""
        is_larger = prediction.captured_bytes > CLEARLY_LARGER * self._largest_bytes.get(prediction.saved, 0)
        return 0 < self._tries < EAGER_TRIES or (is_larger and prediction.added_bytes > NEAR * room_bytes)

    def measured(
        self, calls: Sequence[ModuleCall], likely: StepSignature, prediction: Prediction, added_bytes: int | None
    ) -> None:
        """Correct predictions by the bytes that a step added at its peak; None if the measurement missed some frees."""
        self._tries += 1
        saved = prediction.saved
        if added_bytes is not None:
            measured = [*self._measured.get(saved, ()), _Measured(tuple(calls), likely, added_bytes)]
            self._measured[saved] = sorted(measured, key=lambda step: step.added_bytes)[-COMPARED:]
            self._forget_predictions()
        if added_bytes is not None or self._tries == EAGER_TRIES:
            self._largest_bytes[saved] = max(self._largest_bytes.get(saved, 0), prediction.captured_bytes)
            self._tries = 0

    def _ratio(self, saved: SavedTensors, unmeasured: float) -> float:
        """Return the ratio of growing bytes in eager PyTorch to those in the captured graph.

        It is `unmeasured` until an eager step was measured.
        """
        if (saved, unmeasured) not in self._ratios:
            compared = [self._compare(saved, measured) for measured in self._measured.get(saved, ())]
            largest_bytes = max((size_bytes for size_bytes, _ in compared), default=0.0)
            similar = [ratio for size_bytes, ratio in compared if size_bytes >= SIMILAR * largest_bytes]
            others = (self._ratio(way, unmeasured) for way in self._measured if way is not saved and not largest_bytes)
            least = UNMEASURED_WAY_RATIO if saved is SavedTensors.OFFLOADED and self._measured else unmeasured
            self._ratios[saved, unmeasured] = max([LEAST_RATIO, *similar]) if largest_bytes else max([least, *others])
        return self._ratios[saved, unmeasured]

    def _compare(self, saved: SavedTensors, measured: _Measured) -> tuple[int, float]:
        """Return the growing bytes of a measured eager step, by its captured graph, and the ratio of eager to captured.

        The bytes of the captured graph are only bounded: the ratio to their lower bound is the worst case. It counts up
        to the unmeasured ratio, and beyond that only as far as the ratio to the upper bound.
        """
        sizes = _sizes(measured.calls)
        for code in self._codes_called(measured.calls, measured.likely)[:1]:
            takes = code.at(sizes, saved)
            if takes.growing[0]:
                pairs = zip(takes.peaks, takes.growing, strict=True)
                excess = [(measured.added_bytes - peak) / growing for peak, growing in pairs]
                return takes.growing[0], 1 + min(excess[0], max(code.unmeasured_ratio - 1, excess[1]))
        return 0, 0.0


def _form(calls: Sequence[ModuleCall]) -> tuple[tuple[Any, ...], ...]:
    return tuple((call.name, call.dtypes, tuple(map(len, call.shapes))) for call in calls)


def _shapes(calls: Sequence[ModuleCall]) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for call in calls for shape in call.shapes)


def _sizes(calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    return tuple(size for shape in _shapes(calls) for size in shape)
