"""Windows that are added up: `torch.istft` captured whole, with the numbers of eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning.torch_private import eager_tracing
from tests.exact import captured_by, network, simple_loop, train_both

LENGTH, WINDOW = 1_000, 64

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "odd hops": {"hop_length": 19},
    "short windows": {"hop_length": 10, "win_length": 40},
    "cut": {"length": LENGTH - 11},
    "both sides": {"onesided": False},
    "by root": {"normalized": True},
    "not centered": {"center": False},
}


def hops(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "length"}


def window_of(options: dict[str, Any]) -> Tensor:
    return torch.hann_window(options.get("win_length", WINDOW)) + 0.1


@pytest.mark.parametrize("shape", [(LENGTH,), (3, LENGTH)], ids=["one", "three"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_result_and_its_gradient_are_those_of_pytorch(options, shape):
    window, signal = window_of(options).requires_grad_(), torch.randn(shape)
    spectra = torch.stft(signal, WINDOW, window=window.detach(), return_complex=True, **hops(options)).requires_grad_()
    found, expected = (
        (result, *torch.autograd.grad(result.square().sum(), (spectra, window)))
        for result in (f(spectra, WINDOW, window=window, **options) for f in (eager_tracing.istft, torch.istft))
    )
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def test_complex_results_are_those_of_pytorch():
    spectra, window = torch.randn(2, WINDOW, 20, dtype=torch.complex64), torch.hann_window(WINDOW)
    found, expected = (
        f(spectra.conj(), WINDOW, window=window, return_complex=True) for f in (eager_tracing.istft, torch.istft)
    )
    assert torch.equal(found, expected)


def test_a_result_that_is_too_short_is_padded_with_a_warning():
    spectra = torch.randn(WINDOW // 2 + 1, 20, dtype=torch.complex64)
    with pytest.warns(
        UserWarning, match=r"The length of signal is shorter than the length parameter\. Result is being"
    ):
        found, expected = (
            f(spectra, WINDOW, window=torch.ones(WINDOW), length=LENGTH) for f in (eager_tracing.istft, torch.istft)
        )
    assert torch.equal(found, expected)


@network(
    lambda **options: {
        "weight": nn.Parameter(torch.randn(WINDOW if options.get("onesided") is False else WINDOW // 2 + 1, 1)),
        "window": window_of(options),
        "options": options,
    }
)
def weighted(self, x: Tensor) -> Tensor:
    """Weights the frequencies of a signal."""
    spectra = torch.stft(x, WINDOW, window=self.window, return_complex=True, **hops(self.options))
    return torch.istft(spectra * self.weight, WINDOW, window=self.window, **self.options)


@pytest.mark.parametrize(
    ("options", "more"), [*((o, 0) for o in OPTIONS.values()), ({}, 50)], ids=[*OPTIONS, "lengths vary"]
)
def test_training_is_exact(options, more):
    loop = simple_loop(lambda index: torch.randn(2, LENGTH + more * index), steps=5 if more else 4)
    train_both(lambda: weighted(**options), loop, "100%")


def test_windows_that_leave_gaps_are_an_error_as_in_eager():
    module = weighted(hop_length=10)
    with torch.no_grad():
        module.window[5:].zero_()
    with pytest.raises(RuntimeError, match="window"):
        module(torch.randn(2, LENGTH))
    with pytest.raises(RuntimeError, match="leave gaps"):
        captured_by(module, torch.randn(2, LENGTH))
