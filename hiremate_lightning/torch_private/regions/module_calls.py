"""Calls of modules that Dynamo traces, and how two of them are compared: by their arguments and their circumstances."""

from __future__ import annotations

import operator
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.guards import uninteresting_files
from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from ..same_captures import expect, facts_of
from .likeness import equal


@dataclass(frozen=True)
class TracedCall:
    """A call of a module, and what it depends on beside the module and what it gets.

    The line that calls it is none of that: code that asks who called it is not traced.

    Attributes:
        module: What Dynamo has for it, with a source.
        lines: The line that calls, and those which called that code, as texts of stacks begin with them.
        blocks: The `with` blocks that all these are in.
        modes: What torch computes with: gradients, autocast, determinism.
    """

    module: Any
    tx: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    lines: tuple[traceback.FrameSummary, ...]
    blocks: tuple[Any, ...]
    modes: GlobalStateGuard

    @classmethod
    def of(cls, module: Any, tx: Any, arguments: list[Any], named: dict[str, Any]) -> TracedCall:
        """Look at a call that Dynamo is about to trace, and that depends on nothing but what is compared."""
        expect(tx.output.current_tracer.parent is None, "in a function of its own")
        expect(torch._C._functorch.peek_interpreter_stack() is None, "within torch.func")
        modes = tx.symbolic_torch_function_state
        expect(modes.torch_function_subclass_enabled and not modes.mode_stack, "a mode of torch functions")
        expect(not torch.is_inference_mode_enabled() and not tx.output.export, "not in training")
        expect(not len(tx.exn_vt_stack), "while an error is handled")
        frames = [tx]
        while (caller := getattr(frames[-1], "parent", None)) is not None:
            frames.append(caller)
        lines = tuple(frame.frame_summary() for frame in frames[::-1] if not frame.is_co_filename_from_nn_modules())
        blocks = tuple(entry.with_context for frame in frames for entry in frame.block_stack if entry.with_context)
        return cls(module, tx, tuple(arguments), dict(named), lines, blocks, GlobalStateGuard())

    def stack_text(self) -> str:
        """Write the lines as Dynamo begins the stack of each node with them."""
        shown = [line for line in self.lines if line.filename not in uninteresting_files()]
        return "".join(traceback.StackSummary.from_list(shown).format())


class Leaves:
    """What two calls get, compared leaf by leaf, and the modes that they come under.

    Attributes:
        nodes: The nodes of a later call's tensors by those of the earlier one.
        variables: What Dynamo has for these tensors, by the same nodes.

    Raises:
        NotShownError: The calls are not shown to be alike.
    """

    def __init__(self, call: TracedCall, later: TracedCall) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.variables: dict[fx.Node, Any] = {}
        self._back: dict[fx.Node, fx.Node] = {}
        self._known = later.tx.output.side_effects
        is_same = len(call.blocks) == len(later.blocks) and all(map(operator.is_, call.blocks, later.blocks))
        expect(is_same and call.modes.check(), "other modes")
        expect(len(call.arguments) == len(later.arguments) and [*call.named] == [*later.named], "other arguments")
        values, later_values = ((*each.arguments, *each.named.values()) for each in (call, later))
        for one, other in zip(values, later_values, strict=True):
            self._compare(one, other)

    def _compare(self, one: Any, other: Any) -> None:
        if isinstance(one, LazyVariableTracker) and not one.is_realized():
            expect(one.source is not None and one.source == other.source, "an argument that is not read")
            return
        one, other = realized(one), realized(other)
        expect(type(one) is type(other), "an argument of another kind")
        if type(one) is TensorVariable:
            self._compare_tensors(one, other)
        elif type(one) is TupleVariable:
            expect(len(one.items) == len(other.items), "an argument of another length")
            for inner, other_inner in zip(one.items, other.items, strict=True):
                self._compare(inner, other_inner)
        elif type(one) is SymNodeVariable:
            expect(str(one.sym_num) == str(other.sym_num), "a number that varies")
            self._pair_nodes(one, other)
        else:
            expect(is_constant(one) and equal(one.value, other.value), "an argument")

    def _compare_tensors(self, one: Any, other: Any) -> None:
        facts = [facts_of(variable.proxy.node.meta["example_value"]) for variable in (one, other)]
        expect(facts[0] == facts[1], "a tensor of another kind")
        expect(one.source == other.source, "a tensor that comes from elsewhere")
        expect(not any(map(self._known.has_pending_mutation, (one, other))), "a tensor with attributes")
        self._pair_nodes(one, other)

    def _pair_nodes(self, one: Any, other: Any) -> None:
        node, other_node = one.as_proxy().node, other.as_proxy().node
        pair = self.nodes.setdefault(node, other_node), self._back.setdefault(other_node, node)
        expect(pair == (other_node, node), "an argument that is another one too")
        self.variables[node] = other


def realized(variable: Any) -> Any:
    """Return what Dynamo makes of a value, where it puts that off."""
    while isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    return variable


def is_constant(variable: Any) -> bool:
    """Whether a value is a plain constant."""
    plain = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
    return type(variable) is ConstantVariable and isinstance(variable.value, plain)


def values_in(result: Any) -> Iterator[Any]:
    """Yield what a module returned, alone or in tuples that the traced code made."""
    result = realized(result)
    if type(result) is TupleVariable and result.source is None:
        for item in result.items:
            yield from values_in(item)
    else:
        yield result


def note_unseen() -> None:
    """Note that what code does from here on depends on more than is compared: the module at hand is not copied."""
    unseen.count += 1


unseen = types.SimpleNamespace(count=0)  # how often code asked which object something is, or ran what is not traced
