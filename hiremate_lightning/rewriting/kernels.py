"""Functions that run in place of captured operators: eager PyTorch's kernels, and fused kernels.

AOTAutograd captures some eager operations as operators that round, draw or read differently, or need more memory.
`as_eager` returns functions with eager's results for them. A fused kernel consists of several operations, is called
like an operator, and is compiled by Inductor.
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

PARTS = 16  # most parts into which an operation's rows are divided
_BY_ROWS = (torch.bernoulli, "bernoulli")  # the function and the method that draw by rows, unlike `bernoulli_`


def as_eager(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the function with eager PyTorch's result for a node, and its positional arguments.

    Eager's dropout on the CPU multiplies by a quotient in the input's dtype, in forward and backward. The captured
    operators multiply by a number that may be rounded differently, and are slower. `bernoulli_` is captured as
    `bernoulli`. Some losses and `col2im` return large storages in eager; the functions for them return small ones.
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
    if node.target in _SPREAD and not node.meta["val"].dim():
        return compact, (node.target, *arguments)
    if node.target is aten.col2im.default:
        return fold, arguments
    if node.target is aten.bernoulli.p and not node.kwargs and aot.called(node) not in _BY_ROWS:
        return draw_in_place, arguments
    return node.target, arguments


def _eager_times(drop: fx.Node, position: int) -> int:
    """Return the factor by which a result is larger in eager: on the CPU, its mask has the dtype of the input."""
    source: Any = drop.args[0]
    is_wide = position == 1 and as_eager(drop)[0] is dropout
    return int(source.meta["val"].itemsize) if is_wide else 1


register(aten.native_dropout.default, Operation(eager_times=_eager_times))


# Losses whose result, one number, is on a storage as large as all its terms.
_SPREAD = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)


def compact(loss: aot.OpOverload, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the number that a loss in `_SPREAD` returns, on a storage of its own."""
    result: torch.Tensor = loss(*args, **kwargs)
    return result.clone()


def fold(columns: torch.Tensor, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> torch.Tensor:
    """Add up columns as `col2im` does, but into a storage of the result's size; `col2im` keeps a larger one."""
    channels = columns.shape[-2] // (kernel[0] * kernel[1])
    result: torch.Tensor = columns.new_empty((*columns.shape[:-2], channels, *size))
    return aten.col2im.out(columns, size, kernel, dilation, padding, stride, out=result)  # type: ignore[no-any-return]


def draw_in_place(source: torch.Tensor, probability: float) -> torch.Tensor:
    """Draw as `bernoulli_` does, in order of memory; the captured operator `bernoulli` draws by rows."""
    return torch.empty_like(source).bernoulli_(probability)


def eager_scale(source: fx.Node, probability: float) -> float:
    """Return the number by which eager PyTorch's dropout multiplies the elements that it keeps."""
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
    """Round a number as a kernel does that multiplies the tensor by it: to float32, or float64 for float64."""
    dtype = torch.float64 if source.meta["val"].dtype == torch.float64 else torch.float32
    with tensor_state.real_mode():
        return float(torch.tensor(scale, dtype=dtype))


def dropout(source: torch.Tensor, probability: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a mask and apply it; return both, as `native_dropout` does."""
    mask = draw_mask(source, probability, source.device)
    return apply_dropout_mask(source, mask, scale), mask


def draw_mask(like: torch.Tensor, probability: float, device: torch.device) -> torch.Tensor:
    """Draw the mask of a dropout on `device` whose input has the layout of `like`, which may be a meta tensor."""
    return torch.empty_like(like, dtype=torch.bool, device=device).bernoulli_(1.0 - probability)


def apply_dropout_mask(source: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Apply a dropout's mask and scale to its input, or to the gradient of its output."""
    if source.is_cpu and source.stride() == mask.stride():  # saves the block that a product with booleans needs
        return mask.view(torch.uint8).to(source.dtype).mul_(scale).mul_(source)
    return torch.mul(source, mask).mul_(scale)


def needs_traced_layout(target: Any) -> bool:
    """Whether a backward operator must get its tensors with the traced strides.

    The caller's gradients may have other strides than traced. PyTorch's operators accept any strides, except operators
    that address memory, and operators before which autograd makes the gradient contiguous: the trace lacks that call if
    the traced gradient was contiguous. Operators from other libraries may rely on any strides.
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
    """Return the memory format of a tensor, None if it has gaps or another order of dimensions."""
    last = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(value.dim(), ())
    return next((f for f in (torch.contiguous_format, *last) if value.is_contiguous(memory_format=f)), None)


def parts_of(count: int, row_bytes: int, together: int = 1) -> list[slice]:
    """Divide `count` rows into parts to process one by one, the last one the smallest.

    A part has a multiple of `together` rows, and otherwise at most half of all rows, so that memory is saved.
    """
    enough = -(-thresholds.current.part_bytes // max(1, row_bytes))
    rows = max(1, -(-count // PARTS), min(enough, -(-count // 2)))
    rows = -(-rows // together) * together
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def waves(shape: tuple[int, ...]) -> torch.Tensor:
    """Make numbers from -3 to 3, for comparisons of kernels, without use of a random generator."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64).mul_(1.7).sin_().mul_(3).view(shape)


# ---------------------------------------------------------------- fused kernels


class Kernel:
    """A fused group of operations, called like an operator. If compilation fails, it runs operation by operation.

    `module` takes tensors and returns a list of tensors laid out like `results`. `warn` gets messages on failures.
    """

    def __init__(
        self, module: fx.GraphModule, key: str, results: Sequence[torch.Tensor], warn: Callable[[str], None]
    ) -> None:
        self.module = module
        self.__name__ = self.__qualname__ = "fused_" + hashlib.sha256(key.encode()).hexdigest()[:12]
        self._layouts, self._warn = [_layout(r) for r in results], warn
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
        """Compile the group and run the kernel once on zeros; call this outside of torch's tracing modes."""
        module = self.module
        shown = [p.meta["val"] for p in module.graph.find_nodes(op="placeholder")]
        try:
            inputs = [tensor_state.laid_out_like(s).zero_() for s in shown]
            run = inductor.compile_graph(module, inputs)
            self._check(run(list(inputs)), inputs)
        except Exception as error:  # a compiler may raise anything: run the group without it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._warn(
                f"Inductor could not compile a group of {len(module.graph.nodes)} operations, "
                f"which run one by one: {type(error).__name__}: {reason}"
            )
            self.run = lambda arguments: module(*arguments)
        else:
            self.run = run

    def _check(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Raise a ValueError if results have other layouts than traced or share memory: later nodes rely on both."""
        layouts = [_layout(r) for r in results]
        if layouts != self._layouts:
            raise ValueError(f"its results are laid out as {layouts}, expected {self._layouts}")
        storages = [tensor_state.storage_id(t) for t in results]
        if len(set(storages)) < len(storages) or set(storages) & tensor_state.storages_among(inputs):
            raise ValueError("its results share memory")


class FusedKernels:
    """Cache of fused kernels: equal groups, in all layers and graphs, share one kernel."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._known = warn, dict[str, Kernel]()

    def get(self, module: fx.GraphModule, results: Sequence[torch.Tensor]) -> Kernel:
        """Return the kernel of a group, whose module returns a list of tensors with the layouts of `results`."""
        # Graphs that differ only in the names of their nodes have one key.
        number, lines = {node: i for i, node in enumerate(module.graph.nodes)}, []
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
            shown = node.meta["val"] if node.op == "placeholder" else None
            what = str(node.target) if shown is None else f"{_layout(shown)} {shown.device}"
            lines.append(f"{node.op} {what} {args} {kwargs}")
        key = "; ".join(lines)
        if key not in self._known:
            self._known[key] = Kernel(module, key, results, self._warn)
        return self._known[key]

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all kernels not compiled yet; `progress` gets the number compiled so far and that to compile."""
        missing = [kernel for kernel in self._known.values() if kernel.run is None]
        for done, kernel in enumerate(missing):
            progress(done, len(missing))
            kernel.compile()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
