"""Let Dynamo trace modules that are alike once, as the blocks of a transformer, and copy the trace for the others.

A call of a module leaves a `Trace`. A later call gets copies of its nodes if all of this holds:

* Dynamo would read the same of the later module, see `Likeness`, and the guards are installed for that module, too.
* The call gets tensors of the same kind and the same constants, under the same modes and `with` blocks.
* The traced call drew no random number in Python and changed no existing object, except tensors by operations of the
  graph. No object that it could read was changed since.

The graph and its guards are those that Dynamo makes without copies: the same nodes, in the same order. Only the
`nn_module_stack` of a copied node is keyed by module names, not by ids. If a copy differs from its original, the code
is captured again without copies.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._dynamo.exc import TorchDynamoException, UnspecializeRestartAnalysis
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedBuiltinNNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Source

from ...housekeeping import log
from ..facts import NotShownError, expect, is_plain
from ..hacks import instead_of, replaced
from .module_traces import Copy, Trace, TracedCall, can_be_copied, nodes_after, note_unseen, realized, unseen

_MOST_TRACES = 4  # the latest of one class: each is compared with every later call


def _is_new(item: Any) -> bool:
    is_made = isinstance(item.mutation_type, (AttributeMutationNew, ValueMutationNew))
    return is_made and not isinstance(item, TensorVariable)  # a call may get it as an argument


class _Traces:
    """The traces of module calls in one graph, and the objects that traced code changed."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.changed: list[Any] = []  # objects that traced code changed: attributes, lists, globals
        self.aliases: list[tuple[Source, Source]] = []  # (second source, first source) of values reached twice
        self._by_class: defaultdict[type, deque[Trace]] = defaultdict(lambda: deque(maxlen=_MOST_TRACES))

    def call(self, call: TracedCall, run: Callable[[], Any]) -> Any:
        """Copy a trace that holds for a call; otherwise trace the call."""
        kind = type(call.module.value)
        for trace in self._by_class[kind]:
            try:
                expect(not self._may_be_read(trace.changes_before), "something was changed")
                copy = Copy(trace, call)
            except TorchDynamoException:
                raise
            except Exception as error:  # PyTorch or user code may raise anything: this trace does not fit
                log.debug("%s is traced: %s", kind.__name__, error)
                continue
            try:
                result = copy.make()
            except Exception as error:  # any error: the nodes that were added can't be removed
                _traced_whole.add(call.tx.output.root_tx.f_code)
                log.debug("%s is captured again, without copies", kind.__name__, exc_info=True)
                raise UnspecializeRestartAnalysis(restart_reason="a copy of a module's trace failed") from error
            log.debug("copying the trace of a %s", kind.__name__)
            return result
        return self._trace(call, run)

    def _trace(self, call: TracedCall, run: Callable[[], Any]) -> Any:
        output, changes_before, hidden_before = call.tx.output, len(self.changed), self._hidden()
        last, inputs_before = output.graph._root.prev, len(output.placeholders)
        result = run()
        nodes, inputs = nodes_after(last), output.placeholders[inputs_before:]
        is_pure = hidden_before == self._hidden() and not self._may_be_read(changes_before)
        if is_pure and can_be_copied(nodes, result):
            trace = Trace(call, result, nodes, inputs, changes_before, self.aliases)
            self._by_class[type(call.module.value)].appendleft(trace)
        return result

    def _may_be_read(self, since: int) -> bool:
        """Whether a module could read an object that was changed since then, other than from its arguments.

        It could if the object existed before the traced code ran, or if such an object holds it now.
        """
        items = self.changed[since:]
        if not items or not all(map(_is_new, items)):
            return bool(items)
        effects, reached = self.output.side_effects, set[int]()
        existing = [v for v in effects.id_to_variable.values() if v.mutation_type is not None and not _is_new(v)]
        ahead = [v for v in existing if effects.is_modified(v) or effects.has_pending_mutation(v)]
        while ahead:
            variable = ahead.pop()
            if id(variable) not in reached:
                reached.add(id(variable))
                attributes = list(effects.store_attr_mutations.get(variable, {}).values())
                VariableTracker.visit(ahead.append, [variable, attributes])
        return any(id(item) in reached for item in items)

    def _hidden(self) -> tuple[int, ...]:
        """Count Dynamo's effects outside of the graph, and the submodules of operators with code inside."""
        output = self.output
        effects = output.side_effects
        lists = effects.tensor_hooks, effects.save_for_backward, output.random_calls, output.nn_modules
        return unseen.count, *map(len, lists)


@instead_of("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function")
def _call_or_copy(call: Any, module: Any, tx: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Copy the trace of an earlier call of a module that is alike; otherwise call the module as Dynamo does."""
    run = functools.partial(call, module, tx, arguments, named)
    is_plain = type(module) in (UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable)
    is_whole = tx.output.root_tx.f_code in _traced_whole
    if not is_plain or is_whole or module.source is None or not module.value._modules:
        return run()
    try:
        traced = TracedCall(module, tx, arguments, named)
    except NotShownError:
        return run()
    return _traces_of(tx.output).call(traced, run)


@instead_of("torch._dynamo.side_effects.SideEffects.check_allowed_side_effect")
def _change(check: Any, effects: SideEffects, item: Any) -> Any:
    """Record the object that traced code changes."""
    output = effects.output_graph_weakref()
    if output is not None:
        _traces_of(output).changed.append(item)
    return check(effects, item)


@instead_of(
    *(f"torch._dynamo.variables.{of}.invoke_and_store_as_constant" for of in ("functions", "nn_module")),
    "torch._dynamo.variables.builtin.BuiltinVariable.call_id",
)
def _read_unguarded(run: Any, *arguments: Any, **named: Any) -> Any:
    """Note that code asks for an `id`, or runs a function at capture whose result becomes a constant."""
    note_unseen()
    return run(*arguments, **named)


_LOOKED_UP = ("base.VariableTracker", "user_defined.UserDefinedObjectVariable", "tensor.TensorVariable")


@instead_of(
    *(f"torch._dynamo.variables.{of}.vt_identity_compare" for of in ("object_protocol", "builtin")),
    *(f"torch._dynamo.variables.{of}.hash_impl" for of in _LOOKED_UP),
    "torch._dynamo.utils._get_fake_tensor",
)
def _identify(run: Any, *arguments: Any, **named: Any) -> Any:
    """Note that code compares or looks up objects by identity: no guard covers that, and another module may differ."""
    if all(_is_one_of_many(value) for value in arguments if isinstance(value, VariableTracker)):
        note_unseen()
    return run(*arguments, **named)


def _is_one_of_many(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return not is_plain(variable.peek_value())
    variable = realized(variable)
    return variable.source is not None and not is_plain(variable.get_real_python_backed_value())


@instead_of("torch._dynamo.variables.builder.VariableBuilder.__call__")
def _build(build: Any, builder: Any, value: Any) -> Any:
    """Record that a value is reached from a second source."""
    effects = builder.tx.output.side_effects
    if value in effects:
        first = effects[value].source
        if first is not None and first.name != builder.source.name:
            _traces_of(builder.tx.output).aliases.append((builder.source, first))
    return build(builder, value)


_STAND_INS = _call_or_copy, _change, _read_unguarded, _identify, _build


def _traces_of(output: Any) -> _Traces:
    traces: _Traces = _state.traces.setdefault(id(output), _Traces(output))  # which keeps `output` alive, and so its id
    return traces


@contextmanager
def copied() -> Iterator[None]:
    """Trace modules that are alike once, in a `with` block, and copy the trace for the others."""
    with replaced((_state, "traces", {})), ExitStack() as in_place:
        for stand_in in _STAND_INS:
            in_place.enter_context(stand_in())
        yield


_state = types.SimpleNamespace(traces={})
_traced_whole: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # code in which a copy failed
