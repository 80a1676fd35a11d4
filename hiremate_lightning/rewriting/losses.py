"""Cross entropies some rows at a time: no logarithms of probabilities, and no gradient of them, exist as a whole.

`F.cross_entropy` takes the logarithms of a softmax and picks one of each row; its gradient reads all of them again. For
a language model these are its largest tensors: eager PyTorch holds the logits, in half precision also a copy in single
precision, the logarithms, and two or three gradients as large. Here the loss is one operation and its gradient another.
Both read the logits, and take a few rows after the other through the same steps. The kernels are those of eager
PyTorch, and of each row they compute the same, whatever rows are beside it; the losses of the rows are added up by the
kernel of eager, in its order. What it costs is to take the logarithms twice, where products with the weights that make
logits cost a hundred times that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..torch_private import tensor_state
from . import nodes
from .kernels import parts_of

aten = torch.ops.aten

_TOGETHER = 8  # rows: a part begins where memory is aligned as for the first row, since kernels add up by that
_OPTIONS = {"dtype", "layout", "device"}
_IGNORED = -100


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of logits, and the number of the rows that count, as `nll_loss_forward` does.

    Classes are the last dimension of the logits; `shape` is of rows and classes. It is computed in this type. The rows'
    losses are reduced: 0 for none, 1 for mean, 2 for sum.
    """
    losses = torch.empty(shape[0], dtype=dtype, device=logits.device)
    for part, logarithms in _parts(logits, shape, dtype):
        losses[part] = aten.nll_loss_forward(logarithms, target[part], None, 0, ignore_index)[0]
    is_ignored = target.long() == ignore_index  # as a byte, -100 would be 156
    kept = torch.where(is_ignored, _IGNORED, 0)  # what each row has picked is all that it has now
    picked = losses.neg_().unsqueeze(1)
    return aten.nll_loss_forward(picked, kept, None, reduction, _IGNORED)  # type: ignore[no-any-return]


def cross_entropy_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    result_shape: Sequence[int],
    result_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of a cross entropy with respect to its logits, from that of the loss.

    What describes the loss is as for `cross_entropy`, with the weight of all rows that the forward has found. The
    logits themselves will do as `out`, where they look like the result.
    """
    result = torch.empty(result_shape, dtype=result_dtype, device=logits.device) if out is None else out
    by_rows = result.view(shape)
    memory: torch.Tensor | None = None
    for part, logarithms in _parts(logits, shape, dtype):
        of = gradient[part] if gradient.dim() else gradient
        memory = torch.empty_like(logarithms) if memory is None else memory
        made = memory[: len(logarithms)]
        told = (target[part], weight, reduction, ignore_index, total_weight)
        aten.nll_loss_backward.grad_input(of, logarithms, *told, grad_input=made)
        aten._log_softmax_backward_data.out(made, logarithms, 1, dtype, out=made)
        by_rows[part].copy_(made)
    return result


def _parts(logits: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Return the logarithms of the softmax of some rows after the other, each time in the same memory."""
    count, classes = shape
    parts = parts_of(count, classes * dtype.itemsize, _TOGETHER)
    memory = torch.empty((parts[0].stop if parts else 0, classes), dtype=dtype, device=logits.device)
    for part in parts:
        made = memory[: part.stop - part.start]
        _copy_rows(logits, part, made)
        yield part, aten._log_softmax.out(made, 1, False, out=made)


def _copy_rows(logits: torch.Tensor, part: slice, into: torch.Tensor) -> None:
    """Copy some rows of a tensor, counted over all dimensions but the last."""
    if logits.dim() == 2:
        into.copy_(logits[part])
        return
    count, start = logits.shape[:-1].numel() // logits.shape[0], part.start
    while start < part.stop:
        outer, inner = divmod(start, count)
        stop = min(part.stop, (outer + 1) * count)
        inside = slice(inner, inner + stop - start)
        _copy_rows(logits[outer], inside, into[start - part.start : stop - part.start])
        start = stop


def _plain_bytes_of_loss(loss: fx.Node) -> int:
    """Return the bytes of a copy of the logits, where plain PyTorch converts them, and of the logarithms."""
    args: Any = loss.args
    logits, *_, (rows, classes), dtype = args
    copies = 1 if logits.meta["val"].dtype == dtype else 2
    return int(copies * rows * classes * dtype.itemsize)


def _plain_bytes_of_gradient(gradient: fx.Node) -> int:
    """Return the bytes of the logarithms and two gradients; the result takes the place of what is gone by then."""
    args: Any = gradient.args
    _, logits, *_, (rows, classes), dtype, _, result_dtype = args
    reused = logits.meta["val"].itemsize + result_dtype.itemsize
    return int(rows * classes * (3 * dtype.itemsize - reused))


nodes.register(cross_entropy, nodes.Operation(plain_bytes=_plain_bytes_of_loss))
nodes.register(
    cross_entropy_gradient,
    nodes.Operation(
        plain_bytes=_plain_bytes_of_gradient,
        plain_only_reads=lambda gradient: (gradient.all_input_nodes[1],),  # the logits: it reads the logarithms instead
        into=nodes.Into.BY_ROWS,
        keeps_nothing=True,
    ),
)


def join(joint: fx.GraphModule) -> None:
    """Rewrite a joint graph: a cross entropy is one operation, and its gradient another."""
    losses = joint.graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default)
    written = nodes.written_storages(joint) if losses else set()
    for forward in losses:
        backward = _derivative_of(forward)
        if backward is not None:
            _join(forward, backward, written)


def _join(forward: fx.Node, backward: fx.Node, written: set[int]) -> None:
    """Make a loss and its gradient read the logits, where all lies in order and the step does not overwrite them."""
    logarithms: Any = forward.args[0]
    logits, gradient = _source_of(logarithms), _converted(next(iter(backward.users)))
    read, shown, made = (node.meta["val"] for node in (logits, logarithms, gradient))
    in_order = all(t.is_contiguous() for t in (shown, backward.meta["val"], made))
    if not in_order or not read.device == shown.device == made.device or tensor_state.storage_id(read) in written:
        return
    how = ([*shown.shape], shown.dtype)
    arriving, _, *told = backward.args
    nodes.replace_node(gradient, cross_entropy_gradient, (arriving, logits, *told, *how, [*made.shape], made.dtype))
    _, target, weight, reduction, ignore_index = forward.args
    if weight is None:
        nodes.replace_node(forward, cross_entropy, (logits, target, reduction, ignore_index, *how))


def _derivative_of(forward: fx.Node) -> fx.Node | None:
    """Return the derivative of a large loss, where only these two and what follows it read the logarithms."""
    logarithms: Any = forward.args[0]
    shown = logarithms.meta.get("val")
    if logarithms.target is not aten._log_softmax.default or forward.kwargs or tensor_state.is_symbolic(shown):
        return None
    _, dim, is_cast = logarithms.args
    readers = {*logarithms.users} - {forward}
    backward = next((n for n in readers if n.target is aten.nll_loss_backward.default), None)
    if backward is None or shown.dim() != 2 or dim not in (1, -1) or is_cast or len(backward.users) != 1:
        return None
    (rest,) = backward.users
    _, read, *told, total = backward.args
    is_total = isinstance(total, fx.Node) and nodes.is_part(total) and total.args == (forward, 1)
    is_derivative = read is logarithms and tuple(told) == forward.args[1:] and is_total and not backward.kwargs
    is_rest = rest.target is aten._log_softmax_backward_data.default and readers == {backward, rest}
    if not is_derivative or not is_rest or rest.args != (backward, logarithms, dim, shown.dtype):
        return None
    return backward if shown.shape[1] * shown.itemsize >= thresholds.current.row_bytes else None


def _source_of(logarithms: fx.Node) -> fx.Node:
    """Return what a loss may read: through other shapes, what was converted for it alone, or what it was given."""
    reader, before = logarithms, nodes.source_of(logarithms)
    while before.target in nodes.SHAPES and before.users.keys() == {reader}:
        reader, before = before, nodes.source_of(before)
    is_copy = before.target is aten._to_copy.default and before.kwargs.keys() <= _OPTIONS
    if is_copy and before.users.keys() == {reader}:
        source = nodes.source_of(before)
        of, shape = source.meta["val"], logarithms.meta["val"].shape
        if of.dim() > 1 and of.shape[-1] == shape[1] and not of.is_complex():
            return source
    return nodes.source_of(logarithms)


def _converted(gradient: fx.Node) -> fx.Node:
    """Return what becomes of a gradient: itself, or its conversion in other shapes, where nothing else reads it."""
    value = gradient
    while len(value.users) == 1:
        (reader,) = value.users
        if reader.target is aten._to_copy.default and reader.kwargs.keys() <= _OPTIONS:
            return reader
        if reader.target not in nodes.SHAPES:
            break
        value = reader
    return gradient
