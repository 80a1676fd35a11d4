"""Windows that are added up, as `torch.istft` does: captured whole, by the operators that eager PyTorch runs.

PyTorch's Python version of `istft` adds up the windows' squares by other operators than its C++ does; the C++ looks at
their sum, which ends a graph. And torch finds the shape of a sum of windows, where these don't come as `Tensor.unfold`
gives them, by tracing one addition for each place of a window: a minute for windows of a thousand samples. PyTorch's
tables are private; `test_torch_private.py` says on which versions this was checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import meta_table
from torch._subclasses.fake_impls import op_implementations_dict

aten = torch.ops.aten

FOLD = aten.unfold_backward.default
BY_ROOT_OF_LENGTH, BY_LENGTH = 1, 2  # how at::native::fft_norm_mode numbers the norms of an inverse transform
SMALLEST = 1e-11  # of the squares' sum, below which eager PyTorch divides by no window


@contextmanager
def shaped_at_once() -> Iterator[None]:
    """Trace sums of windows by their shape, without a look at the windows, for a while."""
    if FOLD in meta_table:  # torch has a rule of its own, or this is on already
        yield
        return
    meta_table[FOLD] = op_implementations_dict[FOLD] = _empty_sum  # the first keeps torch from its decomposition
    try:
        yield
    finally:
        del meta_table[FOLD], op_implementations_dict[FOLD]


def _empty_sum(mode: Any, _: Any, windows: torch.Tensor, sizes: Sequence[int], *__: int) -> torch.Tensor:
    with mode:
        return windows.new_empty(sizes)


def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """Do what PyTorch's `istft` does, by its operators in its order; its check of the windows is one of the graph."""
    hop_length = n_fft // 4 if hop_length is None else hop_length
    win_length = n_fft if win_length is None else win_length
    spectra = torch.view_as_real(input.resolve_conj())
    window = spectra.new_ones(win_length) if window is None else window
    if win_length != n_fft:
        left = (n_fft - win_length) // 2
        window = aten.constant_pad_nd(window, [left, n_fft - win_length - left], 0)
    is_single = input.dim() == 2
    spectra = torch.view_as_complex((spectra.unsqueeze(0) if is_single else spectra).transpose(1, 2))
    frames, norm = spectra.shape[1], BY_ROOT_OF_LENGTH if normalized else BY_LENGTH
    if return_complex:
        parts = aten._fft_c2c(spectra, [2], norm, False)
    else:
        is_whole = onesided is False or (onesided is None and spectra.shape[2] == n_fft)
        parts = aten._fft_c2r(spectra[..., : n_fft // 2 + 1] if is_whole else spectra, [2], norm, n_fft)
    end = n_fft + hop_length * (frames - 1)
    start = n_fft // 2 if center else 0
    stop = start + length if length is not None else -(n_fft // 2) if center else end
    parts = parts * window.view(1, 1, n_fft)
    sums = FOLD(parts, [parts.shape[0], end], 1, n_fft, hop_length)[:, start:stop]
    squares = FOLD(window.pow(2).expand(1, frames, n_fft), [1, end], 1, n_fft, hop_length)[:, start:stop]
    torch._assert_async(
        squares.abs().min().ge(SMALLEST), "istft: the windows leave gaps, their squares' sum is 0 somewhere"
    )
    result: torch.Tensor = sums / squares
    result = result.squeeze(0) if is_single else result
    if stop > end:
        warnings.warn(
            "The length of signal is shorter than the length parameter. Result is being padded with zeros in the tail. "
            "Please check your center and hop_length settings",  # as eager does
            stacklevel=2,
        )
        result = aten.constant_pad_nd(result, [0, stop - end], 0)
    return result
