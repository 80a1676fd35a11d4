"""Counts the memory that exists before a step: parameters, buffers, gradients, optimizer state, and the batch."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..memory.allocator import storage_bytes
from ..objects import parameters_of
from ..running.execution import GraphRuntime, Saved
from ..torch_private import sharding, tensor_state
from ..units import format_bytes
from .left import Iterations, LeftOutputs, Numbers
from .recording import StepMeasurement
from .resident import WAITING, Resident
from .runs import Event

SAMPLES = 8  # number of parameters whose gradients are looked at, instead of all
LITTERED_STEPS = 16  # collect garbage before a step is measured, after this many steps without a full collection
LARGE_BYTES = 2**14  # bytes of the smallest tensor whose release is watched
WATCHED_STEPS = 16  # number of first steps in which to check whether gradients are freed before the backward


class ResidentMemory:
    """Counts the memory that exists before the steps of a model.

    `waiting` returns the saved values of captured forwards whose backward is still to come, `retained` those that a
    backward has kept for another backward.
    """

    def __init__(
        self,
        root: nn.Module,
        waiting: Callable[[], Sequence[tuple[GraphRuntime, Saved]]] = tuple,
        retained: Callable[[], Sequence[Saved]] = tuple,
    ) -> None:
        self.root = root
        self._find_waiting, self._find_retained = waiting, retained
        self.batch: list[torch.Tensor] = []  # the batch of the running step, if the caller has named it
        self.optimizer_steps = 0  # number of optimizer steps that have used gradients of the model
        self.growths = 0  # number of counts with more optimizer state, or more gradients, than any count before
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # their state is counted
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # By optimizer: its number of parameter groups at the last look, and whether it has parameters of the model.
        self._updating: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self.iterations = Iterations()
        self._left = LeftOutputs(lambda: tensor_state.storage_sizes(self._on_device(held_for_backwards(retained()))))
        self._trained: list[weakref.ref[torch.Tensor]] = [weakref.ref(p) for p in root.parameters()]
        self._inputs_on = torch.device("cpu")
        # Cached: the devices of the input and of the sample parameters, and the device that holds most of the model.
        self._device: tuple[list[torch.device], torch.device] | None = None
        self._most = (0, 0)  # most optimizer states, and most gradients of the samples, in any count
        self._uncollected_steps = LITTERED_STEPS  # steps begun since the last full garbage collection
        self._stepped = False  # whether an optimizer has used the gradients since the last backward
        self._before: tuple[StepMeasurement | None, Numbers | None] = None, None  # of the previous step
        self._frees_gradients = True  # whether used gradients are freed before the next backward

    @property
    def device(self) -> torch.device:
        """The device with most of the model's bytes, else the input's device; the model may move between steps."""
        devices = [self._inputs_on, *(p.device for p in self._samples())]
        if self._device is None or self._device[0] != devices:
            sizes = dict.fromkeys(devices, 0)
            for parameter in self.root.parameters():
                sizes[parameter.device] = sizes.get(parameter.device, 0) + parameter.nbytes
            self._device = devices, max(sizes, key=lambda device: sizes[device])
        return self._device[1]

    def _samples(self) -> list[torch.Tensor]:
        """List a few of the parameters."""
        samples = (seen() for seen in self._trained[:: max(1, len(self._trained) // SAMPLES)])
        return [p for p in samples if p is not None]

    def _parameters(self) -> list[torch.Tensor]:
        """List the parameters, those that `torch.func.functional_call` replaces, and FSDP2's sharded and whole ones."""
        trained = (p for p in (seen() for seen in self._trained) if p is not None)
        sharded = (p for pair in sharding.whole_parameters(self.root) for p in pair)
        return list(dict.fromkeys([*self.root.parameters(), *trained, *sharding.shards(self.root), *sharded]))

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the existing gradients by parameter."""
        return {p: p.grad for p in self._parameters() if p.is_leaf and p.grad is not None}

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record the step of an optimizer; return whether it used gradients of the model."""
        groups, updates_model = self._updating.get(optimizer, (0, False))
        if groups != len(optimizer.param_groups):
            parameters = {id(p) for p in self._parameters()}
            updates_model = any(id(p) in parameters for p in parameters_of(optimizer))
            self._updating[optimizer] = len(optimizer.param_groups), updates_model
        if not updates_model:
            return False
        self.optimizers.add(optimizer)
        self._have_stepped.add(optimizer)
        self.optimizer_steps += 1
        self._stepped = True
        return True

    @property
    def all_stepped(self) -> bool:
        """Whether optimizers of all trained parameters have stepped."""
        updated = {id(p) for optimizer in self._have_stepped for p in parameters_of(optimizer)}
        lent = {id(whole) for whole, _ in sharding.whole_parameters(self.root)}
        trained = (p for p in self._parameters() if p.requires_grad and p.is_leaf and id(p) not in lent)
        return all(id(p) in updated for p in trained)

    @property
    def has_state_of_each(self) -> bool:
        """Whether each optimizer that has stepped has state for all of its parameters or for none; L-BFGS does not."""
        used = (o for o in self._have_stepped if o.state)
        return all(p in o.state for o in used for p in parameters_of(o))

    def has_grown(self) -> bool:
        """Whether there is more optimizer state, or more gradients, than in any count so far."""
        return any(now > before for now, before in zip(self._held(), self._most, strict=True))

    def _held(self) -> tuple[int, int]:
        """Return the number of parameters with optimizer state, and of sample parameters with gradients."""
        states = sum(len(optimizer.state) for optimizer in self.optimizers)
        return states, sum(p.grad is not None for p in self._samples())

    def retained_bytes(self) -> int:
        """Return the bytes that are retained for another backward, parameters included."""
        retained = self._find_retained()
        return self._bytes_of(held_for_backwards(retained)) if retained else 0

    def step_begins(self, arguments: Sequence[torch.Tensor]) -> None:
        """Begin a step with these arguments."""
        if arguments:
            self._inputs_on = arguments[0].device
        if not self._samples():  # fully_shard() has replaced the parameters
            self._trained = [weakref.ref(p) for p in self._parameters()]
        self._uncollected_steps += 1
        if self.device.type != "cuda":  # on CUDA, all allocated memory counts
            waiting = tuple(id(runtime) for runtime, _ in self._find_waiting())
            self.iterations.step_begins(*self._before, waiting, self._stepped)
        self._before = None, None

    def collect_garbage(self, steps: int = 1) -> bool:
        """Collect garbage if at least `steps` steps have begun since the last collection; return whether it was done.

        Garbage would count as memory that stays, or that a step frees. Garbage of tracing and planning is collected
        when these end (`housekeeping`).
        """
        if self._uncollected_steps < steps:
            return False
        gc.collect()
        self._uncollected_steps = 0
        return True

    def step_ended(
        self, measurement: StepMeasurement | None, signature: tuple[int, ...] | None = None, has_captured: bool = False
    ) -> None:
        """Store the record and signature of the step that has ended. A capture allocates more than a step does."""
        self._left.step_ended(measurement, signature)
        self._before = None if has_captured else measurement, signature

    def learn_frees(self, step: int) -> None:
        """Store whether the previous step's outputs, and used gradients, were freed before this backward."""
        self._left.learn_frees()
        if self._stepped and self._frees_gradients and step < WATCHED_STEPS:
            self._frees_gradients = not self._gradients()
        self._stepped = False

    def count_before_step(self, arguments: Sequence[torch.Tensor]) -> Resident:
        """Return the memory that exists before a step with these arguments, outputs of the previous step included."""
        if self._left.are_some(self._present(arguments)):
            self.collect_garbage()
        states, gradients = self._held()
        self.growths += self.has_grown()
        self._most = max(states, self._most[0]), max(gradients, self._most[1])
        resident = self.count(arguments)
        self._left.measure(self._present(arguments))
        if self.device.type == "cuda":  # all allocated memory has been counted
            return self._left.sort_out(resident)
        resident = self._left.add_to(resident)
        self.iterations.measure(resident.existing_bytes)
        return self.iterations.add_to(resident)

    def watch_releases(self, measurement: StepMeasurement, arguments: Sequence[torch.Tensor]) -> None:
        """Let the record of a step that begins mark the release of tensors from before the step.

        On the host, the release of an uncounted tensor would look like memory that the step frees.
        """
        self._left.watch(measurement)
        measurement.counted = self._present(arguments) | self._left.storages
        if self.device.type == "cpu" and measurement.is_measured:
            batch = {tensor_state.storage_id(t): t for t in (*self.batch, *arguments) if tensor_state.is_dense(t)}
            measurement.watch_releases(Event.GIVEN, self._on_device(batch.values()))
            on_host = (t for t in tensor_state.plain_tensors_of_python() if t.device.type == "cpu")
            large = {tensor_state.storage_id(t): t for t in on_host if t.untyped_storage().nbytes() >= LARGE_BYTES}
            uncounted = (tensor for storage, tensor in large.items() if storage not in measurement.counted)
            measurement.watch_releases(Event.UNCOUNTED, self.iterations.older(uncounted))

    def _present(self, arguments: Sequence[torch.Tensor]) -> frozenset[int]:
        """List the counted storages that exist before a step with these arguments, without left memory."""
        waiting = [saved for _, saved in self._find_waiting()]
        groups = self._groups(list(self._gradients().values()), [*arguments, *held_for_backwards(waiting)])
        return frozenset(tensor_state.storage_sizes(tensor for tensors in groups.values() for tensor in tensors))

    def sees_frees(self, resident: Resident) -> bool:
        """Whether a measurement of the step that begins sees each free of memory from before the step."""
        return not (resident.stale_bytes or resident.left_bytes) or self.device.type == "cuda" or self._left.are_known

    def count(self, arguments: Sequence[torch.Tensor]) -> Resident:
        """Return the memory that exists now, with the arguments of a step and without left memory on a CPU."""
        gradients_of = self._gradients()
        gradients = list(gradients_of.values())
        stale = self._bytes_of(gradients) if self._stepped and self._frees_gradients else 0
        groups = self._groups([] if stale else gradients, arguments)
        seen = set(tensor_state.storage_sizes(gradients)) if stale else set[int]()
        kinds = {name: self._bytes_of(tensors, seen) for name, tensors in groups.items()}
        waiting = self._find_waiting()
        if waiting:
            kinds[WAITING] = self._bytes_of(held_for_backwards(saved for _, saved in waiting), seen)
        size_bytes = sum(kinds.values())
        if self.device.type == "cuda":
            size_bytes, counted_bytes = torch.cuda.memory_allocated(self.device) - stale, size_bytes
            kinds["other"] = max(0, size_bytes - counted_bytes)
        kept = frozenset(map(tensor_state.storage_id, gradients_of))
        return Resident(
            size_bytes=size_bytes,
            stale_bytes=stale,
            kept=frozenset() if stale else kept,
            kinds=tuple(kinds.items()),
            waiting=tuple((runtime, saved.program.schedule) for runtime, saved in waiting),
            used=(stale, kept) if stale else (0, frozenset()),
        )

    def as_seen(self, resident: Resident) -> Resident:
        """Return the count from before the step that has just ended, corrected if used gradients were not freed."""
        size_bytes, kept = resident.used
        if self._frees_gradients or not kept:
            return resident
        stale_bytes = max(0, resident.stale_bytes - size_bytes)
        return replace(resident.with_more("gradients", size_bytes), stale_bytes=stale_bytes, kept=kept)

    def _groups(
        self, gradients: list[torch.Tensor], arguments: Sequence[torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        """Return the counted tensors by kind."""
        return {
            "parameters": self._parameters(),
            "buffers": [*self.root.buffers(), *sharding.buffers_between_units(self.root)],
            "gradients": gradients,
            "optimizer state": [
                tensor
                for optimizer in self.optimizers
                for tensor in tensor_state.tensors_among(list(optimizer.state.values()))
            ],
            "batch": [*self.batch, *arguments],
        }

    def model_key(self) -> str:
        """Return a hash of the names, shapes and types of the model's parameters."""
        parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.root.named_parameters()]
        return hashlib.sha256(repr(parameters).encode()).hexdigest()[:32]

    def describe(self) -> str:
        """Describe the memory of a CUDA device in a sentence; return "" for other devices."""
        if self.device.type != "cuda":
            return ""
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        return (
            f" Now {format_bytes(allocated)} are allocated, {format_bytes(reserved)} reserved by PyTorch, and "
            f"{format_bytes(free)} free on the device: name a smaller budget if others use it."
        )

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        device = self.device
        return (tensor for tensor in tensors if tensor.device == device)

    def _bytes_of(self, tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
        """Return the bytes of the tensors' storages on the planned device, see `storage_bytes`."""
        return storage_bytes(self._on_device(tensors), self.device, seen)


def held_for_backwards(waiting: Iterable[Saved]) -> list[torch.Tensor]:
    """List the tensors that captured graphs hold for a backward: saved values, leaves, and gradients of leaves."""
    held = list[Any]()
    for kept in waiting:
        leaves = kept.leaves.values()
        held += [*(kept.values or ()), *leaves, *(leaf.grad for leaf in leaves)]
    return [value for value in held if isinstance(value, torch.Tensor)]
