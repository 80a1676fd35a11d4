"""The torch.compile backend named "hiremate", registered by an entry point, so that no import is needed.

    model = torch.compile(model, backend="hiremate", options={"budget": "8 GiB"})

Options are those of `hiremate_lightning.hiremate`. All functions and modules compiled with equal options share one
session: their graphs are planned together under one budget, whichever torch.compile call or graph break they come from.
As in every session, the first graph that runs after a backward begins a new step.

The backend gets no module, only the graphs that Dynamo captured. docs/limits.md lists what it therefore lacks in
comparison with `hiremate(model)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..capturing.backend import has_gradients
from ..errors import ConfigurationError, did_you_mean
from ..options import OPTIONS
from ..planning.planner import make_options
from ..reporting.report import calls_for
from ..sessions.session import Session
from ..targets.compiled import CompiledModel, Key, begin, sessions
from ..torch_private import compiled_by_torch
from ..torch_private.tensor_state import is_fake


def hiremate(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured so that its training steps stay within a budget of bytes.

    torch.compile calls this function. The default budget is "auto".

    Args:
        module: The captured graph.
        inputs: The arguments of the graph at capture.
        options: The budget and the other options of `hiremate_lightning.hiremate`, by name; see docs/api.md.
        mode: Must be None, since this backend has no modes.

    Returns:
        The function that runs in the graph's place.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If an option is unknown or out of its range, or a mode is given; at its first run, if the
            graph belongs to a module that `hiremate()` plans.

    Example:
        >>> model = torch.compile(model, backend="hiremate", options={"budget": "8 GiB"})
    """
    if mode is not None:
        raise ConfigurationError(f"The backend 'hiremate' has no modes, found mode={mode!r}. Pass options= instead.")
    checked = _check_names(options or {})
    key = tuple(sorted((name, repr(value)) for name, value in checked.items()))
    callers = compiled_by_torch.under_way()
    equal = [(session, model) for session, model in sessions() if model.key == key]
    # A function whose session was removed keeps that session, and runs eager.
    removed = [(session, model) for session, model in equal if model.is_removed and model.has_any(callers)]
    alive = [(session, model) for session, model in equal if not model.is_removed and not model.is_gone]
    session, model = next(iter(removed + alive), None) or _begin(checked, key, module)
    model.add_callables(callers)
    return module.forward if model.is_removed else _runner(session, model, module, inputs)


def _check_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the default budget filled in; raise a ConfigurationError for unknown names."""
    valid = [name for name in OPTIONS if name != "sizes"]
    if "sizes" in options:
        raise ConfigurationError(
            "The backend 'hiremate' gets graphs, whose arguments have no names for sizes=. Mark the tensors instead, "
            "before the first call: torch._dynamo.mark_dynamic(tensor, dim, min=, max=)."
        )
    unknown = [name for name in options if name not in valid]
    if unknown:
        names, hint = ", ".join(map(repr, unknown)), did_you_mean(unknown[0], valid)
        raise ConfigurationError(
            f"The backend 'hiremate' has no option {names}.{hint} Valid options: {', '.join(valid)}."
        )
    return {"budget": "auto", **options}


def _begin(options: dict[str, Any], key: Key, module: fx.GraphModule) -> tuple[Session, CompiledModel]:
    """Begin a session; its model has the name of the class of the outermost compiled module."""
    stacks = (node.meta.get("nn_module_stack", {}).values() for node in module.graph.nodes)
    kind = next((kind for stack in stacks for _, kind in stack), "compiled function")
    name = kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
    model: CompiledModel = type(name, (CompiledModel,), {})(key)
    session = Session(model, make_options(**options))
    session.expect_wait(0, operations=sum(node.op.startswith("call") for node in module.graph.nodes))
    session.reporter.more = calls_for('options={..., "verbose": "full"}')
    begin(session, model)
    return session, model


def _runner(
    session: Session, model: CompiledModel, module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Capture a graph of Dynamo; return the function that runs it, as part of a training step if it has gradients."""
    placeholders = module.graph.find_nodes(op="placeholder")
    buffers = [position for position, node in enumerate(placeholders) if "_buffers_" in node.name]
    before = session.captured_count
    with session.reporter.stage("tracing"):
        run_captured = session.backend(makes_sizes=False)(module, inputs)
    is_traced_later = has_gradients(inputs) and any(isinstance(value, torch.SymInt) for value in inputs)
    trains = is_traced_later or session.captured_count > before

    def run(*arguments: Any) -> Any:
        if model.is_removed:
            return module.forward(*arguments)
        if not trains or any(map(is_fake, arguments)):  # fake tensors: DDPOptimizer asks for shapes
            return run_captured(*arguments)
        tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
        model.see(tensors, [arguments[i] for i in buffers])
        session.begin_graph(arguments)
        with session.calling(type(model).__name__):
            return run_captured(*arguments)

    return run
