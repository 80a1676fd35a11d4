"""What runs in place of captured operators: kernels of eager PyTorch, and fused ones.

AOTAutograd captures some operations of eager as operators that round, draw or read otherwise, or need more memory. Here
is which, and what computes the same. A fused kernel is made of several operations, called like an operator, and
compiled by Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..torch_private import aot, inductor, tensor_state
from .nodes import Operation, operation_of, register

aten = torch.ops.aten

PARTS = 16  # most parts of an operation that takes some rows at a time
_BY_ROWS = (torch.bernoulli, "bernoulli")  # the function and the method


def as_eager(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return what eager PyTorch runs for a node: a function, and its arguments without names.

    Eager's dropout on the CPU multiplies by a quotient in the input's type, in both directions. The operators that are
    captured instead multiply by a number that may be rounded otherwise, and are slower. And `bernoulli_` is captured as
    `bernoulli`.
    Some operators take less memory here than in eager, and no captured graph knows how much they take there.
    """
    arguments: Any = node.args
    if _is_dropout_on_host(node) and arguments[1] < 1:
        source, probability = arguments[:2]
        return dropout, (source, probability, eager_scale(source, probability))
    if node.target is aten.native_dropout_backward.default:
        gradient, mask = arguments[:2]
        drop: Any = operation_of(mask)
        if _is_dropout_on_host(drop):
            return apply_dropout_mask, (gradient, mask, eager_scale(gradient, drop.args[1]))
    if node.target in _COMPACT and not node.meta["val"].dim():
        return _COMPACT[node.target], arguments
    if node.target is aten.col2im.default:
        return fold, arguments
    if node.target is aten.bernoulli.p and not node.kwargs and aot.called(node) not in _BY_ROWS:
        return draw_in_place, arguments
    return node.target, arguments


def _plain_times(drop: fx.Node, position: int) -> int:
    """Return how many times as large a result is in eager: on the CPU, a mask has the type of what it drops from."""
    source: Any = drop.args[0]
    is_wide = position == 1 and as_eager(drop)[0] is dropout
    return int(source.meta["val"].itemsize) if is_wide else 1


register(aten.native_dropout.default, Operation(plain_times=_plain_times))


def _compact(reduced: Any) -> Callable[..., torch.Tensor]:
    def compact(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = reduced(*args, **kwargs).clone()
        return result

    compact.__name__ = compact.__qualname__ = f"compact_{reduced.overloadpacket.__name__}"
    return compact


# Losses whose one number keeps the memory of all its terms.
_COMPACT = {
    reduced: _compact(reduced)
    for reduced in (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
    )
}


def fold(columns: torch.Tensor, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> torch.Tensor:
    """Add columns up as `col2im` does, whose result keeps memory for all of them."""
    channels = columns.shape[-2] // (kernel[0] * kernel[1])
    result: torch.Tensor = columns.new_empty((*columns.shape[:-2], channels, *size))
    return aten.col2im.out(columns, size, kernel, dilation, padding, stride, out=result)  # type: ignore[no-any-return]


def draw_in_place(source: torch.Tensor, probability: float) -> torch.Tensor:
    """Draw as `bernoulli_` does, in the order of the memory; the operator that is captured for it draws by rows."""
    return torch.empty_like(source).bernoulli_(probability)


def eager_scale(source: fx.Node, probability: float) -> float:
    """Return the number by which eager PyTorch multiplies what a dropout keeps."""
    if probability == 1:
        return 0.0
    shown: torch.Tensor = source.meta["val"]
    if shown.device.type != "cpu":
        return _as_operand(1.0 / _as_operand(1.0 - probability, source), source)  # CUDA's kernel rounds both
    with tensor_state.real_mode():
        return float(torch.ones((), dtype=shown.dtype).div_(1.0 - probability))


def _is_dropout_on_host(node: fx.Node) -> bool:
    source: Any = node.args[0] if node.args else None
    is_dropout = node.target is aten.native_dropout.default and node.args[2] is not False
    return is_dropout and bool(source.meta["val"].device.type == "cpu")


def _as_operand(scale: float, source: fx.Node) -> float:
    """Round a number as kernels do that multiply a tensor by it."""
    dtype = torch.float64 if source.meta["val"].dtype == torch.float64 else torch.float32
    with tensor_state.real_mode():
        return float(torch.tensor(scale, dtype=dtype))


def dropout(source: torch.Tensor, probability: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a mask and apply it; return both, as `native_dropout` does."""
    mask = draw_mask(source, probability, source.device)
    return apply_dropout_mask(source, mask, scale), mask


def draw_mask(like: torch.Tensor, probability: float, device: torch.device) -> torch.Tensor:
    """Draw the mask of a dropout of a tensor that looks like this one, which may lie on the meta device."""
    return torch.empty_like(like, dtype=torch.bool, device=device).bernoulli_(1.0 - probability)


def apply_dropout_mask(source: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what a dropout keeps, of its input or of its output's gradient."""
    if source.is_cpu and source.stride() == mask.stride():  # in one block; a product with booleans takes a second one
        return mask.view(torch.uint8).to(source.dtype).mul_(scale).mul_(source)
    return torch.mul(source, mask).mul_(scale)


def needs_traced_layout(target: Any) -> bool:
    """Whether an operator of the backward must get its tensors with the strides that they were traced with.

    Gradients come from the caller with other strides than were traced. Operators of PyTorch read them as they are, but
    for those whose derivative makes the gradient contiguous first, which left no trace where it was traced as such
    already; and those that address memory. What others wrote may rely on anything.
    """
    if isinstance(target, aot.OpOverload):
        return target.namespace not in ("aten", "prims") or target.overloadpacket in _READ_MEMORY
    return isinstance(target, (aot.HigherOrderOperator, Kernel))


_READ_MEMORY = {
    getattr(aten, name)
    for name in (
        "native_group_norm_backward",
        "cudnn_batch_norm_backward",
        "miopen_batch_norm_backward",
        "_cdist_backward",
        "_pdist_backward",
        "mkldnn_rnn_layer_backward",
        "_cudnn_rnn_backward",
        "miopen_rnn_backward",
        "_thnn_fused_lstm_cell_backward_impl",
        "_thnn_fused_gru_cell_backward",
        "_weight_norm_interface_backward",
        "as_strided",
        "as_strided_scatter",
        "view_as_complex",
        "view_as_real",
    )
}


def memory_format_of(value: torch.Tensor) -> torch.memory_format | None:
    """Describe how a tensor lies in memory, None where it has gaps or another order of its dimensions."""
    last = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(value.dim(), ())
    return next((f for f in (torch.contiguous_format, *last) if value.is_contiguous(memory_format=f)), None)


def parts_of(count: int, row_bytes: int, together: int = 1) -> list[slice]:
    """Divide rows into parts to take one after the other, the last one the smallest; some rows stay together.

    A part is at most half of them, or all of them at once would take less memory.
    """
    enough = -(-thresholds.current.part_bytes // max(1, row_bytes))
    rows = max(1, -(-count // PARTS), min(enough, -(-count // 2)))
    rows = -(-rows // together) * together
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def waves(shape: tuple[int, ...]) -> torch.Tensor:
    """Make numbers of both signs and all magnitudes up to three, without a generator, to compare kernels on."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64).mul_(1.7).sin_().mul_(3).view(shape)


# ---------------------------------------------------------------- fused kernels


class Kernel:
    """A fused group of operations, called like an operator. What can't be compiled runs operation by operation.

    The group takes tensors and returns a list of tensors that look like the results. `announce` is told of failures.
    """

    def __init__(
        self, module: fx.GraphModule, key: str, results: Sequence[torch.Tensor], announce: Callable[[str], None]
    ) -> None:
        self.module = module
        self.__name__ = self.__qualname__ = "fused_" + hashlib.sha256(key.encode()).hexdigest()[:12]
        self._layouts, self._announce = [_layout(r) for r in results], announce
        self.run: inductor.Compiled | None = None

    def __str__(self) -> str:
        return f"hiremate.{self.__name__}"

    __repr__ = __str__

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Compute the results: a tensor, or several in a sequence."""
        if self.run is None:
            self.compile()
        assert self.run is not None, "it has just been compiled"
        results = self.run(list(inputs))
        return results[0] if len(self._layouts) == 1 else results

    def compile(self) -> None:
        """Compile the group, and try the kernel on made-up inputs; outside of torch's tracing modes."""
        module = self.module
        shown = [p.meta["val"] for p in module.graph.find_nodes(op="placeholder")]
        try:
            inputs = [tensor_state.laid_out_like(s).zero_() for s in shown]
            run = inductor.compile_graph(module, inputs)
            self._check(run(list(inputs)), inputs)
        except Exception as error:  # whatever a compiler may fail with: the group runs all the same
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._announce(
                f"Inductor could not compile a group of {len(module.graph.nodes)} operations, "
                f"which run one by one: {type(error).__name__}: {reason}"
            )
            self.run = lambda arguments: module(*arguments)
        else:
            self.run = run

    def _check(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Hold a compiled kernel to what was traced: what follows relies on layouts, and on results of their own."""
        layouts = [_layout(r) for r in results]
        if layouts != self._layouts:
            raise ValueError(f"its results are laid out as {layouts}, expected {self._layouts}")
        storages = [tensor_state.storage_id(t) for t in results]
        if len(set(storages)) < len(storages) or set(storages) & tensor_state.storages_among(inputs):
            raise ValueError("its results share memory")


class FusedKernels:
    """Gives each distinct group its kernel: equal groups, in all layers and graphs, share one."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce, self._known = announce, dict[str, Kernel]()

    def get(self, module: fx.GraphModule, results: Sequence[torch.Tensor]) -> Kernel:
        """Return the kernel of a group, which takes tensors and returns a list of these results."""
        key = _describe(module.graph)
        if key not in self._known:
            self._known[key] = Kernel(module, key, results, self._announce)
        return self._known[key]

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile what is not compiled yet; the progress is the number of compiled kernels, and of all."""
        missing = [kernel for kernel in self._known.values() if kernel.run is None]
        for done, kernel in enumerate(missing):
            progress(done, len(missing))
            kernel.compile()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _describe(graph: fx.Graph) -> str:
    """Describe what a graph computes: equal for graphs that do the same, whatever their nodes are called."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        shown = node.meta["val"] if node.op == "placeholder" else None
        what = str(node.target) if shown is None else f"{_layout(shown)} {shown.device}"
        lines.append(f"{node.op} {what} {args} {kwargs}")
    return "; ".join(lines)
