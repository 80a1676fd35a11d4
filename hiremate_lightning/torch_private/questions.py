"""Answers to captured code that asks whether it is compiled: no, as in plain PyTorch.

Dynamo answers yes, and code may then compute something else. torch, this package and a few files of others ask only to
be traceable: they get Dynamo's answer. So does what its author compiled (`user_compiled`), as in plain PyTorch.

Some code also asks whether it is captured in a CUDA graph. Planned code never is; Dynamo would end its own graph there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.eval_frame import _is_in_optimized_module
from torch._dynamo.external_utils import is_compiling
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from .hacks import StandIn, replaced_entries

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
    is_compiling,
    _is_in_optimized_module,
)
_OF_CUDA_GRAPHS = tuple(
    module.is_current_stream_capturing
    for module in (torch.cuda, torch.xpu)
    if hasattr(module, "is_current_stream_capturing")
)
# Files of other packages that ask in order to be traceable, and compute the same either way.
SAME_EITHER_WAY = (str(Path("transformers", "utils", "output_capturing.py")),)
_TOOLS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_handlers = TorchInGraphFunctionVariable._get_handlers()
_of_dynamo: dict[Any, Callable[..., Any]] = {question: _handlers[question] for question in _QUESTIONS}


def is_of_tools(file: str) -> bool:
    """Whether a source file is torch's or this package's, not the user's."""
    return file.startswith(_TOOLS)


def _file_of(tracer: Any) -> str:
    return "" if tracer is None else str(tracer.f_code.co_filename)


def _answer(question: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
    """Answer no, except to code that asks in order to be traceable."""
    if question.value in _of_dynamo and (
        is_of_tools(_file_of(tracer)) or _file_of(tracer.parent).endswith(SAME_EITHER_WAY)
    ):
        return _of_dynamo[question.value](question, tracer, *arguments, **named)
    return ConstantVariable.create(False)


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Answer captured code as plain PyTorch does, for a while."""
    rules = dict.fromkeys(_OF_CUDA_GRAPHS, TorchInGraphFunctionVariable)  # some of these are unknown to Dynamo
    answers = dict.fromkeys((*_QUESTIONS, *_OF_CUDA_GRAPHS), _answer)
    with replaced_entries(get_torch_obj_rule_map(), rules), replaced_entries(_handlers, answers):
        yield


def as_compiled() -> AbstractContextManager[None]:
    """Answer captured code as Dynamo does, for a while."""
    return replaced_entries(_handlers, _of_dynamo)


# While torch compiles, it says yes to code that runs, too: to functions that users put into graphs unread.
WHILE_CAPTURING: tuple[StandIn, ...] = ()
if hasattr(torch.compiler, "_compile_session_context"):
    WHILE_CAPTURING = ((torch.compiler, "_compile_session_context", nullcontext),)
