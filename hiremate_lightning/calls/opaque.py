"""Functions of other packages whose operations are captured without a look at their code.

torch.compile gives up in the middle of them, although all that they do with tensors can be captured: how tensorly finds
the order of a contraction, for neural operators.
"""

from __future__ import annotations

import sys

import torch

OPAQUE = (("tensorly", "einsum"),)  # module and function, which depends on nothing but its arguments


def capture_opaque() -> None:
    """Capture opaque functions whole: of modules that are imported already, others can't be called."""
    for name, function in OPAQUE:
        opaque = getattr(sys.modules.get(name), function, None)
        if opaque is not None:
            torch.compiler.allow_in_graph(opaque)
