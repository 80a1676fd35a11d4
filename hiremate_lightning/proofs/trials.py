"""Run code once to see what it gives, and leave inputs, random numbers and gradients as they were found.

A `TrialOutcome` holds what two runs of the same code must agree on: the outputs, the inputs that the code has changed,
the states of the generators, and, where asked for, the gradients of the inputs. What lies on another device is kept on
the host, so that one outcome takes no memory while the other is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..measuring.aside import in_file
from ..measuring.files import Files
from ..torch_private import autocasting, hooks, tensor_state
from .restoring import Restoring, Watching
from .unused import Unused

SEED = 0  # of the gradients that a trial begins its backward with


@dataclass(frozen=True)
class TrialOutcome:
    """What a run of code gave.

    Attributes:
        values: Outputs, changed inputs and states of generators, by what they are.
        gradients: Gradients of the inputs, by what they are; None for one that does not come.
        has_fills: Whether the code got memory that nobody had written to, and that the trial filled.
    """

    values: dict[str, Any]
    gradients: dict[str, Any]
    has_fills: bool = False

    @property
    def has_nan(self) -> bool:
        """Whether any number is not one."""
        values = tensor_state.leaves([*self.values.values(), *self.gradients.values()])
        return any(isinstance(v, torch.Tensor) and v.is_floating_point() and bool(v.isnan().any()) for v in values)


@dataclass(frozen=True)
class Trial:
    """Inputs to run code with.

    Attributes:
        arguments: The inputs.
        names: What each of them is called.
        constants: Other tensors that the code may write to.
        with_gradients: Whether to compute gradients of the inputs that require them.
        copies: Whether inputs that other code has computed are copies: autograd refuses to change a leaf in place.
        files: Temporary files for what is kept on the host; None to keep it in memory.
        fill: The byte in memory that nobody has written to.
        unused: Returns the positions of the outputs that get no gradients; None where all get some.
    """

    arguments: Sequence[Any]
    names: Sequence[str]
    constants: Sequence[torch.Tensor] = ()
    with_gradients: bool = False
    copies: bool = False
    files: Files | None = None
    fill: int = 255
    unused: Unused | None = None

    def run(
        self,
        function: Callable[..., Any],
        keeps_nothing: bool = False,
        tell: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> TrialOutcome:
        """Run code on the inputs, and leave them and the generators as they were found.

        The tensors that the code gets are no parameters: neither hooks nor `.grad` nor optimizers see them.

        Args:
            function: The code.
            keeps_nothing: Whether autograd drops what it would keep for a backward: the operators are those of
                training, and values die as they are read.
            tell: Called with each dense tensor that an operator may be about to write to.
        """
        leaves = {i: self._leaf(a) for i, a in enumerate(self.arguments) if isinstance(a, torch.Tensor)}
        given = [self._given(i, leaves.get(i, a)) for i, a in enumerate(self.arguments)]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        devices = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
        restoring = Restoring([*tensors, *self.constants])

        def about_to_write(tensor: torch.Tensor) -> None:
            restoring.copy(tensor)
            tell(tensor)

        watching = Watching(about_to_write, self.fill)
        clearing = _cleared_casts({t.device.type for t in tensors})
        with torch.random.fork_rng(devices=devices), clearing, autocasting.as_found_on_error():
            try:
                keeping = _dropping() if keeps_nothing else nullcontext()
                with watching, torch.enable_grad(), hooks.no_saved_tensor_hooks(), keeping:
                    results = function(*given)
                    outputs = list(results) if isinstance(results, (tuple, list)) else [results]
                    roots = _Roots([*self._used(outputs), *tensors]) if self.with_gradients else None
                    values = {f"output {i}": self._kept(value, tensors) for i, value in enumerate(outputs)}
                    del results, outputs
                    gradients = self._gradients(leaves, roots) if roots is not None else {}
                with torch.no_grad():
                    for name, value in zip(self.names, given, strict=True):
                        if isinstance(value, torch.Tensor) and restoring.changed(value):
                            values[f"the new value of {name}"] = self._kept(value, tensors)
                    values |= _states(devices)
            finally:
                restoring.restore()
        return TrialOutcome(values, gradients, watching.has_filled)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor_state.apart(tensor).requires_grad_(tensor.requires_grad)

    def _used(self, outputs: Sequence[Any]) -> list[Any]:
        unused = frozenset[int]() if self.unused is None else self.unused(outputs)
        return [value for i, value in enumerate(outputs) if i not in unused]

    def _given(self, position: int, value: Any) -> Any:
        is_copied = self.copies and isinstance(value, torch.Tensor) and not self.arguments[position].is_leaf
        return value.clone() if is_copied else value

    def _gradients(self, leaves: dict[int, torch.Tensor], roots: _Roots) -> dict[str, Any]:
        """Compute gradients of the leaves, for drawn gradients of the results that autograd has computed."""
        own = {  # without what the code has changed in place, which is not what it was given any more
            f"the gradient of {self.names[i]}": leaf
            for i, leaf in leaves.items()
            if leaf.requires_grad and leaf.is_leaf
        }
        found: dict[str, Any] = dict.fromkeys(own)

        def keep(name: str, leaf: torch.Tensor) -> None:
            """Keep a gradient as it comes: it takes no memory while the backward goes on."""
            gradient, leaf.grad = leaf.grad, None
            found[name] = self._kept(gradient, ())

        for name, leaf in own.items():
            leaf.register_post_accumulate_grad_hook(partial(keep, name))
        with _no_autocast({leaf.device.type for leaf in own.values()}):
            roots.run_backward(list(own.values()))
        _let_threads_finish({leaf.device for leaf in own.values()})
        return found

    def _kept(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """Keep a value on the host, apart from the memory of inputs, which is put back."""
        kept = _kept(value, inputs)
        return kept if self.files is None or not isinstance(kept, torch.Tensor) else in_file(kept, self.files)


class _Roots:
    """Where a backward begins: in results that autograd has computed, whose memory does not stay for that.

    Args:
        results: All results.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        own = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        self._ends = [_End.apply(root) for root in own]  # type: ignore[no-untyped-call]

    def run_backward(self, leaves: Sequence[torch.Tensor]) -> None:
        """Compute gradients of leaves, for drawn gradients of the results."""
        if self._ends and leaves:
            torch.autograd.backward(self._ends, inputs=leaves)


class _End(torch.autograd.Function):
    """A number that a result leads to, and whose backward draws the gradient of the result.

    Autograd frees such a gradient as soon as it was read, as in training; one that is handed to it stays to the end.
    """

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.device = tensor_state.plain(result).to("meta"), result.device
        return torch.zeros((), device=result.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return _drawn_like(ctx.shape, ctx.device)


def _let_threads_finish(devices: set[torch.device]) -> None:
    """Make autograd's threads drop the tensors of a backward, which they do before they take up the next one."""
    for device in devices:
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing * 1, nothing, torch.empty(0, device=device))


def _dropping() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def _drawn_like(shape: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Draw the gradient of a result: the same one for each run, and no number from the user's generators."""
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.empty_like(shape, device=device).normal_(generator=generator)


def _kept(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """Keep a value on the host, apart from the memory of inputs, which is put back."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.device.type != "cpu":
        return value.cpu()
    if value.layout is not torch.strided:
        return value
    storage = tensor_state.storage_id(value)
    shares = any(t.layout is torch.strided and tensor_state.storage_id(t) == storage for t in inputs)
    return value.clone() if shares else value


def _states(devices: Sequence[torch.device]) -> dict[str, Any]:
    states = {"the random state of cpu": torch.get_rng_state()}
    return states | {f"the random state of {device}": torch.cuda.get_rng_state(device) for device in devices}


@contextmanager
def _no_autocast(device_types: set[str]) -> Iterator[None]:
    """Leave autocast, as training does before it calls the backward."""
    active = [kind for kind in sorted(device_types) if torch.is_autocast_enabled(kind)]
    with torch.autocast(active[0], enabled=False) if active else nullcontext():
        yield


@contextmanager
def _cleared_casts(device_types: set[str]) -> Iterator[None]:
    """Forget the casts that autocast remembers of the inputs of a trial: they would live to the end of the forward."""
    try:
        yield
    finally:
        if any(torch.is_autocast_enabled(kind) for kind in device_types):
            torch.clear_autocast_cache()
