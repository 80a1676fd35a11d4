"""The torch.compile backend named "hiremate", found by its entry point, so that nothing needs to be imported.

    model = torch.compile(model, backend="hiremate", options={"budget": "8 GiB"})

Options are those of `hiremate_lightning.hiremate`. All that is compiled with equal options shares one session: its
graphs are planned together, under one budget, however many torch.compile calls or graph breaks they come from. As for
every session, the first graph that runs after a backward begins a new step.

Here there is no module to take over, only the graphs that Dynamo captured, so some things are known less well than to
`hiremate(model)`; docs/limits.md has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ..api import get_plan
from ..capturing.backend import has_gradients, planning_backend
from ..capturing.capture import Captured
from ..errors import ConfigurationError, did_you_mean
from ..options import OPTIONS
from ..planning.planner import make_options
from ..proofs.proof import Proof
from ..reporting.report import calls_for
from ..running.execution import Part
from ..sessions.session import Session
from ..targets.compiled import CompiledModel, Key, begin, sessions
from ..torch_private import compiled_by_torch
from ..torch_private.tensor_state import is_fake, tensors_among

__all__ = ["get_plan", "hiremate"]


def hiremate(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured so that the steps it belongs to keep within a budget of bytes.

    torch.compile calls this. The budget is "auto" where it is not given.

    Args:
        module: The captured graph.
        inputs: Its arguments at capture.
        options: The budget and the other options of `hiremate_lightning.hiremate`, by name; see docs/api.md.
        mode: Has no meaning for this backend.

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
    # What was captured for one that was removed belongs to that one, and stays unplanned.
    removed = [(session, model) for session, model in equal if model.is_removed and model.has_any(callers)]
    alive = [(session, model) for session, model in equal if not model.is_removed and not model.is_gone]
    session, model = next(iter(removed + alive), None) or _begin(checked, key, module)
    model.add_callables(callers)
    return module.forward if model.is_removed else _Graph(session, model, module, inputs).run


def _check_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse names of options that there are not; fill in the default budget."""
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
    """Begin a session, whose model is named by the class of the outermost module that was compiled."""
    stacks = (node.meta.get("nn_module_stack", {}).values() for node in module.graph.nodes)
    kind = next((kind for stack in stacks for _, kind in stack), "compiled function")
    name = kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
    model: CompiledModel = type(name, (CompiledModel,), {})(key)
    session = Session(model, make_options(**options))
    session.expect_wait(0, operations=sum(node.op.startswith("call") for node in module.graph.nodes))
    session.reporter.more = calls_for('options={..., "verbose": "full"}')
    begin(session)
    return session, model


class _Graph:
    """One graph that Dynamo captured, and its place in the steps of a session."""

    def __init__(self, session: Session, model: CompiledModel, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._session, self._model, self._eager = session, model, module.forward
        self._name = type(model).__name__
        placeholders = module.graph.find_nodes(op="placeholder")
        self._buffers = [position for position, node in enumerate(placeholders) if "_buffers_" in node.name]
        # Where sizes are symbols, it is traced when it runs.
        self._trains = has_gradients(inputs) and any(isinstance(value, torch.SymInt) for value in inputs)
        with session.reporter.stage("tracing"):
            prove = partial(Proof, prove=session.prover.prove) if session.options.verify else None
            ahead = session.largest.trace_ahead
            backend = planning_backend(self._take_in, session.kernels, prove, trace_ahead=ahead)
            self._run = backend(module, inputs)

    def _take_in(self, captured: Captured) -> Part:
        self._trains = True
        return self._session.take_in(captured)

    def run(self, *arguments: Any) -> Any:
        """Run the graph, as a part of a step where it trains."""
        if self._model.is_removed:
            return self._eager(*arguments)
        if not self._trains or any(map(is_fake, arguments)):  # Dynamo asks for shapes: DDP splits what it captured
            return self._run(*arguments)
        tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
        self._model.see(tensors, [arguments[i] for i in self._buffers])
        self._session.largest.called(None, (arguments, {}), tensors_among(arguments))
        self._session.begin_step(arguments)
        with self._session.calling(self._name):
            return self._run(*arguments)
