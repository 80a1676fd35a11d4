"""What PyTorch prints where code in a graph module fails: a traceback, though the failure may be met and mended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
