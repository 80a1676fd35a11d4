"""AOTAutograd with our own partitioner: the only way to the joint graph, forward and backward, of captured code."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_capture, runtime_wrappers
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, MutationType, OutputType, PlainTensorMeta
from torch._functorch.partitioners import _extract_fwd_bwd_outputs, _has_tag_is_backward, _is_tangent
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from . import autocasting, hacks
from .hacks import replaced
from .tensor_state import changes_uncounted, plain

__all__ = ["HigherOrderOperator", "OpOverload"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def make_backend(partition: Callable[..., Any], forward: Compiler, backward: Compiler, inference: Compiler) -> Any:
    """Build a torch.compile backend from a partitioner of the joint graph and three compilers; no decompositions."""
    _heed_tokens()
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def joint_outputs(joint: fx.GraphModule, num_forward: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Split the outputs of a joint graph: forward values, backward values, and AOTAutograd's descriptions of both."""
    return _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_forward)


def called(node: fx.Node) -> Any:
    """Return the function that the user's code called where a node was captured, None where that is not known."""
    stack = node.meta.get("source_fn_stack")
    return stack[-1][1] if stack else None


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph is the gradient of an output."""
    return bool(_is_tangent(node))


def is_of_backward(node: fx.Node) -> bool:
    """Whether autograd, or the backward of a `torch.autograd.Function`, made this node."""
    return bool(_has_tag_is_backward(node)) or is_of_function_backward(node)


def is_of_function_backward(node: fx.Node) -> bool:
    """Whether the backward of a `torch.autograd.Function` made this node: unlike its forward it is not tagged."""
    called = (function for _, function in node.meta.get("source_fn_stack", ()))
    return "partitioner_tag" not in node.meta and "autograd.Function" in called


def checkpoint_of(node: fx.Node) -> int | None:
    """Number the call of `torch.utils.checkpoint` that made a node, None where none did."""
    number: int | None = node.meta.get("ac_graph_id")
    return number


def is_saved_by_policy(node: fx.Node) -> bool:
    """Whether selective checkpointing keeps what a node gives."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def describe_saved() -> Any:
    """Describe a saved value to AOTAutograd."""
    return SavedForBackwardsAOTOutput(0)


def overwritten_inputs(placeholders: Sequence[fx.Node], descriptions: Sequence[Any]) -> list[fx.Node]:
    """List the inputs that are written to after the forward, by AOTAutograd's descriptions of the forward's outputs."""
    written = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    return [p for p in placeholders if p.meta.get("desc") in written]


def allow_retain_graph() -> None:
    """Tell AOTAutograd that no saved buffer is reused, so that `retain_graph=True` stays legal.

    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def make_views_as_they_come() -> None:
    """Have AOTAutograd make results that are views again by the views that come, not by those that were traced.

    So what it makes of a trace at some sizes serves at others. To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        results = context.fw_metadata.output_info
        results[:] = [replace(result, view_meta_sequence=None) for result in results]


def take_over_results() -> tuple[int, ...]:
    """Stop AOTAutograd from returning results as views that a graph returned; return the positions of these.

    They are returned as tensors of their own by `unviewed` instead. AOTAutograd would do so where nobody can see any
    more whether the caller changes them in place. To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    meta = context.fw_metadata
    positions = tuple(meta.num_mutated_inp_runtime_indices + i for i in meta.unsafe_view_out_indices)
    meta.unsafe_view_out_indices, meta.num_unsafe_view_outputs = [], 0
    return positions


def returning_the_right_values() -> AbstractContextManager[None]:
    """Mend what AOTAutograd of torch 2.13 makes of results that are inputs, for a while.

    Code may change an input in place and return it. Where the graph holds that change, the input itself is returned, at
    the position that the result has among the results. But the joint graph returns other things before these: the new
    values of inputs that are changed after it. So the input took the place of one of those, and another input, or
    another result, got its value: where a metric inside of what is planned is updated with the loss, say.
    """
    return replaced((graph_capture, "create_functionalized_fn", _trace_with_inputs_in_place))


_trace = graph_capture.create_functionalized_fn


def _trace_with_inputs_in_place(*given: Any, meta: Any, trace_joint: bool, **options: Any) -> Any:
    own = copy.copy(meta)
    own.output_info = [replace(info, output_type=OutputType.non_alias) for info in meta.output_info]
    traced, *rest = _trace(*given, meta=own, trace_joint=trace_joint, **options)
    first = meta.num_mutated_inp_runtime_indices
    base_of = {
        first + position: info.base_idx
        for position, info in enumerate(meta.output_info)
        if info.output_type is OutputType.is_input
        and meta.input_info[info.base_idx].mutation_type is MutationType.MUTATED_IN_GRAPH
    }

    @functools.wraps(traced)
    def trace(*inputs: Any) -> Any:
        results, descriptions = traced(*inputs)
        flat, spec = pytree.tree_flatten(results)
        for position, base in base_of.items():
            flat[position] = (inputs[0] if trace_joint else inputs)[base]
        return pytree.tree_unflatten(flat, spec), descriptions

    return trace, *rest


def not_looking_for_aliases() -> AbstractContextManager[None]:
    """Keep what is traced meanwhile from checking, at its first run, whether custom operators return their inputs.

    AOTAutograd looks by a mode that refuses every subclass of tensors, those too that only carry metadata with them.
    """

    def begin(context: Any) -> None:
        context._is_first = False

    return replaced((runtime_wrappers._FirstInvocationContext, "__init__", begin))


def taking_gradients_with_metadata() -> AbstractContextManager[None]:
    """Make backwards traced meanwhile accept gradients of a class that only carries metadata.

    AOTAutograd refuses those where it expects a plain tensor: the class has to say how it becomes one.
    """
    process = runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent

    def take(gradient: Any, meta: Any, *others: Any) -> Any:
        kind = type(gradient)
        if kind is not torch.Tensor and isinstance(gradient, torch.Tensor) and isinstance(meta, PlainTensorMeta):
            carries = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            gradient = plain(gradient) if carries else gradient
        return process(gradient, meta, *others)

    return replaced((runtime_wrappers.AOTDispatchAutograd, "process_runtime_tangent", staticmethod(take)))


class _Anything:
    """Equals whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _: object) -> bool:
        return True


def take_gradients_as_they_come() -> None:
    """Tell AOTAutograd to hand on the gradients of outputs with their own strides.

    It would copy them to the strides that it guessed, and some kernels would add in another order than eager's do.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        for meta in context.fw_metadata.subclass_tangent_meta:
            if isinstance(meta, PlainTensorMeta) and meta.memory_format is not None:
                meta.memory_format = MemoryFormatMeta(size=_Anything(), stride=_Anything())  # type: ignore[arg-type]


def let_gradients_be_absent(token: torch.Tensor) -> None:
    """Ask that the backward that gets this token be called with None for gradients that never came, not with zeros.

    To be called in a forward that a backend of `make_backend` runs, which saves the token.
    """
    token.takes_absent = True  # type: ignore[attr-defined]


def _heed_tokens() -> None:
    """Check the tokens that AOTAutograd saves in a forward, and nothing that other functions save."""
    save = FunctionCtx.save_for_backward
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def save_and_look(context: Any, *tensors: Any) -> None:
        save(context, *tensors)
        is_captured = type(context).__name__ == "CompiledFunctionBackward" and hacks.is_on("absent gradients")
        if is_captured and any(getattr(tensor, "takes_absent", False) for tensor in tensors):
            context.set_materialize_grads(False)

    setattr(FunctionCtx, "save_for_backward", save_and_look)  # noqa: B010  a method can't be assigned


Source = tuple[int, str]  # of a traced node: the graph of the captured node that made it, and the name of that node


def source_of(node: fx.Node) -> Source | None:
    """Return the captured node that made a traced one, None where that is not known."""
    made_by = node.meta.get("from_node")
    return (made_by[-1].graph_id, made_by[-1].name) if made_by else None


def outermost_autocasts(module: fx.GraphModule) -> dict[Source, int]:
    """Number the blocks of autocast that are within no other, by the nodes in them that run where casts are remembered.

    Only the block around the call is number `BLOCK_AROUND`. The body of a call, of `torch.utils.checkpoint` say, runs
    where it is called; Dynamo makes one for each call.
    """
    return _Autocasts().walk(module)


BLOCK_AROUND = 0
_CASTS_BY_HAND = tuple(("call_method", name) for name in ("to", "type", "type_as", "bfloat16", "half"))


class _Autocasts:
    """Runs through captured code, and follows autocast as eager PyTorch enters and leaves it."""

    def __init__(self) -> None:
        self._remembers = [torch.is_autocast_cache_enabled()]  # in each open block, the innermost last
        self._outside, self._number = autocasting.open_blocks(), BLOCK_AROUND

    def walk(self, module: fx.GraphModule) -> dict[Source, int]:
        """Number the nodes of some code, and of the bodies that it calls."""
        blocks = dict[Source, int]()
        for node in module.graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                self._number += not self._is_inside
                self._remembers.append(self._remembers[-1] if node.args[-1] is None else node.args[-1])
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                self._remembers.pop()
            elif self._is_inside and self._remembers[-1] and (node.op, node.target) not in _CASTS_BY_HAND:
                blocks[id(module.graph), node.name] = self._number
            names = [str(value.target) for value in node.all_input_nodes if value.op == "get_attr"]
            for body in (getattr(module, name, None) for name in names):
                if isinstance(body, fx.GraphModule):  # the code that an operator is called with
                    blocks |= self.walk(body)
        return blocks

    @property
    def _is_inside(self) -> bool:
        return self._outside + len(self._remembers) > 1


def mark_boxed(function: Boxed) -> Boxed:
    """Tell AOTAutograd that a function empties its argument list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def add_input(graph: fx.Graph, last: fx.Node | None, name: str) -> fx.Node:
    """Add an input to captured code after its last one, with what AOTAutograd asks of each: where it comes from."""
    with graph.inserting_after(last):
        added = graph.placeholder(name)
    added._dynamo_source = None
    return added


def trace_with_sizes_of(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Trace a view of an input with the sizes that the input has; AOTAutograd would make symbols for them."""
    context = TracingContext.try_get()
    if context is not None and other in context.tensor_to_context:
        context.tensor_to_context[tensor] = context.tensor_to_context[other]


def inputs_with_gradients(joint: fx.GraphModule, forward_outputs: int) -> list[tuple[fx.Node, Any]]:
    """List the inputs of a joint graph, each with its gradient or None; tokens that order effects come before them."""
    gradients: Any = joint.graph.output_node().args[0]
    gradients = gradients[forward_outputs:]
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    return list(zip(inputs[len(inputs) - len(gradients) :], gradients, strict=True))


def output_position(tangent: fx.Node) -> int | None:
    """Return the position, among the outputs of the captured function, of that to which a gradient belongs.

    None where it belongs to anything else: an input that is changed, or what several outputs are views of.
    """
    description = tangent.meta.get("desc")
    output = description.output if isinstance(description, TangentAOTInput) else None
    return output.idx if isinstance(output, PlainAOTOutput) else None


def input_position(placeholder: fx.Node) -> int | None:
    """Return the position among the inputs of the captured function, None for what AOTAutograd added.

    A tensor of a subclass, a DTensor for example, is an input for each tensor that it is made of.
    """
    description = placeholder.meta.get("desc")
    while isinstance(description, SubclassGetAttrAOTInput):
        description = description.base
    return description.idx if isinstance(description, PlainAOTInput) else None


# ---------------------------------------------------------------- results with nodes of their own


class _OwnNode(torch.autograd.Function):
    """Hands a gradient on as it is, None too. The result is the same tensor, with another node."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def give_own_nodes(results: Iterable[Any]) -> None:
    """Where tensors share a node of autograd's graph, give each its own, as eager code does. Views keep theirs.

    AOTAutograd makes one node for all results. A hook on one of them would be called, with None, where only another one
    gets a gradient. And where a hook holds what was computed from another result, as that of a deep equilibrium model
    does, the node would hold the hook, and the hook the node: neither would ever be freed.
    """
    tensors = list({id(result): result for result in results if isinstance(result, torch.Tensor)}.values())
    if len(tensors) == 1:
        return
    with torch._C.DisableTorchFunction():  # neither modes nor classes of users are to see this
        tensors = [tensor for tensor in tensors if tensor.grad_fn is not None and not tensor._is_view()]
        shared = Counter[Node | None](tensor.grad_fn for tensor in tensors)
        for tensor in tensors:
            if shared[tensor.grad_fn] > 1:
                with changes_uncounted([tensor]):
                    _OwnNode.apply(tensor)  # type: ignore[no-untyped-call]
