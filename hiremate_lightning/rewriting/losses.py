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
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..torch_private import tensor_state
from .joint import SHAPES, alone_behind, drop_unread, is_part, replace_node, source_of, written_storages
from .kernels import part_length
from .operations import Into, Operation, register

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

    Args:
        logits: Of each class in the last dimension.
        target: Classes, one for each row.
        reduction: Of the rows' losses: 0 for none, 1 for mean, 2 for sum.
        ignore_index: Target of rows that do not count.
        shape: Rows and classes.
        dtype: In which to compute.
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
    """Return the gradient of a cross entropy with respect to its logits.

    Args:
        gradient: Of the loss: a number, or one for each row.
        logits: Of each class in the last dimension.
        target: Classes, one for each row.
        weight: Of each class.
        reduction: Of the rows' losses: 0 for none, 1 for mean, 2 for sum.
        ignore_index: Target of rows that do not count.
        total_weight: Of all rows, as the forward has found it.
        shape: Rows and classes.
        dtype: In which to compute.
        result_shape: Of the result.
        result_dtype: Of the result.
        out: Where to write it, None for new memory; the logits themselves will do, where they look like the result.
    """
    result = torch.empty(result_shape, dtype=result_dtype, device=logits.device) if out is None else out
    by_rows = result.view(shape)
    memory = torch.empty((_rows_of_a_part(shape, dtype), shape[1]), dtype=dtype, device=logits.device)
    for part, logarithms in _parts(logits, shape, dtype):
        of = gradient[part] if gradient.dim() else gradient
        made = memory[: len(logarithms)]
        told = (target[part], weight, reduction, ignore_index, total_weight)
        aten.nll_loss_backward.grad_input(of, logarithms, *told, grad_input=made)
        aten._log_softmax_backward_data.out(made, logarithms, 1, dtype, out=made)
        by_rows[part].copy_(made)
    return result


def _parts(logits: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Return the logarithms of the softmax of some rows after the other, each time in the same memory."""
    rows = _rows_of_a_part(shape, dtype)
    memory = torch.empty((rows, shape[1]), dtype=dtype, device=logits.device)
    for start in range(0, shape[0], rows):
        part = slice(start, min(start + rows, shape[0]))
        made = memory[: part.stop - start]
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


def _rows_of_a_part(shape: Sequence[int], dtype: torch.dtype) -> int:
    count, classes = shape
    return -(-part_length(count, classes * dtype.itemsize) // _TOGETHER) * _TOGETHER


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross entropy in a joint graph.

    Attributes:
        forward: Gives the loss and the weight of all rows.
        backward: The derivative of the loss with respect to the logarithms.
        logits: What it reads.
        gradient: The value that has become of that derivative.
        shape: Rows and classes.
        dtype: In which it is computed.
    """

    forward: fx.Node
    backward: fx.Node
    logits: fx.Node
    gradient: fx.Node
    shape: list[int]
    dtype: torch.dtype


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


def _logits_of(gradient: fx.Node) -> tuple[fx.Node, ...]:
    """Return the logits: plain PyTorch reads the logarithms in their place."""
    logits: Any = gradient.args[1]
    return (logits,)


register(cross_entropy, Operation(plain_bytes=_plain_bytes_of_loss))
register(
    cross_entropy_gradient,
    Operation(plain_bytes=_plain_bytes_of_gradient, plain_only_reads=_logits_of, into=Into.BY_ROWS, keeps_nothing=True),
)


def join(joint: fx.GraphModule) -> None:
    """Rewrite a joint graph, dead code already removed: a cross entropy is one operation, and its gradient another.

    Not where the step writes to the memory of the logits: the backward could not read them any more.
    """
    losses = joint.graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default)
    written = written_storages(joint) if losses else set()
    for node in losses:
        loss = _loss_at(node)
        if loss is not None and tensor_state.storage_id(loss.logits.meta["val"]) not in written:
            _replace(loss)
    if losses:
        drop_unread(joint.graph)


def _replace(loss: _Loss) -> None:
    made = loss.gradient.meta["val"]
    gradient, _, *told = loss.backward.args
    how = (loss.shape, loss.dtype, list(made.shape), made.dtype)
    replace_node(loss.gradient, cross_entropy_gradient, (gradient, loss.logits, *told, *how))
    _, target, weight, reduction, ignore_index = loss.forward.args
    if weight is None:
        args = (loss.logits, target, reduction, ignore_index, loss.shape, loss.dtype)
        replace_node(loss.forward, cross_entropy, args)


def _loss_at(forward: fx.Node) -> _Loss | None:
    """Return the loss whose forward a node is, None where what lies around it has another form."""
    logarithms: Any = forward.args[0]
    shown = logarithms.meta.get("val")
    if logarithms.target is not aten._log_softmax.default or forward.kwargs or tensor_state.is_symbolic(shown):
        return None
    readers = [n for n in logarithms.users if n is not forward]
    backward = next((n for n in readers if n.target is aten.nll_loss_backward.default), None)
    if backward is None or not _is_derivative(backward, forward, logarithms) or shown.dim() != 2:
        return None
    rest = next(iter(backward.users)) if len(backward.users) == 1 else None
    if rest is None or rest.target is not aten._log_softmax_backward_data.default or {*readers} != {backward, rest}:
        return None
    if rest.args != (backward, logarithms, logarithms.args[1], shown.dtype) or logarithms.args[1] not in (1, -1):
        return None
    logits, gradient = _source_of(logarithms), _converted(rest)
    in_order = all(n.meta["val"].is_contiguous() for n in (logarithms, backward, gradient))
    is_alike = logits.meta["val"].device == shown.device == gradient.meta["val"].device and not logarithms.args[2]
    is_large = shown.shape[1] * shown.itemsize >= thresholds.current.row_bytes
    if not (in_order and is_alike and is_large):
        return None
    return _Loss(forward, backward, logits, gradient, list(shown.shape), shown.dtype)


def _is_derivative(backward: fx.Node, forward: fx.Node, logarithms: fx.Node) -> bool:
    _, read, *told, total_weight = backward.args
    is_total = isinstance(total_weight, fx.Node) and is_part(total_weight) and total_weight.args == (forward, 1)
    return read is logarithms and tuple(told) == forward.args[1:] and is_total and not backward.kwargs


def _source_of(logarithms: fx.Node) -> fx.Node:
    """Return what a loss may read: through other shapes, what was converted for it alone, or what it was given."""
    copy = alone_behind(logarithms)
    if copy is not None and copy.target is aten._to_copy.default and copy.kwargs.keys() <= _OPTIONS:
        source = source_of(copy)
        of, shape = source.meta["val"], logarithms.meta["val"].shape
        if of.dim() > 1 and of.shape[-1] == shape[1] and not of.is_complex():
            return source
    return source_of(logarithms)


def _converted(gradient: fx.Node) -> fx.Node:
    """Return what becomes of a gradient: itself, or its conversion in other shapes, where nothing else reads it."""
    value = gradient
    while len(value.users) == 1:
        (reader,) = value.users
        if reader.target is aten._to_copy.default and reader.kwargs.keys() <= _OPTIONS:
            return reader
        if reader.target not in SHAPES:
            break
        value = reader
    return gradient
