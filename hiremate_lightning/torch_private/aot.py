"""AOTAutograd with our own partitioner: the only way to the joint graph, forward and backward, of captured code."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, MutationType, OutputType, PlainTensorMeta
from torch._functorch.partitioners import _extract_fwd_bwd_outputs, _has_tag_is_backward
from torch._functorch.partitioners import _is_tangent as is_tangent
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from .hacks import instead_of
from .tensor_state import changes_uncounted, plain

__all__ = ["HigherOrderOperator", "OpOverload", "is_tangent"]

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


def describe_saved() -> Any:
    """Describe a saved value to AOTAutograd."""
    return SavedForBackwardsAOTOutput(0)


def overwritten_inputs(graph: fx.Graph) -> list[fx.Node]:
    """List the inputs that are written to after the forward, by AOTAutograd's descriptions of the forward's outputs."""
    descriptions = pytree.tree_leaves(graph.output_node().meta.get("desc", ()))
    written = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    return [p for p in graph.find_nodes(op="placeholder") if p.meta.get("desc") in written]


def settle_forward(serves_other_sizes: bool) -> tuple[int, ...]:
    """Change what AOTAutograd does around a forward, from inside of its compiler of that.

    * No saved buffer is reused, so that `retain_graph=True` stays legal.
    * Gradients of outputs come with their own strides. AOTAutograd would copy them to the strides that it guessed, and
      some kernels would add in another order than eager's do.
    * What is made of a trace at some sizes serves others: results that are views are made again by the views that come.
    * Results that a graph returns as views are not returned as such, which AOTAutograd does where nobody can see any
      more whether the caller changes them in place.

    Returns:
        The positions of the latter; `unviewed` is to return them as tensors of their own.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    meta = context.fw_metadata
    meta.bw_donated_idxs = []
    for tangent in meta.subclass_tangent_meta:
        if isinstance(tangent, PlainTensorMeta) and tangent.memory_format is not None:
            tangent.memory_format = MemoryFormatMeta(size=ANY, stride=ANY)
    if serves_other_sizes:
        meta.output_info[:] = [replace(result, view_meta_sequence=None) for result in meta.output_info]
    positions = tuple(meta.num_mutated_inp_runtime_indices + i for i in meta.unsafe_view_out_indices)
    meta.unsafe_view_out_indices, meta.num_unsafe_view_outputs = [], 0
    return positions


@instead_of("torch._functorch._aot_autograd.graph_capture.create_functionalized_fn")
def returning_the_right_values(
    make: Callable[..., Any], *given: Any, meta: Any, trace_joint: bool, **options: Any
) -> Any:
    """Mend what AOTAutograd of torch 2.13 makes of results that are inputs.

    Code may change an input in place and return it. Where the graph holds that change, the input itself is returned, at
    the position that the result has among the results. But the joint graph returns other things before these: the new
    values of inputs that are changed after it. So the input took the place of one of those, and another input, or
    another result, got its value: where a metric inside of what is planned is updated with the loss, say.
    """
    own = copy.copy(meta)
    own.output_info = [replace(info, output_type=OutputType.non_alias) for info in meta.output_info]
    traced, *rest = make(*given, meta=own, trace_joint=trace_joint, **options)
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


@instead_of("torch._functorch._aot_autograd.runtime_wrappers._FirstInvocationContext.__init__")
def not_looking_for_aliases(_: Any, context: Any) -> None:
    """Keep what is traced meanwhile from looking for aliases at its first run, which fails on subclasses."""
    context._is_first = False


@instead_of("torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent")
def taking_gradients_with_metadata(process: Callable[..., Any], gradient: Any, meta: Any, *others: Any) -> Any:
    """Make backwards traced meanwhile take gradients of a class that only carries metadata for plain ones."""
    kind = type(gradient)
    if kind is not torch.Tensor and isinstance(gradient, torch.Tensor) and isinstance(meta, PlainTensorMeta):
        carries = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        gradient = plain(gradient) if carries else gradient
    return process(gradient, meta, *others)


def let_gradients_be_absent(token: torch.Tensor) -> None:
    """Let the backward that gets this token, which a captured forward saves, get None for gradients that never came."""
    token.takes_absent = True  # type: ignore[attr-defined]


@functools.cache
def _heed_tokens() -> None:
    """Check, from now on, the tokens that AOTAutograd saves in a forward, and nothing that other functions save."""
    save = FunctionCtx.save_for_backward

    @functools.wraps(save)
    def save_and_look(context: Any, *tensors: Any) -> None:
        save(context, *tensors)
        is_captured = type(context).__name__ == "CompiledFunctionBackward"
        if is_captured and any(getattr(tensor, "takes_absent", False) for tensor in tensors):
            context.set_materialize_grads(False)

    setattr(FunctionCtx, "save_for_backward", save_and_look)  # noqa: B010  a method can't be assigned


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
    """Return the position of the output whose gradient this is; None for changed inputs, and bases of views."""
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
