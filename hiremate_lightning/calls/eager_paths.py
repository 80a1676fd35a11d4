"""Let models of other packages do while they are captured what they do in plain training.

Some ask whether torch.compile traces them, and then compute the same in another way, with other last bits: transformers
builds attention masks that plain training finds to be superfluous, which chooses another attention kernel, and scans in
parallel what plain training scans in order. A plan gives the numbers of plain training, so these are told that nobody
traces. Where their path depends on the values of a tensor, the step is captured in several graphs instead of one.

To answer all questions in this way would not do: most ask in order to avoid what can't be captured.

Other functions are such that torch.compile gives up in the middle of them, although all that they do with tensors can
be captured: how tensorly finds the order of a contraction, for neural operators. Their operations are captured without
a look at their code.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

QUESTIONS = (  # module, and the function by which it asks whether it is traced
    ("transformers.masking_utils", "is_tracing"),
    ("transformers.models.falcon_mamba.modeling_falcon_mamba", "is_torchdynamo_compiling"),
    ("transformers.models.jamba.modeling_jamba", "is_torchdynamo_compiling"),
    ("transformers.models.mamba.modeling_mamba", "is_torchdynamo_compiling"),
    ("transformers.models.zamba.modeling_zamba", "is_torchdynamo_compiling"),
)
OPAQUE = (("tensorly", "einsum"),)  # module and function, which depends on nothing but its arguments

_lock = threading.Lock()
_replaced: list[tuple[ModuleType, str, Any]] = []
_users = 0


def _no(*_: object) -> bool:
    """Answer that nobody traces."""
    return False


@contextmanager
def eager_paths() -> Iterator[None]:
    """Capture what plain training runs: of modules that are imported already, others can't be called.

    Questions are answered with no inside only. What is opaque stays so: it serves every use of torch.compile.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore()


def _replace() -> None:
    for name, question in QUESTIONS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, question):
            _replaced.append((module, question, getattr(module, question)))
            setattr(module, question, _no)
    for name, function in OPAQUE:
        if name in sys.modules and (found := getattr(sys.modules[name], function, None)) is not None:
            torch.compiler.allow_in_graph(found)


def _restore() -> None:
    while _replaced:
        module, question, answer = _replaced.pop()
        setattr(module, question, answer)
