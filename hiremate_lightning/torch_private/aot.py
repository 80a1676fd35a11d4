"""AOTAutograd with our own partitioner: the only way to the joint graph, forward and backward, of captured code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, SavedForBackwardsAOTOutput
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, OutputType, PlainTensorMeta
from torch._functorch.partitioners import _extract_fwd_bwd_outputs, _has_tag_is_backward, _is_tangent
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.function import FunctionCtx

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
    """Give the function that the user's code called where a node was captured, None where that is not known."""
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


def is_checkpointed(node: fx.Node) -> bool:
    """Whether code inside of `torch.utils.checkpoint` made this node."""
    return "ac_graph_id" in node.meta


def describe_saved(index: int) -> Any:
    """Describe a saved value to AOTAutograd."""
    return SavedForBackwardsAOTOutput(index)


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


def take_over_results() -> tuple[int, ...]:
    """Keep AOTAutograd from making results of views that a graph returns, which `unviewed` is to do; give where.

    It would do so where nobody can see any more whether the caller changes them in place.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    meta = context.fw_metadata
    found = tuple(meta.num_mutated_inp_runtime_indices + i for i in meta.unsafe_view_out_indices)
    meta.unsafe_view_out_indices, meta.num_unsafe_view_outputs = [], 0
    return found


def returns_the_wrong_values(forward_outputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd has put an input where the captured function returns a value of its own.

    Seen in torch 2.13 where one graph overwrites an input that needs a gradient and returns another one that it
    overwrites (spectral norm): the caller would get that input, of another shape or, worse, of the same.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return False
    meta = context.fw_metadata
    own = (OutputType.non_alias, OutputType.unsafe_view_alias)
    returned = forward_outputs[meta.num_mutated_inp_runtime_indices :]
    return any(
        info.output_type in own and isinstance(value, fx.Node) and value.op == "placeholder"
        for info, value in zip(meta.output_info, returned, strict=False)
    )


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
    """Look at the tokens that AOTAutograd saves in a forward; what other functions save is none of our business."""
    save = FunctionCtx.save_for_backward
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def save_and_look(context: Any, *tensors: Any) -> None:
        save(context, *tensors)
        is_captured = type(context).__name__ == "CompiledFunctionBackward"
        if is_captured and any(getattr(tensor, "takes_absent", False) for tensor in tensors):
            context.set_materialize_grads(False)

    setattr(FunctionCtx, "save_for_backward", save_and_look)  # noqa: B010  a method can't be assigned


def outermost_autocasts(graph: fx.Graph) -> dict[str, int]:
    """Number the blocks of autocast that are within no other and remember casts, by the names of the nodes in them."""
    depth, number, remembers, found = 0, 0, True, dict[str, int]()
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            if depth == 0:
                number, remembers = number + 1, node.args[-1] is not False
            depth += 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            depth -= 1
        elif depth and remembers:
            found[node.name] = number
    return found


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
    """Let a view of an input be traced with the sizes that the input has; AOTAutograd would make symbols for them."""
    context = TracingContext.try_get()
    if context is not None and other in context.tensor_to_context:
        context.tensor_to_context[tensor] = context.tensor_to_context[other]


def input_position(placeholder: fx.Node) -> int | None:
    """Give the position among the inputs of the captured function, None for what AOTAutograd added."""
    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None
