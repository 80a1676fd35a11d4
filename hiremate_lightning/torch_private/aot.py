"""Get the joint graph of captured code from AOTAutograd, by our own partitioner, and correct AOTAutograd's metadata."""

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

SAVED = SavedForBackwardsAOTOutput(0)  # AOTAutograd's descriptor of a saved tensor
Boxed = Callable[[list[Any]], Sequence[Any]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def make_backend(partition: Callable[..., Any], forward: Compiler, backward: Compiler, inference: Compiler) -> Any:
    """Return a torch.compile backend made of a joint-graph partitioner and three compilers, without decompositions."""
    _heed_tokens()
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def joint_outputs(joint: fx.GraphModule, num_forward: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Split a joint graph's outputs: forward values, backward values, and AOTAutograd's descriptors of both."""
    return _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_forward)


def called(node: fx.Node) -> Any:
    """Return the function that the user's code called where Dynamo captured a node; None if unknown."""
    stack = node.meta.get("source_fn_stack")
    return stack[-1][1] if stack else None


def is_of_backward(node: fx.Node) -> bool:
    """Whether autograd, or the backward of a `torch.autograd.Function`, made this node."""
    return bool(_has_tag_is_backward(node)) or is_of_function_backward(node)


def is_of_function_backward(node: fx.Node) -> bool:
    """Whether the backward of a `torch.autograd.Function` made this node; AOTAutograd tags only its forward."""
    called = (function for _, function in node.meta.get("source_fn_stack", ()))
    return "partitioner_tag" not in node.meta and "autograd.Function" in called


def checkpoint_of(node: fx.Node) -> int | None:
    """Return the number of the `torch.utils.checkpoint` call that made a node; None for other nodes."""
    number: int | None = node.meta.get("ac_graph_id")
    return number


def overwritten_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs that AOTAutograd writes to after the forward, by its descriptors of the forward's outputs."""
    descriptions = pytree.tree_leaves(graph.output_node().meta.get("desc", ()))
    written = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    return [p for p in graph.find_nodes(op="placeholder") if p.meta.get("desc") in written]


def settle_forward(serves_other_sizes: bool) -> tuple[int, ...]:
    """Change AOTAutograd's metadata of a forward, from inside of its forward compiler.

    * No saved tensor is donated to the backward, so that `retain_graph=True` stays legal.
    * Gradients of outputs keep their strides. AOTAutograd would copy them to the strides that it guessed, and some
      kernels would then add in another order than in eager.
    * With `serves_other_sizes`, outputs that are views are rebuilt from the views of each call, not from the trace's.
    * AOTAutograd does not apply `_unsafe_view` to outputs that the graph makes as views.

    Returns:
        The positions of these outputs; the caller applies `unviewed` to them.
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
    make: Callable[..., Any], *arguments: Any, meta: Any, trace_joint: bool, **options: Any
) -> Any:
    """Correct the joint graph of torch 2.13 if an input is changed in place and returned.

    AOTAutograd puts such an input at the output's position if the graph contains the change. But the joint graph's
    outputs begin with the new values of inputs that are changed after the graph. So the input took the place of one of
    those, and another input or output got its value: for example if a metric inside of planned code is updated with the
    loss.
    """
    traced_meta = copy.copy(meta)
    traced_meta.output_info = [replace(info, output_type=OutputType.non_alias) for info in meta.output_info]
    traced, *rest = make(*arguments, meta=traced_meta, trace_joint=trace_joint, **options)
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
    """Turn off the search for aliases at the first run of code that is traced meanwhile: it fails on subclasses."""
    context._is_first = False


@instead_of("torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent")
def taking_gradients_with_metadata(process: Callable[..., Any], gradient: Any, meta: Any, *arguments: Any) -> Any:
    """Make backwards traced meanwhile accept gradients of a subclass that only carries metadata, as plain tensors."""
    kind = type(gradient)
    if kind is not torch.Tensor and isinstance(gradient, torch.Tensor) and isinstance(meta, PlainTensorMeta):
        carries = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        gradient = plain(gradient) if carries else gradient
    return process(gradient, meta, *arguments)


@functools.cache
def _heed_tokens() -> None:
    """Patch `save_for_backward`: with a token that `takes_absent`, absent gradients reach the backward as None."""
    save = FunctionCtx.save_for_backward

    @functools.wraps(save)
    def save_and_look(context: Any, *tensors: Any) -> None:
        save(context, *tensors)
        is_captured = type(context).__name__ == "CompiledFunctionBackward"
        if is_captured and any(getattr(tensor, "takes_absent", False) for tensor in tensors):
            context.set_materialize_grads(False)

    setattr(FunctionCtx, "save_for_backward", save_and_look)  # noqa: B010  a method can't be assigned


def mark_boxed(function: Boxed) -> Boxed:
    """Mark a function as boxed for AOTAutograd: it takes its arguments in a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def add_input(graph: fx.Graph, last: fx.Node | None, name: str) -> fx.Node:
    """Add an input after the last one of captured code, with the `_dynamo_source` that AOTAutograd reads of each."""
    with graph.inserting_after(last):
        added = graph.placeholder(name)
    added._dynamo_source = None
    return added


def trace_with_sizes_of(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Trace a view of an input with that input's symbolic sizes; AOTAutograd would make new symbols for the view."""
    context = TracingContext.try_get()
    if context is not None and other in context.tensor_to_context:
        context.tensor_to_context[tensor] = context.tensor_to_context[other]


def inputs_with_gradients(joint: fx.GraphModule, forward_outputs: int) -> list[tuple[fx.Node, Any]]:
    """Return the inputs of a joint graph, each with its gradient or None; tokens that order effects are left out."""
    gradients: Any = joint.graph.output_node().args[0]
    gradients = gradients[forward_outputs:]
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    return list(zip(inputs[len(inputs) - len(gradients) :], gradients, strict=True))


def output_position(tangent: fx.Node) -> int | None:
    """Return the position of the output that a tangent belongs to; None for changed inputs, and bases of views."""
    description = tangent.meta.get("desc")
    output = description.output if isinstance(description, TangentAOTInput) else None
    return output.idx if isinstance(output, PlainAOTOutput) else None


def input_position(placeholder: fx.Node) -> int | None:
    """Return an input's position in the captured function; None for inputs that AOTAutograd added.

    A tensor subclass, a DTensor for example, has one input for each of its inner tensors.
    """
    description = placeholder.meta.get("desc")
    while isinstance(description, SubclassGetAttrAOTInput):
        description = description.base
    return description.idx if isinstance(description, PlainAOTInput) else None


class _OwnNode(torch.autograd.Function):
    """Passes a gradient on unchanged, None too. The result is the same tensor with another autograd node."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def give_own_nodes(results: Iterable[Any]) -> None:
    """Replace a `grad_fn` that several results share by one for each result, as in eager PyTorch. Views keep theirs.

    AOTAutograd makes one node for all outputs. A hook on one output would be called, with None, if only another output
    gets a gradient. And if a hook holds a tensor computed from another output, as in a deep equilibrium model, the node
    would hold the hook, and the hook the node: neither would ever be freed.
    """
    tensors = list({id(result): result for result in results if isinstance(result, torch.Tensor)}.values())
    if len(tensors) == 1:
        return
    with torch._C.DisableTorchFunction():  # hidden from torch function modes and users' subclasses
        tensors = [tensor for tensor in tensors if tensor.grad_fn is not None and not tensor._is_view()]
        shared = Counter[Node | None](tensor.grad_fn for tensor in tensors)
        for tensor in tensors:
            if shared[tensor.grad_fn] > 1:
                with changes_uncounted([tensor]):
                    _OwnNode.apply(tensor)  # type: ignore[no-untyped-call]
