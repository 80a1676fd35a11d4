"""Cross entropy by rows: neither the log probabilities of all rows nor their gradient exist in memory at once.

`F.cross_entropy` computes a log softmax and picks one element of each row; its gradient reads all of them again. In a
language model these are the largest tensors: eager PyTorch holds the logits, for half precision a copy in single
precision, the log probabilities, and two or three gradients of that size. This pass makes the loss one operation and
its gradient another. Both read the logits, and process a few rows at a time with eager PyTorch's kernels, which compute
each row independently of the other rows; eager's kernel adds up the losses of the rows in eager's order. The cost is a
second log softmax; the matrix product that makes the logits takes about a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..torch_private import tensor_state
from . import nodes
from .joint import Joint
from .kernels import parts_of

aten = torch.ops.aten

_TOGETHER = 8  # rows per part are a multiple: each part is aligned as the first row, on which the order of sums depends
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
    """Return the cross entropy of logits, and the number of rows that are not ignored, as `nll_loss_forward` does.

    The last dimension of the logits is the classes; `shape` is (rows, classes). The computation is in `dtype`.
    `reduction` of the rows' losses: 0 for none, 1 for mean, 2 for sum.
    """
    losses = torch.empty(shape[0], dtype=dtype, device=logits.device)
    for part, logarithms in _parts(logits, shape, dtype):
        losses[part] = aten.nll_loss_forward(logarithms, target[part], None, 0, ignore_index)[0]
    is_ignored = target.long() == ignore_index  # as a byte, -100 would be 156
    kept = torch.where(is_ignored, _IGNORED, 0)  # each row now has one element, class 0
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
    """Return the gradient of a cross entropy with respect to its logits; `gradient` is the gradient of the loss.

    The other arguments are as for `cross_entropy`, with class weights, and the forward's second result `total_weight`.
    `out` may be the logits themselves if they have the layout of the result.
    """
    result = torch.empty(result_shape, dtype=result_dtype, device=logits.device) if out is None else out
    by_rows = result.view(shape)
    memory: torch.Tensor | None = None
    for part, logarithms in _parts(logits, shape, dtype):
        of_part = gradient[part] if gradient.dim() else gradient
        memory = torch.empty_like(logarithms) if memory is None else memory
        made = memory[: len(logarithms)]
        loss_arguments = (target[part], weight, reduction, ignore_index, total_weight)
        aten.nll_loss_backward.grad_input(of_part, logarithms, *loss_arguments, grad_input=made)
        aten._log_softmax_backward_data.out(made, logarithms, 1, dtype, out=made)
        by_rows[part].copy_(made)
    return result


def _parts(logits: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a few rows at a time and their log softmax, each time in the same memory."""
    count, classes = shape
    parts = parts_of(count, classes * dtype.itemsize, _TOGETHER)
    memory = torch.empty((parts[0].stop if parts else 0, classes), dtype=dtype, device=logits.device)
    for part in parts:
        made = memory[: part.stop - part.start]
        _copy_rows(logits, part, made)
        yield part, aten._log_softmax.out(made, 1, False, out=made)


def _copy_rows(logits: torch.Tensor, part: slice, into: torch.Tensor) -> None:
    """Copy the rows `part` of a tensor; rows are counted over all dimensions but the last."""
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


def _eager_bytes_of_loss(loss: fx.Node) -> int:
    """Return eager PyTorch's bytes of the log probabilities, and of a converted copy of the logits if there is one."""
    args: Any = loss.args
    logits, *_, (rows, classes), dtype = args
    copies = 1 if logits.meta["val"].dtype == dtype else 2
    return int(copies * rows * classes * dtype.itemsize)


def _eager_bytes_of_gradient(gradient: fx.Node) -> int:
    """Return eager PyTorch's bytes of the log probabilities and two gradients, less those of the logits and result."""
    args: Any = gradient.args
    _, logits, *_, (rows, classes), dtype, _, result_dtype = args
    reused = logits.meta["val"].itemsize + result_dtype.itemsize
    return int(rows * classes * (3 * dtype.itemsize - reused))


nodes.register(cross_entropy, nodes.Operation(eager_bytes=_eager_bytes_of_loss))
nodes.register(
    cross_entropy_gradient,
    nodes.Operation(
        eager_bytes=_eager_bytes_of_gradient,
        unread_in_eager=lambda gradient: (gradient.all_input_nodes[1],),  # the logits: eager reads log probabilities
        into=nodes.Into.BY_ROWS,
        keeps_nothing=True,
    ),
)


def join(joint: Joint) -> None:
    """Replace each large cross entropy of a joint graph by one operation, and its gradient by another."""
    losses = joint.graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default)
    written = nodes.written_storages(joint.module) if losses else set()
    for forward in losses:
        backward = _derivative_of(forward)
        if backward is not None:
            _join(forward, backward, written)


def _join(forward: fx.Node, backward: fx.Node, written: set[int]) -> None:
    """Make a loss and its gradient read the logits, if tensors are contiguous and the step never overwrites logits."""
    logarithms: Any = forward.args[0]
    logits, gradient = _source_of(logarithms), _converted(next(iter(backward.users)))
    read, shown, made = (node.meta["val"] for node in (logits, logarithms, gradient))
    in_order = all(t.is_contiguous() for t in (shown, backward.meta["val"], made))
    if not in_order or not read.device == shown.device == made.device or tensor_state.storage_id(read) in written:
        return
    how = ([*shown.shape], shown.dtype)
    arriving, _, *rest = backward.args
    nodes.replace_node(gradient, cross_entropy_gradient, (arriving, logits, *rest, *how, [*made.shape], made.dtype))
    _, target, weight, reduction, ignore_index = forward.args
    if weight is None:
        nodes.replace_node(forward, cross_entropy, (logits, target, reduction, ignore_index, *how))


def _derivative_of(forward: fx.Node) -> fx.Node | None:
    """Return the derivative of a large loss if only the loss, it and its log softmax backward read the log softmax."""
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
    _, read, *arguments, total = backward.args
    is_total = isinstance(total, fx.Node) and nodes.is_part(total) and total.args == (forward, 1)
    is_derivative = read is logarithms and tuple(arguments) == forward.args[1:] and is_total and not backward.kwargs
    is_rest = rest.target is aten._log_softmax_backward_data.default and readers == {backward, rest}
    if not is_derivative or not is_rest or rest.args != (backward, logarithms, dim, shown.dtype):
        return None
    return backward if shown.shape[1] * shown.itemsize >= thresholds.current.row_bytes else None


def _source_of(logarithms: fx.Node) -> fx.Node:
    """Return the logits that a loss may read: those before a conversion made for it alone, else its input."""
    reader, before = logarithms, nodes.source_of(logarithms)
    while before.target in nodes.SHAPES and before.users.keys() == {reader}:
        reader, before = before, nodes.source_of(before)
    is_copy = before.target is aten._to_copy.default and before.kwargs.keys() <= _OPTIONS
    if is_copy and before.users.keys() == {reader}:
        source = nodes.source_of(before)
        logits, shape = source.meta["val"], logarithms.meta["val"].shape
        if logits.dim() > 1 and logits.shape[-1] == shape[1] and not logits.is_complex():
            return source
    return nodes.source_of(logarithms)


def _converted(gradient: fx.Node) -> fx.Node:
    """Return the conversion of a gradient to another dtype if nothing else reads the gradient, else the gradient."""
    value = gradient
    while len(value.users) == 1:
        (reader,) = value.users
        if reader.target is aten._to_copy.default and reader.kwargs.keys() <= _OPTIONS:
            return reader
        if reader.target not in nodes.SHAPES:
            break
        value = reader
    return gradient
