"""The runtime of captured graphs: their forwards and backwards, run by programs that change without a new capture.

To AOTAutograd, the forward saves one value, an empty token. The values that a plan really saves are an attribute of the
token, together with the program whose backward reads them. So a plan can be replaced at any time, even between a
forward and its backward: the backward runs the program of its forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..capturing.capture import Captured
from ..errors import CaptureError, HiRemateError, SecondDerivativeError
from ..records.costs import Profile
from ..torch_private import aot, autocasting, backward_pass, sharding, tensor_state
from .accumulation import Leaves, existing_gradients, find_leaves, hand_on, positions_to_add, shared_leaves
from .program import Changes, Program

FREED = (
    "Trying to backward through the graph a second time, but the saved values have already been freed. "
    "Specify retain_graph=True in the first backward if you need a second one."
)
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "{name} is at version {found}; expected version {expected} instead"
)
REPLACED = (
    "{name} got other memory between a forward and its backward, as by `.data = ...`, which a plan may compute from "
    "again: gradients would be wrong. Do so after the backward, put the old memory back before it, or call "
    "remove_hiremate(model)."
)


class Conductor:
    """Chooses the program of each run of a captured graph, and receives the events of the run.

    `start` returns the program and a value that stands for the run: the later calls pass it as `run`. This base class
    does nothing: it receives events of runs that are in no step, or outlive the model.
    """

    def start(self, runtime: GraphRuntime, arguments: Sequence[Any]) -> tuple[Program, Any]:
        """Choose the program of the forward that is about to run."""
        raise NotImplementedError

    def forward_done(self, run: Any, outputs: Sequence[Any]) -> None:
        """Receive the outputs of a forward that has run."""

    def backward_starts(self, run: Any, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Receive the tangents and leaves of a backward that is about to run, and whether it will run once more."""

    def was_overwritten(self, runtime: GraphRuntime, storages: Collection[int]) -> None:
        """Receive the storages of saved values that other code has overwritten between forward and backward."""

    def settings_changed(self) -> None:
        """Handle a backward that recomputes under other settings of PyTorch than its forward had."""

    def must_return(self, runtime: GraphRuntime, positions: Collection[int]) -> None:
        """Receive the positions of existing gradients that a backward could not add to by itself."""

    def backward_done(self, run: Any) -> None:
        """Handle the end of a run's backward."""

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return a tensor's name or description, as the beginning of a sentence."""
        return f"A tensor of shape {tuple(tensor.shape)}"

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Add facts to an out-of-memory error of a run."""


_NOBODY = Conductor()


class GraphRuntime:
    """One captured graph, run by programs that its conductor chooses.

    torch.compile's caches may hold runtimes for ever. So a runtime refers to its conductor, which holds the model,
    weakly; a backward that outlives both still runs.
    """

    def __init__(
        self, captured: Captured, conductor: Conductor, number: int = 0, profile: Profile | None = None
    ) -> None:
        self.captured = captured
        self.number = number  # its number in the order of capture
        self.profile = profile  # costs of its operations; set before it first runs in a step
        self.own: tuple[int, ...] = ()  # positions of outputs to return unviewed: the graph may return views there
        self.trial: Program | None = None  # a program that a proof runs without the conductor; None in a step
        # Each set of missing tangents with which a backward has run: in a step, and of a trial program.
        self.ran_without, self.tried_without = set[frozenset[int]](), set[frozenset[int]]()
        self._conductor = weakref.ref(conductor)
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()  # saved values of forwards whose autograd graphs live
        self._takes_absent = not any(tensor_state.is_symbolic(t.meta.get("val")) for t in captured.tangents)

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward: inputs in, outputs and the token out."""
        program, run = (self.trial, None) if self.trial else self.conductor.start(self, arguments)
        leaves = find_leaves(self.captured, arguments)  # the program empties the list
        results = list(self._run(program.forward, arguments))
        count = len(self.captured.forward_outputs)
        outputs, saved = results[:count], results[count:]
        del results
        for position in self.own:
            outputs[position] = tensor_state.unviewed(outputs[position])
        token = torch.empty(0)
        _detach(program, saved)
        kept = Saved(program, run, leaves, self, saved, outputs)
        token.hiremate = kept  # type: ignore[attr-defined]
        self._saved.add(kept)
        token.takes_absent = self._takes_absent  # type: ignore[attr-defined]  # absent gradients come as None
        kept.fills_buckets = self.trial is None and sharding.fills_buckets()
        self._listener().forward_done(run, outputs)
        return [*outputs, token]

    @property
    def conductor(self) -> Conductor:
        """The conductor that chooses its programs; it lives while the model is called."""
        conductor = self._conductor()
        assert conductor is not None, "a model is alive while it is called"
        return conductor

    def _listener(self) -> Conductor:
        """Return the conductor, or one that does nothing if the conductor is gone or a trial program runs."""
        return (None if self.trial else self._conductor()) or _NOBODY

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward: the token and tangents in, gradients out."""
        saved, tangents = _what_was_saved(arguments), arguments[1:]
        if saved.runtime is not self:  # the forward ran at sizes that were not traced
            return saved.runtime.backward(arguments)
        arguments.clear()
        keep, conductor = backward_pass.will_run_again(), self._listener()
        conductor.backward_starts(saved.run, tangents, saved.leaves, keep)
        totals = self._gradients_to_add_to(saved.leaves)
        shared = shared_leaves(saved)
        sums = {position: leaf.total for position, leaf in sorted(shared.items()) if leaf.total is not None}
        uncast = frozenset(position for position, leaf in shared.items() if leaf.is_of_casts and leaf.awaited > 1)
        missing = missing_gradients(tangents)
        (self.tried_without if self.trial else self.ran_without).add(missing)
        changes = Changes(missing, frozenset(totals), frozenset(sums), uncast)
        program = saved.program.variant(changes) if any(changes) else saved.program
        replaced = saved.find_replaced(program.unread)
        if replaced is not None:
            raise HiRemateError(REPLACED.format(name=conductor.name_of(replaced)))
        values, overwritten = saved.take(program.unread, keep=keep)
        if overwritten:
            storages = (self.captured.graph.tensors[saved.program.schedule.saved[i]].storage for i in overwritten)
            conductor.was_overwritten(self, [storage for storage in storages if storage is not None])
        if self._runs_in_other_settings(saved):
            conductor.settings_changed()
        values += [*tangents, *totals.values(), *sums.values()]
        for position in program.unread:
            values[position] = None
        del tangents, totals, sums
        with _default_dtype(saved.dtype), autocasting.disabled():  # casts are in the graph
            gradients = self._run(program.backward, values)
        if saved.fills_buckets or any(map(backward_pass.has_hooks, saved.leaves.values())):
            sharding.put_in_order([saved.leaves[p] for p in self.captured.finished if p in saved.leaves])
        if shared:
            gradients = hand_on(gradients, shared, () if missing else saved.captured.terms)
        conductor.backward_done(saved.run)
        return gradients

    def _runs_in_other_settings(self, saved: Saved) -> bool:
        """Whether gradients may differ from eager ones because PyTorch's settings have changed since the forward."""
        if autocasting.is_enabled():
            return True  # PyTorch disables it for a backward whose forward was under autocast
        is_other = saved.settings != tensor_state.kernel_settings()
        return is_other and bool(saved.program.schedule.recomputed(self.captured.graph))

    def saved(self, has_run: bool) -> list[Saved]:
        """List the saved values that still exist, of the forwards whose backward has run, or has not run yet."""
        existing = self._saved or ()  # of hundreds of graphs few have any
        return [saved for saved in existing if saved.values is not None and saved.has_run is has_run]

    def _gradients_to_add_to(self, leaves: Leaves) -> dict[int, torch.Tensor]:
        """Return the existing gradients that the backward adds to, by position."""
        gradients = existing_gradients(leaves)
        if not gradients:
            return {}
        added = positions_to_add(self.captured, {position: leaves[position] for position in gradients})
        if len(added) < len(gradients):
            self._listener().must_return(self, gradients.keys() - added)
        return {position: gradients[position] for position in sorted(added)}

    def _run(self, code: aot.Boxed, values: list[Any]) -> Sequence[Any]:
        """Run code; let the conductor add facts to an out-of-memory error."""
        try:
            return code(values)
        except torch.OutOfMemoryError as error:
            self._listener().ran_out(error)
            raise


def _what_was_saved(arguments: Sequence[Any]) -> Saved:
    """Return the saved values of the token; raise for backwards that can't be run."""
    token, *tangents = arguments
    saved: Saved | None = getattr(token, "hiremate", None)
    if saved is None:
        raise CaptureError(
            "Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) are around a planned "
            "call, and give back other tensors than they were given. What is kept is for the plan to decide: call "
            "the model without them."
        )
    if any(tensor_state.is_batched(tangent) for tangent in tangents):
        raise CaptureError(
            "Code that torch.compile has captured can't take many gradients at once, as is_grads_batched=True "
            "gives them. Ask for one after the other, call remove_hiremate(model), or plan other submodules only."
        )
    if backward_pass.creates_graph():  # otherwise autograd would silently leave out second derivatives
        raise SecondDerivativeError(
            "Gradients of what a planned module returned were asked for with create_graph=True: they can't be "
            "differentiated once more. Take them inside of what is planned, in a forward that calls "
            "torch.autograd.grad, or plan the whole step with HiRemateCallback(target='training_step'). Where they "
            "are not trained on, leave create_graph out. Or call remove_hiremate(model)."
        )
    return saved


def missing_gradients(tangents: Sequence[Any]) -> frozenset[int]:
    """Return the positions of missing tangents: the caller's loss does not depend on these outputs."""
    return frozenset(position for position, tangent in enumerate(tangents) if tangent is None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype to that of the forward while code runs: Lightning's "bf16-true" sets it in the forward."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _detach(program: Program, saved: list[Any]) -> None:
    """Detach saved values that are also returned, and views; copy those that other code overwrites.

    A returned tensor gets a grad_fn that holds the token. So the token must hold neither that tensor nor a view, which
    holds its base. A view would also hide whether other code holds the memory that a gradient is about to take.
    """
    for position in program.saved.returned:
        saved[position] = saved[position].detach()
    tensor_state.detach_views(saved, program.saved.views)
    for position in program.saved.copied:
        saved[position] = saved[position].clone()


class Saved:
    """The values that a forward saved, with the program whose backward reads them."""

    def __init__(
        self,
        program: Program,
        run: Any,
        leaves: Leaves,
        runtime: GraphRuntime,
        values: list[Any],
        outputs: Sequence[Any],
    ) -> None:
        self.program, self.run, self.leaves, self.runtime = program, run, leaves, runtime
        self.captured = captured = runtime.captured
        self.block = autocasting.block(captured.device.type) if captured.cast_terms else None
        self.settings, self.dtype = tensor_state.kernel_settings(), torch.get_default_dtype()
        self.has_run = self.fills_buckets = False
        self.values: list[Any] | None = values
        self.watched: list[torch.Tensor] = [
            values[i] if output is None else outputs[output].detach() for i, output in program.saved.watched
        ]
        self.versions = tensor_state.versions_of(self.watched)
        unreturned = [None if output is not None else values[i] for i, output in program.saved.watched]
        self.storages = tensor_state.storages_of(unreturned)  # held, so that no new storage gets the same identity
        self.copies = {i: values[i].clone() for i in program.saved.borrowed} if program.protects else {}

    def take(self, unread: Collection[int], keep: bool) -> tuple[list[Any], list[int]]:
        """Return the values for a backward, and the positions of values that were overwritten: they are copies.

        Unless `keep`, the values are dropped here. `unread` values may have been changed.

        Raises:
            RuntimeError: If the values were dropped before, or a value without a copy was overwritten.
        """
        if self.values is None:
            raise RuntimeError(FREED)
        self.has_run = True
        overwritten = self._find_overwritten(unread)
        values = self.values
        if overwritten:
            values = [self.copies[i] if i in overwritten else value for i, value in enumerate(values)]
        if keep:  # a second tensor on a storage keeps the backward from computing into it
            return [v.detach() if isinstance(v, torch.Tensor) else v for v in values], overwritten
        self.values, self.copies, self.watched, self.storages = None, {}, [], []
        return values, overwritten

    def find_replaced(self, unread: Collection[int]) -> torch.Tensor | None:
        """Return a tensor from outside that the backward reads and that has other memory than in the forward."""
        pairs = zip(self.program.saved.watched, self.watched, self.storages, strict=True) if self.storages else ()
        for (index, _), tensor, storage in pairs:
            if storage is not None and tensor.untyped_storage() is not storage and index not in unread:
                return tensor
        return None

    def _find_overwritten(self, unread: Collection[int]) -> list[int]:
        """Return the positions of overwritten values that have copies; raise for overwritten values without one."""
        versions = tensor_state.versions_of(self.watched)
        if versions == self.versions:
            return []
        overwritten = dict[int, None]()
        for (index, _), version, expected in zip(self.program.saved.watched, versions, self.versions, strict=True):
            if version == expected:
                continue
            if index in self.copies:
                overwritten[index] = None
            elif index not in unread:
                name = self.captured.fx_values[self.program.schedule.saved[index]].name
                raise RuntimeError(CHANGED.format(name=name, found=version, expected=expected))
        return list(overwritten)
