"""Steps of other sizes that run as the user wrote them, uncaptured, since they are known to fit the budget so.

To capture a size takes seconds. What an eager step takes at a new size follows from captured steps of the same code
(`records.resizing`), and so does what it takes where all that autograd saves is offloaded until the backward reads it.
It is offloaded only where the step does not fit as it is.

Eager PyTorch holds more than a captured graph with nothing recomputed: masks of dropouts as floats, for example. By how
much shows the first eager step, which must be small enough that it fits in any case, and larger ones correct it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from ..calls.given import ModuleCall
from ..housekeeping import Latest
from ..measuring.saved_offload import LEAST_OFFLOAD
from ..records.costs import in_eager
from ..records.graph import OUTSIDE, bytes_of
from ..records.offload import can_be_offloaded
from ..records.resizing import Resizing, Sample
from ..records.schedule import eager_decisions, lower
from ..records.simulation import Allocations, allocations
from .recorded_step import RecordedStep
from .step_signature import StepSignature

UNMEASURED_RATIO = 1.3  # of what grows with the sizes in eager PyTorch to the same in the captured graph
RANDOM_RATIO = 1.5  # the same where the code draws: eager PyTorch may keep what it draws in a larger type
COUNTED_DRAW = "aten.native_dropout.default"  # its masks count as eager PyTorch keeps them
UNMEASURED_WAY_RATIO = 1.1  # the same, at least, of a way that was not measured: or the most of those that were
LEAST_RATIO = 1.03  # where it was measured
TRIES = 4  # steps to measure in a row: on a CPU the first one does not see all that is freed
CLEARLY_LARGER = 1.1  # than all that were measured: such a step is measured too,
NEAR = 0.5  # where it is predicted to take as much of its room, or more
SIMILAR = 0.5  # of the largest step that was measured: smaller ones tell less, and are not compared any more
COMPARED = 16  # steps that were measured: the largest
SAMPLES = 4  # sizes of one code that predictions are made from
ROUNDING = 1.01  # an allocator's blocks
OFFLOAD_BYTES_PER_MS = 3e6  # that are offloaded and brought back: on a CPU, in files that are used again


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an eager step takes."""

    # Whether all that autograd saves is offloaded until the backward reads it: that takes less memory than plain
    # PyTorch, and more time.
    saves_memory: bool
    added_bytes: int  # what it adds to the resident bytes at its peak, at most
    captured_bytes: int  # at most that much the captured graph would take of it
    offloaded_bytes: int = 0  # what it offloads, at most

    @property
    def extra_ms(self) -> float:
        """The time that it takes beyond plain PyTorch's."""
        return self.offloaded_bytes / OFFLOAD_BYTES_PER_MS


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step that was captured."""

    calls: tuple[ModuleCall, ...]  # what each call of a planned module was given in it, in order
    code: StepSignature  # stands for its code: equal for all steps that run the same code, at whatever sizes
    step: RecordedStep  # what it ran

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all its values."""
        return self.step.bytes_from(0)

    def takes_as(self, other: CapturedStep) -> bool:
        """Whether it takes what another description of the same step tells."""
        is_same = self.calls == other.calls and self.step.calls is other.step.calls
        return is_same and (self.step.margin_bytes, self.step.state) == (other.step.margin_bytes, other.step.state)

    def sample(self, count: int) -> Sample:
        """Return the step as one graph, whose inputs are what its first calls were given."""
        merged, storages = self.step.merge(), sum(len(call.call.graph.storages) for call in self.step.calls)
        return Sample(_shapes(self.calls[:count]), merged.graph, merged.profile, storages)


@dataclass(frozen=True, slots=True)
class _Takes:
    """What captured code takes at some sizes."""

    peaks: tuple[int, int]  # its peak, bounded from below and from above
    growing: tuple[int, int]  # what of these grows with the sizes: in eager PyTorch it is larger
    offloaded_bytes: int  # what is offloaded, at most


class _EagerCode:
    """Steps of the same code, as far as their first calls tell them apart.

    Attributes:
        offload: The storages that can be offloaded.
        margin_bytes: By how much such a step was measured above what was predicted.
        unmeasured_ratio: The ratio of what grows with the sizes in eager PyTorch to the same here, as long as none was
            measured.
    """

    def __init__(self, steps: Sequence[CapturedStep], count: int) -> None:
        samples = [step.sample(count) for step in steps]
        base, self._resizing = samples[0], Resizing(samples)
        # Of a CPU, files that were offloaded lie in its own memory.
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

    def at(self, sizes: tuple[int, ...], saves: bool) -> _Takes:
        """Return what it takes at some sizes, where it saves memory or not."""
        bounds, allocated = self._resizing.at(sizes), self._offloading if saves else self._eager
        offloaded = bounds.high[self.offload if saves else []]
        low = allocated.peak_bytes(bounds.low, bounds.low_workspaces)
        high = allocated.peak_bytes(bounds.high, bounds.high_workspaces)
        high += int(offloaded[offloaded < LEAST_OFFLOAD].sum())  # what is too small to be offloaded stays
        growing = max(low // 10, low - self._gradient_bytes), max(high // 10, high - self._gradient_bytes)
        return _Takes((low, high), growing, int(offloaded.sum()))


@dataclass(frozen=True, slots=True)
class _Measured:
    """An eager step that was measured: what its calls were given, and what it added."""

    calls: tuple[ModuleCall, ...]
    likely: StepSignature
    added_bytes: int


class EagerPredictions:
    """Predicts what eager steps take at sizes that were not planned, and corrects that by what is measured."""

    def __init__(self) -> None:
        self._learned: dict[StepSignature, CapturedStep] = {}  # that predictions are made from
        self._foreseen = deque[CapturedStep](maxlen=SAMPLES)
        self._codes: dict[tuple[StepSignature, int], tuple[tuple[CapturedStep, ...], _EagerCode]] = {}
        self._predicted = Latest[tuple[object, ...], Prediction | None](1024)
        self._measured: dict[bool, list[_Measured]] = {}  # by whether they saved memory
        self._largest_bytes: dict[bool, int] = {}  # that were measured, likewise
        self._tries = 0
        self._ratios: dict[tuple[bool, float], float] = {}

    def learn(self, signature: StepSignature) -> None:
        """Learn what a planned step signature takes, where that is not known yet."""
        known = self._learned.get(signature)
        step = CapturedStep(signature.calls or (), signature.of_code, signature.recorded)
        if known is None or not step.takes_as(known):
            self._learned[signature] = step
            self._forget_predictions()

    def learn_foreseen(self, step: CapturedStep) -> None:
        """Learn what a step takes that ran captured and has no plan of its own: a few of each code, and larger ones."""
        known = [other.total_bytes for other in self._foreseen if other.code == step.code]
        if len(known) < SAMPLES or step.total_bytes > max(known):
            self._foreseen.append(step)
            self._forget_predictions()

    def _forget_predictions(self) -> None:
        self._predicted.clear()
        self._ratios.clear()

    def called_like(self, calls: Sequence[ModuleCall]) -> list[StepSignature]:
        """List the planned signatures whose first calls were given exactly what these are given."""
        called, count = tuple(calls), len(calls)
        planned = ((signature, step) for signature, step in self._learned.items() if signature.plan is not None)
        return [signature for signature, step in planned if step.calls[:count] == called]

    def predict(
        self, calls: Sequence[ModuleCall], likely: StepSignature, room_bytes: int, saves_memory: bool | None = None
    ) -> Prediction | None:
        """Find the fastest way to run the step under way eager.

        Args:
            calls: What its calls were given so far.
            likely: The signature whose code it most likely runs.
            room_bytes: What it may add to the resident bytes.
            saves_memory: Whether it is to save memory; None for the faster that fits.

        Returns:
            What it takes then; None where it may not fit.
        """
        key = tuple(calls), likely, room_bytes, saves_memory
        return self._predicted.get_or(key, lambda: self._predict(*key))

    def _predict(
        self, calls: tuple[ModuleCall, ...], likely: StepSignature, room_bytes: int, saves_memory: bool | None
    ) -> Prediction | None:
        codes = self._codes_called(calls, likely)
        if not codes:
            return None
        ways = (False, True) if codes[0].offload else (False,)
        for saves in ways if saves_memory is None else (saves_memory,):
            predictions = [self._takes(code, _sizes(calls), saves) for code in codes]  # other code may come instead
            most = max(predictions, key=lambda prediction: prediction.added_bytes)
            if most.added_bytes <= room_bytes:
                return most
        return None

    def with_margin(self, added_bytes: int) -> int:
        """Return what an eager step takes, of which the captured graph takes so many bytes."""
        return ceil(added_bytes * self._ratio(False, RANDOM_RATIO))

    def _takes(self, code: _EagerCode, sizes: tuple[int, ...], saves: bool) -> Prediction:
        takes = code.at(sizes, saves)
        excess_bytes = (self._ratio(saves, code.unmeasured_ratio) - 1) * takes.growing[1]
        added_bytes = ceil(ROUNDING * (takes.peaks[1] + excess_bytes)) + code.margin_bytes
        return Prediction(saves, added_bytes, takes.peaks[1], takes.offloaded_bytes)

    def _codes_called(self, calls: tuple[ModuleCall, ...], likely: StepSignature) -> list[_EagerCode]:
        """List the codes whose first calls look like these, that of the likely signature first; none without it.

        A step with an empty input tells nothing of what follows from its size.
        """
        form, count, sizes = _form(calls), len(calls), _sizes(calls)
        steps_of = dict[StepSignature, list[CapturedStep]]()
        for step in (*self._learned.values(), *self._foreseen):
            begun = step.calls[:count]
            if _form(begun) == form and all(
                known or not size for known, size in zip(_sizes(begun), sizes, strict=True)
            ):
                steps_of.setdefault(step.code, []).append(step)
        first = self._learned[likely].code if likely in self._learned else likely
        if first not in steps_of:
            return []
        codes = [first, *(code for code in steps_of if code != first)]
        return [self._code(code, steps_of[code], count) for code in codes]

    def _code(self, code: StepSignature, steps: Sequence[CapturedStep], count: int) -> _EagerCode:
        """Read a code from its largest step and the latest ones, each at sizes of its own."""
        largest = max(steps, key=lambda step: step.total_bytes)
        latest = {step.calls: step for step in steps if step.calls != largest.calls}
        chosen = largest, *list(latest.values())[1 - SAMPLES :]
        read = self._codes.get((code, count))
        if read is None or read[0] != chosen:
            self._codes[code, count] = read = chosen, _EagerCode(chosen, count)
        return read[1]

    # ---------------------------------------------------------------- measured steps

    def is_to_be_measured(self, prediction: Prediction, room_bytes: int) -> bool:
        """Whether to measure an eager step: it takes much of its room, and clearly more than what was measured."""
        is_larger = prediction.captured_bytes > CLEARLY_LARGER * self._largest_bytes.get(prediction.saves_memory, 0)
        return 0 < self._tries < TRIES or (is_larger and prediction.added_bytes > NEAR * room_bytes)

    def measured(
        self, calls: Sequence[ModuleCall], likely: StepSignature, prediction: Prediction, added_bytes: int | None
    ) -> None:
        """Learn what a step added at its peak that was predicted; None where the measurement did not see all."""
        self._tries += 1
        saves = prediction.saves_memory
        if added_bytes is not None:
            measured = [*self._measured.get(saves, ()), _Measured(tuple(calls), likely, added_bytes)]
            self._measured[saves] = sorted(measured, key=lambda step: step.added_bytes)[-COMPARED:]
            self._forget_predictions()
        if added_bytes is not None or self._tries == TRIES:
            self._largest_bytes[saves] = max(self._largest_bytes.get(saves, 0), prediction.captured_bytes)
            self._tries = 0

    def _ratio(self, saves: bool, unmeasured: float) -> float:
        """Return the ratio of what grows with the sizes in eager PyTorch to the same in the captured graph.

        That is `unmeasured` as long as no step was measured.
        """
        if (saves, unmeasured) not in self._ratios:
            compared = [self._compare(saves, measured) for measured in self._measured.get(saves, ())]
            largest_bytes = max((size_bytes for size_bytes, _ in compared), default=0.0)
            similar = [ratio for size_bytes, ratio in compared if size_bytes >= SIMILAR * largest_bytes]
            others = (self._ratio(way, unmeasured) for way in self._measured if way != saves and not largest_bytes)
            least = UNMEASURED_WAY_RATIO if saves and self._measured else unmeasured
            self._ratios[saves, unmeasured] = max([LEAST_RATIO, *similar]) if largest_bytes else max([least, *others])
        return self._ratios[saves, unmeasured]

    def _compare(self, saves: bool, measured: _Measured) -> tuple[int, float]:
        """Return what grows with the sizes in an eager step that was measured, and its ratio to the captured graph.

        What the captured graph takes is only bounded: at worst the ratio is that to the lower bound. A step that took
        no more than was expected before anything was measured tells nothing worse than that.
        """
        sizes = _sizes(measured.calls)
        for code in self._codes_called(measured.calls, measured.likely)[:1]:
            takes = code.at(sizes, saves)
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
