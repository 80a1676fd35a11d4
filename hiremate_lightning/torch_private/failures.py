"""What failures leave behind: text that graph modules print, and guards of PyTorch's dispatcher in frames."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import graph_module

log = logging.getLogger("hiremate_lightning")


@contextmanager
def not_printed() -> Iterator[None]:
    """Log at debug level, for a while, what graph modules print of a failure in them."""
    names = vars(graph_module)
    found = names.get("print", print)

    def tell(text: str, **_: Any) -> None:
        log.debug("%s", text)

    names["print"] = tell
    try:
        yield
    finally:
        if found is print:
            del names["print"]
        else:
            names["print"] = found


@contextmanager
def releasing_frames() -> Iterator[None]:
    """Clear the frames of an error on its way through.

    A frame may hold a guard of PyTorch's dispatcher (`_tensor_str._str` has one), which sets the keys of its time again
    whenever it is collected: those of a transform of torch.func that is long over.
    """
    try:
        yield
    except BaseException as error:
        with torch._C._PreserveDispatchKeyGuard():
            for met in _chain(error):
                traceback.clear_frames(met.__traceback__)
        raise


def _chain(error: BaseException | None) -> list[BaseException]:
    """List an error with those that it was raised from, or while it handled them."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
