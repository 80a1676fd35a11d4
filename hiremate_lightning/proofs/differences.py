"""Finds where two outcomes of the same code differ, and whether a difference is more than rounding.

A difference counts as rounding if it is at most `ROUNDINGS` units in the last place of the largest value of the tensor;
for a gradient, of the largest of all gradients of the code, since large terms may cancel each other in a gradient. Half
precision gets fewer units: a kernel rounds once, at its end, and a mask scaled wrongly, for example by 1 / 0.9, is off
by only 14 units. Fused kernels keep in single precision values that eager PyTorch rounds to half between its kernels,
so units of half precision count for all results of such code. If kernels add in any order, values may be `TIMES_OWN`
times as far apart as two runs of eager PyTorch, and the difference says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .. import thresholds
from ..torch_private.tensor_state import HALF_PRECISION, is_dense
from .trials import TrialOutcome

ROUNDINGS, HALF_ROUNDINGS = 512, 4
TIMES_OWN = 4  # factor on the distance of two eager runs, which varies if kernels add in any order
CPU, NO_OUTCOME = torch.device("cpu"), TrialOutcome({}, {})
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """A value in which two runs differ: its name and the difference in words, and whether that is only rounding."""

    words: str
    is_rounding: bool = False


def differences(
    expected: TrialOutcome,
    captured: TrialOutcome,
    half: torch.dtype | None = None,
    again: TrialOutcome = NO_OUTCOME,
    refilled: TrialOutcome = NO_OUTCOME,
    device: torch.device = CPU,
) -> tuple[list[Difference], list[Difference]]:
    """Return the values, and the gradients, that differ in any bit in two outcomes; NaN equals NaN.

    Args:
        expected: Outcome of eager PyTorch.
        captured: Outcome of the captured code.
        half: The type of half precision to which eager PyTorch rounds and captured code does not; None for no type.
        again: Outcome of a second run of eager PyTorch.
        refilled: Outcome of eager PyTorch with other bytes in uninitialised memory (`torch.empty`). Values that depend
            on these bytes are not compared.
        device: Where to compare: outcomes are on the host, and a GPU looks at billions of gradients in seconds.
    """
    outcomes = (expected, captured, again, refilled)
    of_values = _Comparison(half, device).among([outcome.values for outcome in outcomes])
    of_gradients = _Comparison(half, device, tuple(expected.gradients.values()))
    return of_values, of_gradients.among([outcome.gradients for outcome in outcomes])


@dataclass
class _Comparison:
    """Compares values, up to the largest difference that counts as rounding."""

    half: torch.dtype | None  # a type of half precision to which one of two values was rounded; None for no type
    device: torch.device  # device on which values are compared
    others: Sequence[Any] = ()  # values whose largest one sets the unit, if it is larger than that of the tensor

    def among(self, outcomes: Sequence[Mapping[str, Any]]) -> list[Difference]:
        """Compare the values of four outcomes by name: expected, captured, again, refilled, as in `differences`."""
        expected, captured, again, refilled = outcomes
        differing = []
        for name in dict.fromkeys((*expected, *captured)):
            one, other, second = (values.get(name) for values in (expected, captured, again))
            if name in refilled:
                other = self._written(one, other, second, refilled[name])
            difference = self._compare(name, one, other, second)
            differing += [] if difference is None else [difference]
        return differing

    def _written(self, expected: Any, captured: Any, again: Any, refilled: Any) -> Any:
        """Return captured values, but expected ones in places that depend on uninitialised memory."""
        tensors = [expected, captured, refilled]
        if not all(map(is_dense, tensors)) or len({(value.shape, value.dtype) for value in tensors}) > 1:
            return captured
        if captured.is_quantized:
            return captured
        same = _as_bits(expected) == _as_bits(refilled)
        if _has_fractions(expected):  # kernels that add in any order may round differently
            most = max(math.prod(self._unit(expected)), TIMES_OWN * self._own(expected, again))
            same |= (_as_real(expected) - _as_real(refilled)).abs() <= most
        return torch.where(same.all(-1) if captured.is_complex() else same, captured, expected)

    def _compare(self, name: str, expected: Any, captured: Any, again: Any) -> Difference | None:
        are_tensors = isinstance(expected, torch.Tensor) and isinstance(captured, torch.Tensor)
        if not are_tensors or _kind(expected) != _kind(captured):
            is_same = not are_tensors and type(expected) is type(captured) and expected == captured
            words = f"{name} is {_brief(captured)} where eager PyTorch has {_brief(expected)}"
            return None if expected is captured or is_same else Difference(words)
        if expected.layout is not torch.strided:
            expected, captured = expected.to_dense(), captured.to_dense()
        apart = None if expected.is_quantized else _apart(expected, captured, self.device)
        return None if apart is None else self._difference(name, expected, again, apart)

    def _difference(self, name: str, expected: torch.Tensor, again: Any, apart: _Apart) -> Difference:
        values = expected.numel() * (2 if expected.is_complex() else 1)
        words = f"{name} has {apart.other:.9g} where eager PyTorch has {apart.expected:.9g}"
        words += f", {apart.count} of {values} values differ"
        if not _has_fractions(expected):
            return Difference(words)
        (size, most), own = self._unit(expected), self._own(expected, again)
        if apart.most > max(size * most, TIMES_OWN * own):
            return Difference(words)
        units = apart.most / size if size else 0.0
        words += f", by at most {apart.most:.2g}: {units:.2g} units in the last place of the largest"
        return Difference(f"{words}; two runs of eager PyTorch differ by {own:.2g}" if own else words, True)

    def _unit(self, expected: torch.Tensor) -> tuple[float, int]:
        """Return the unit in the last place of the largest value, and how many units count as rounding."""
        dtype = self.half if self.half is not None and expected.dtype not in HALF_PRECISION else expected.dtype
        unit = torch.finfo(dtype).eps * max(_largest(expected, self.device), self._largest_other)
        return unit, HALF_ROUNDINGS if dtype in HALF_PRECISION else ROUNDINGS

    @cached_property
    def _largest_other(self) -> float:
        """The largest of the other values, found once: there may be gigabytes of gradients."""
        return max((_largest(value, self.device) for value in self.others), default=0.0)

    def _own(self, expected: torch.Tensor, again: Any) -> float:
        """Return the largest difference of two eager runs; 0 if there is no second run to compare."""
        if not is_dense(again) or again.shape != expected.shape:
            return 0.0
        apart = _apart(expected, again, self.device)
        return apart.most if apart is not None and math.isfinite(apart.most) else 0.0


@dataclass(frozen=True)
class _Apart:
    """How far two tensors are apart."""

    most: float  # the largest difference of two values; infinite if only one of them is NaN
    other: float  # the value of the other tensor at that place
    expected: float  # the value of eager PyTorch at that place
    count: int  # number of values that differ


def _apart(expected: torch.Tensor, other: torch.Tensor, device: torch.device) -> _Apart | None:
    """Compare two tensors; return None if no bit differs, except in two NaN."""
    pieces = [_apart_within(*piece) for piece in _pieces((expected, other), device)]
    differing = [piece for piece in pieces if piece is not None]
    if not differing:
        return None
    return replace(max(differing, key=lambda piece: piece.most), count=sum(piece.count for piece in differing))


def _apart_within(expected: torch.Tensor, other: torch.Tensor) -> _Apart | None:
    if torch.equal(_as_bits(expected), _as_bits(other)):
        return None
    same = expected == other
    if expected.dtype.is_floating_point:
        both_nan = expected.isnan() & other.isnan()
        if bool((same & (torch.signbit(expected) == torch.signbit(other)) | both_nan).all()):
            return None
        same |= both_nan
    apart = (expected.double() - other.double()).abs().nan_to_num(nan=torch.inf)
    apart[same] = 0.0
    where = int(apart.argmax())
    return _Apart(float(apart[where]), float(other[where]), float(expected[where]), int((apart > 0).sum()))


def _pieces(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of the same shape piece by piece, on the device, as vectors of real numbers."""
    flat = [_as_real(tensor).flatten() for tensor in tensors]
    for pieces in zip(*(vector.split(thresholds.current.compared_values) for vector in flat), strict=True):
        yield [piece.to(device) for piece in pieces]


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    real = _as_real(tensor)
    return real if real.dtype is torch.bool else real.view(_BITS[real.element_size()])


def _largest(value: Any, device: torch.device) -> float:
    """Return the largest absolute value of a tensor, infinite ones and NaN left out."""
    if not is_dense(value) or not value.numel():
        return 0.0
    pieces = (piece.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for (piece,) in _pieces([value], device))
    return max(float(piece.abs().max()) for piece in pieces)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return tensor.shape, tensor.dtype, tensor.layout


def _brief(value: Any) -> str:
    """Describe a value in few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return "not there" if value is None else repr(value)[:60]
