"""Runs code once to collect its results, and restores inputs, random generators and gradients.

A `TrialOutcome` holds the results in which two runs of the same code must agree: outputs, inputs that it has changed,
the states of random generators, and, if asked for, the gradients of the inputs. Results of a GPU are kept on the host,
so that one outcome takes no device memory while the other is computed.

Outputs that get no gradient in training get none in a trial. If the loss depends on some outputs only, autograd
computes another backward than if all outputs get gradients: it leaves out terms of sums, and the rest may have other
strides. So a trial runs the backward that training runs. Before the first backward that is a guess: code that returns
its loss, and values from which the loss was computed, gets a gradient for its loss alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from ..capturing.capture import Captured
from ..measuring.saved_offload import Files, in_file
from ..rewriting.nodes import reached
from ..torch_private import aot, autocasting, hooks, operators, tensor_state
from ..torch_private.aot import HigherOrderOperator
from ..torch_private.tensor_state import TorchDispatchMode

Unused = Callable[[Sequence[Any]], frozenset[int]]  # returns the positions of outputs that get no gradients
SEED = 0  # seed of the random gradients with which the backward of a trial begins
_WRITTEN_UNDECLARED = ("running_mean", "running_var")  # kernels of batch norms write these; their schemas don't say so
_UNWRITTEN = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True)
class TrialOutcome:
    """The results of a run of code."""

    values: dict[str, Any]  # outputs, changed inputs and states of generators, by name
    gradients: dict[str, Any]  # gradients of the inputs, by name; None for an input that gets none
    has_fills: bool = False  # whether the code allocated uninitialised memory, which the trial filled

    @property
    def has_nan(self) -> bool:
        """Whether any number is NaN."""
        values = tensor_state.leaves([*self.values.values(), *self.gradients.values()])
        return any(isinstance(v, torch.Tensor) and v.is_floating_point() and bool(v.isnan().any()) for v in values)


@dataclass(frozen=True)
class Trial:
    """Inputs and settings of a run of code."""

    arguments: Sequence[Any]
    names: Sequence[str]  # names of the arguments
    constants: Sequence[torch.Tensor] = ()  # other tensors that the code may write to
    with_gradients: bool = False  # whether to compute gradients of the inputs that require them
    files: Files | None = None  # temporary files for results on the host; None to keep these in memory
    fill: int = 255  # the byte with which uninitialised memory is filled
    unused: Unused = lambda outputs: frozenset()  # returns the positions of the outputs that get no gradients

    def run(self, function: Callable[..., Any], saving: saved_tensors_hooks | None = None) -> TrialOutcome:
        """Run code on the inputs, and restore them and the random generators.

        The tensors that the code gets are no parameters: neither hooks nor `.grad` nor optimizers see them. Autograd is
        on, so that operators are those of training; `saving` offloads the tensors that it saves, or drops them.
        """
        leaves = {
            i: tensor_state.apart(a).requires_grad_(a.requires_grad)
            for i, a in enumerate(self.arguments)
            if isinstance(a, torch.Tensor)
        }
        inputs = [leaves.get(i, a) for i, a in enumerate(self.arguments)]
        with torch.enable_grad():  # inputs that are no leaves in training are none here: code may change these in place
            for i in (i for i in leaves if not self.arguments[i].is_leaf):
                inputs[i] = _Alias.apply(leaves[i])  # type: ignore[no-untyped-call]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        grad_fns = [tensor.grad_fn for tensor in tensors]
        devices = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
        watching = _Watching([*tensors, *self.constants], self.fill)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            for kind in filter(torch.is_autocast_enabled, {t.device.type for t in tensors}):
                stack.callback(autocasting.forget_casts, kind)  # cached casts of inputs would live on
            stack.enter_context(autocasting.as_found_on_error())
            stack.callback(watching.restore)
            with watching, torch.enable_grad(), hooks.no_saved_tensor_hooks(), saving or nullcontext():
                results = function(*inputs)
                outputs = list(results) if isinstance(results, (tuple, list)) else [results]
                unused = self.unused(outputs) if self.with_gradients else ()
                used = [value for i, value in enumerate(outputs) if i not in unused]
                changed = [t for t, grad_fn in zip(tensors, grad_fns, strict=True) if t.grad_fn is not grad_fn]
                ends = _ends([*used, *changed]) if self.with_gradients else []
                values = {f"output {i}": self._kept(value, tensors) for i, value in enumerate(outputs)}
                del results, outputs, used
                gradients = self._gradients(leaves, ends) if self.with_gradients else {}
            with torch.no_grad():
                for name, value in zip(self.names, inputs, strict=True):
                    if isinstance(value, torch.Tensor) and watching.has_changed(value):
                        values[f"the new value of {name}"] = self._kept(value, tensors)
                values["the random state of cpu"] = torch.get_rng_state()
                values |= {f"the random state of {device}": torch.cuda.get_rng_state(device) for device in devices}
        return TrialOutcome(values, gradients, watching.has_filled)

    def _gradients(self, leaves: dict[int, torch.Tensor], ends: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Compute gradients of the leaves, by a backward from `_ends` of the results."""
        leaf_of = {  # without inputs that the code has changed in place, which are leaves no more
            f"the gradient of {self.names[i]}": leaf
            for i, leaf in leaves.items()
            if leaf.requires_grad and leaf.is_leaf
        }
        gradients: dict[str, Any] = dict.fromkeys(leaf_of)

        def keep(name: str, leaf: torch.Tensor) -> None:
            """Keep a gradient as it comes: it takes no memory while the backward goes on."""
            gradient, leaf.grad = leaf.grad, None
            gradients[name] = self._kept(gradient, ())

        for name, leaf in leaf_of.items():
            leaf.register_post_accumulate_grad_hook(partial(keep, name))
        device_types = sorted({leaf.device.type for leaf in leaf_of.values()})
        active = [kind for kind in device_types if torch.is_autocast_enabled(kind)]
        # Training leaves autocast before it calls the backward.
        with torch.autocast(active[0], enabled=False) if active else nullcontext():
            if ends and leaf_of:
                torch.autograd.backward(ends, inputs=list(leaf_of.values()))
        # Autograd's threads drop the tensors of a backward before they take up the next one.
        for device in {leaf.device for leaf in leaf_of.values()}:
            nothing = torch.empty(0, device=device, requires_grad=True)
            torch.autograd.grad(nothing * 1, nothing, torch.empty(0, device=device))
        return gradients

    def _kept(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """Return a value in host memory, copied if it shares memory with inputs, which are restored."""
        if not isinstance(value, torch.Tensor):
            return value
        kept = value.detach()
        if kept.device.type != "cpu":
            kept = kept.cpu()
        elif kept.layout is torch.strided and tensor_state.storage_id(kept) in tensor_state.storages_among(inputs):
            kept = kept.clone()
        return kept if self.files is None else in_file(kept, self.files)


class _Alias(torch.autograd.Function):
    """A tensor on the memory of a leaf, with its strides, that is neither a leaf nor a view."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor) -> torch.Tensor:
        return tensor_state.apart(leaf)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _ends(results: Sequence[Any]) -> list[torch.Tensor]:
    """Return scalars at which a backward begins, one for each result with a `grad_fn`; the results may be freed."""
    computed = (r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None)
    return [_End.apply(result) for result in computed]  # type: ignore[no-untyped-call]


class _End(torch.autograd.Function):
    """A scalar whose backward draws a random gradient of a result: autograd frees it after use, as in training."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.device = tensor_state.plain(result).to("meta"), result.device
        return torch.zeros((), device=result.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        generator = torch.Generator(ctx.device).manual_seed(SEED)  # the same for each run, and not the user's generator
        return torch.empty_like(ctx.shape, device=ctx.device).normal_(generator=generator)


class _Watching(TorchDispatchMode):
    """Before each operator copies the tensors that it may write to; after it fills memory that it left uninitialised.

    So the tensors can be restored, and two runs find the same numbers in uninitialised memory: 255 in each byte is NaN
    as a floating-point number.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.has_filled = False  # whether any memory was uninitialised
        self._byte = fill
        self._watched = {tensor_state.storage_id(t): t for t in tensors if t.layout is torch.strided}
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator after copying the tensors that it may write to; fill memory that it left uninitialised."""
        kwargs = kwargs or {}
        for tensor in _written(operator, args, kwargs):
            if tensor.layout is torch.strided:
                self._copy(tensor)
        result = operator(*args, **kwargs)
        if getattr(operator, "overloadpacket", None) in _UNWRITTEN and tensor_state.is_dense(result):
            self.has_filled |= result.numel() > 0
            if result.dtype is torch.bool:
                result.fill_(bool(self._byte))
            elif type(result) is torch.Tensor and not result.is_quantized:
                tensor_state.memory_of(result).fill_(self._byte)
        return result

    def _copy(self, tensor: torch.Tensor) -> None:
        """Copy the memory of a watched tensor before the first write to it."""
        storage = tensor_state.storage_id(tensor)
        if storage in self._watched and storage not in self._copies:
            self._copies[storage] = tensor_state.memory_of(self._watched[storage]).clone()

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor holds other bytes than before."""
        storage = tensor_state.storage_id(tensor) if tensor.layout is torch.strided else None
        return storage in self._copies and not torch.equal(self._copies[storage], tensor_state.memory_of(tensor))

    def restore(self) -> None:
        """Restore all bytes; version counters don't change."""
        for storage, copy in self._copies.items():
            tensor_state.memory_of(self._watched[storage]).copy_(copy)
        self._copies.clear()


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that an operator may write to: by its schema, or all arguments of a Triton kernel."""
    if isinstance(operator, HigherOrderOperator):
        return tensor_state.tensors_among((args, kwargs)) if "triton" in operator.name() else []
    places = _places_written(operator)
    return tensor_state.tensors_among([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


@functools.cache
def _places_written(operator: Any) -> tuple[tuple[int, str], ...]:
    """List the arguments that an operator writes to, also those that its schema does not declare."""
    arguments = enumerate(operator._schema.arguments)
    undeclared = ((i, argument.name) for i, argument in arguments if argument.name in _WRITTEN_UNDECLARED)
    return (*operators.written_arguments(operator), *undeclared)


# ---------------------------------------------------------------- outputs without gradients


def unused_at(captured: Captured, missing: frozenset[int]) -> frozenset[int] | None:
    """Return the positions of the outputs whose gradients are missing; None if other gradients are missing too."""
    positions = (aot.output_position(captured.tangents[gradient]) for gradient in missing)
    outputs = [position for position in positions if position is not None]
    return frozenset(outputs) if len(outputs) == len(missing) else None


def likely_unused(written: fx.GraphModule) -> Unused:
    """Return a function that guesses which outputs get no gradients, for code without a backward so far."""

    def guess(outputs: Sequence[Any]) -> frozenset[int]:
        returned: Any = written.graph.output_node().args[0]
        if not isinstance(returned, (tuple, list)) or len(returned) != len(outputs):
            return frozenset()
        own = {i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.grad_fn is not None}
        for loss in (i for i in sorted(own) if outputs[i].dim() == 0):
            others, sources = own - {loss}, reached([returned[loss]], attrgetter("all_input_nodes"))
            if all(returned[other] in sources for other in others):
                return frozenset(others)
        return frozenset()

    return guess
