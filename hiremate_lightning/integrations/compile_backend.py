"""The torch.compile backend named "hiremate", found by its entry point, so that nothing needs to be imported.

    model = torch.compile(model, backend="hiremate", options={"budget": "8 GiB"})

Options are those of `hiremate_lightning.hiremate`. All that is compiled with equal options shares one session: its
graphs are planned together, under one budget, however many torch.compile calls or graph breaks they come from. As for
every session, the first graph that runs after a backward begins a new step.

Here there is no module to take over, only the graphs that Dynamo captured, so a few things are known less well than to
`hiremate(model)`, which remains the better way where the model's code can be reached:

* Parameters and buffers are known once a graph that uses them has run. On the CPU the others don't count as resident.
* Graphs captured in eval mode are planned too, where they have gradients.
* Of the seconds that torch takes to capture, those that Dynamo takes are not part of the plan's planning time.
* torch.compile's own limit of recompilations holds for the frames that Dynamo captures.
* Compile the module, then wrap it in DistributedDataParallel: around that, torch may capture nothing, without a word.
* `remove_hiremate` stops the planning of all that shares a session. Compile with other options to plan once more.
* Errors at capture come inside of torch's BackendCompilerFailed. Those at run, such as a budget that nothing fits, come
  as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..api import get_plan
from ..calls.slots import WITH_COMPILE
from ..capturing.backend import has_gradients, planning_backend
from ..capturing.capture import Captured
from ..errors import ConfigurationError, did_you_mean
from ..options import OPTIONS
from ..planning.planner import make_options
from ..proofs.proof import Proof
from ..reporting.report import calls_for
from ..running.execution import Part
from ..sessions.session import Session
from ..targets import compiled
from ..targets.compiled import CompiledSession
from ..targets.modules import planned_module_with
from ..torch_private import compiled_by_torch
from ..torch_private.tensor_state import is_fake, tensors_among

__all__ = ["get_plan", "hiremate"]

_Weak = dict[int, weakref.ref[torch.Tensor]]  # by identity: tensors compare by their values


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
    equal = [(session, known) for session, known in compiled.sessions() if known.key == key]
    # What was captured for one that was removed belongs to that one, and stays unplanned.
    removed = [(session, known) for session, known in equal if known.is_removed and known.has(callers)]
    alive = [(s, known) for s, known in equal if not known.is_removed and not _root_of(s).is_gone]
    session, known = next(iter(removed + alive), None) or _begin(checked, key, module)
    known.add(callers)
    return module.forward if known.is_removed else _Graph(session, known, module, inputs).run


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


def _begin(options: dict[str, Any], key: compiled.Key, module: fx.GraphModule) -> tuple[Session, CompiledSession]:
    root = type(_name_of(module), (_CompiledRoot,), {})()
    session = Session(root, make_options(**options))
    session.expect_wait(0, operations=sum(node.op.startswith("call") for node in module.graph.nodes))
    session.stages.reporter.more = calls_for('options={..., "verbose": "full"}')
    return session, compiled.begin(session, key)


def _root_of(session: Session) -> _CompiledRoot:
    root = session.root
    assert isinstance(root, _CompiledRoot), "the session was begun here"
    return root


def _modules_of(module: fx.GraphModule) -> Iterator[Any]:
    """Go through the classes of the modules whose code the graph holds, outermost first for each operation."""
    for node in module.graph.nodes:
        for _, kind in node.meta.get("nn_module_stack", {}).values():
            yield kind


def _name_of(module: fx.GraphModule) -> str:
    """Name what was compiled by the class of its outermost module."""
    kind = next(_modules_of(module), "compiled function")
    return kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


class _CompiledRoot(nn.Module):
    """Stands for the model in a session: the parameters and buffers of the graphs that have run, not kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters_seen: _Weak = {}
        self._buffers_seen: _Weak = {}
        self._somewhere = torch.empty(0)

    @property
    def is_gone(self) -> bool:
        """Whether there were parameters, and none of them exists any more; torch may keep what it compiled longer."""
        return bool(self._parameters_seen) and not any(True for _ in self._alive(self._parameters_seen))

    def see_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add parameters, and other leaves that train.

        At each run: torch runs what it compiled for one model with the parameters of another of the same kind.

        Raises:
            ConfigurationError: If a parameter belongs to a module that is planned.
        """
        seen = self._parameters_seen
        new = [p for p in parameters if id(p) not in seen or seen[id(p)]() is not p]
        if any(isinstance(p, nn.Parameter) for p in new):
            module = planned_module_with(new)
            if module is not None:  # Dynamo goes past its slots, so that its plan would never run
                raise ConfigurationError(f"{type(module).__name__} is planned already by hiremate(). {WITH_COMPILE}")
        if new:
            kept = [*self._alive(self._parameters_seen), *new]
            self._parameters_seen = {id(p): weakref.ref(p) for p in kept}

    def see_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Add buffers."""
        self._buffers_seen.update((id(b), weakref.ref(b)) for b in buffers)

    def see_device(self, device: torch.device) -> None:
        """Store the device of a graph, for models without parameters."""
        if self._somewhere.device != device:
            self._somewhere = torch.empty(0, device=device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Go through the parameters that still exist; an empty one where there are none, to tell the device."""
        yield from list(self._alive(self._parameters_seen)) or [self._somewhere]

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Go through the buffers that still exist."""
        return self._alive(self._buffers_seen)

    @staticmethod
    def _alive(seen: _Weak) -> Iterator[Any]:
        tensors = (reference() for reference in seen.values())
        return (tensor for tensor in tensors if tensor is not None)


class _Graph:
    """One graph that Dynamo captured, and its place in the steps of a session."""

    def __init__(self, session: Session, known: CompiledSession, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._session, self._known, self._plain = session, known, module.forward
        self._name = type(session.root).__name__
        placeholders = module.graph.find_nodes(op="placeholder")
        self._buffers = [position for position, node in enumerate(placeholders) if "_buffers_" in node.name]
        # Where sizes are symbols, it is traced when it runs.
        self._trains = has_gradients(inputs) and any(isinstance(value, torch.SymInt) for value in inputs)
        with session.stages.stage("capture_s", "tracing"):
            prove = partial(Proof, prove=session.prover.prove) if session.options.verify else None
            ahead = session.largest.trace_ahead
            backend = planning_backend(self._take_in, session.kernels, prove, trace_ahead=ahead)
            self._run = backend(module, inputs)

    def _take_in(self, captured: Captured) -> Part:
        self._trains = True
        return self._session.take_in(captured)

    def run(self, *arguments: Any) -> Any:
        """Run the graph, as a part of a step where it trains."""
        if self._known.is_removed:
            return self._plain(*arguments)
        if not self._trains or any(map(is_fake, arguments)):  # Dynamo asks for shapes: DDP splits what it captured
            return self._run(*arguments)
        root, tensors = _root_of(self._session), [t for t in arguments if isinstance(t, torch.Tensor)]
        root.see_parameters([t for t in tensors if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf)])
        root.see_buffers([arguments[i] for i in self._buffers])
        if tensors:
            root.see_device(tensors[0].device)
        self._session.largest.called(None, (arguments, {}), tensors_among(arguments))
        self._session.begin_step(arguments)
        with self._session.calling(self._name):
            return self._run(*arguments)
