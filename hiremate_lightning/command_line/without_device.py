"""What stands in for a device: tensors without memory, a count of their bytes, a GPU's blocks and kernels, rates."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..calls.slots import refuse
from ..errors import ConfigurationError
from ..memory.allocator import allocated_bytes
from ..memory.metering import LiveBytes
from ..records.costs import A100, HALF_TYPES, Machine
from ..records.graph import Graph
from ..rewriting.joint import is_order_dependent_on_gpu
from ..torch_private import sharding, tensor_state
from ..torch_private.tensor_state import TorchDispatchMode
from .factory import ModelCall, Workload

log = logging.getLogger("hiremate_lightning")
aten = torch.ops.aten

_GATHERS = ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor")
_SCATTERS = ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor")
_REDUCES = ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_")

# ---------------------------------------------------------------- a module on tensors without memory


def build_on_fakes(workload: Workload, device: torch.device, size: int | None, mode: Any) -> ModelCall:
    """Build a workload, and replace each tensor that is not a fake one on the device; refuse what can't be planned.

    Tensors of the module are replaced in a copy of it.
    """
    built = _built(workload, device, size, mode)
    refuse(built.module)

    def as_fake(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not _is_fake_on(value, device)
        return _fake_of(value, device) if is_real else value

    with mode:
        memo: dict[int, Any] = {}
        for value in _tensors_of(built.module):
            if not _is_fake_on(value, device) and id(value) not in memo:
                memo[id(value)] = _fake_of(value, device)
        module = copy.deepcopy(built.module, memo) if memo else built.module
        return ModelCall(module, *built.changed(as_fake))


def _built(workload: Workload, device: torch.device, size: int | None, mode: Any) -> ModelCall:
    """Build a workload with as little memory as it lets us.

    Fake tensors can't have their type changed once they are parameters, and tensors of the meta device can't be read.
    A factory that needs both is given memory, on the CPU, for its weights and inputs.
    """
    for context in ((mode, device), (torch.device("meta"),)):
        with ExitStack() as stack:
            for manager in context:
                stack.enter_context(manager)
            try:
                return workload.build(size)
            except ConfigurationError:
                raise
            except Exception as error:  # of the factory; the next attempt may suit it, and the last one raises
                log.debug("%s can't be built in %s: %s", workload.name, context, error)
    return workload.build(size)


def same_tensors(module: nn.Module) -> nn.Module:
    """Copy a module, but for its tensors: what a call changes in the copy by Python stays there."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in _tensors_of(module)})


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Go through all tensors of a module: parameters, buffers, and plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        yield from tensor_state.tensors_among(list(vars(inner).values()))


def _fake_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _is_fake_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor_state.is_fake(tensor) and tensor.device.type == device.type


# ---------------------------------------------------------------- what they would take


class CountingMeter(LiveBytes, TorchDispatchMode):
    """Counts live bytes and peaks of tensors without memory, by the storages that operations make and release.

    What kernels allocate inside is not seen, nor what the graphs do that higher-order operators (`torch.cond`) call.

    Args:
        device: Whose allocator would hand out the memory.
        resized: Tensors that exist, and whose storages others resize: FSDP2 does so with whole parameters.

    Attributes:
        gathered_bytes: Results of all-gathers so far.
        scattered_bytes: Inputs of reduce-scatters so far.
        reduced_bytes: Inputs of all-reduces so far.
    """

    lost_marks, is_counting = False, True  # nothing interrupts it
    supports_higher_order_operators = True

    def __init__(self, device: torch.device, resized: Iterable[torch.Tensor] = ()) -> None:
        LiveBytes.__init__(self)
        TorchDispatchMode.__init__(self)
        self.gathered_bytes = self.scattered_bytes = self.reduced_bytes = 0
        self._device = device
        storages = {tensor_state.storage_id(tensor): tensor.untyped_storage() for tensor in resized}
        self._resized = [(storage, storage.nbytes()) for storage in storages.values()]
        self._known = set(storages)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile captures code that it has not captured yet."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages that it makes and the bytes that it sends."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its own operations on local tensors are seen
        self._count_resized()
        if sharding.casts_gradients(func, args, self._device):
            with self:
                return sharding.run_in_the_open(func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _dense_among((args, kwargs)), _dense_among(result)
        name = func.name().partition(".")[0]
        largest_bytes = max((t.nbytes for t in (*inputs, *outputs)), default=0)
        self.gathered_bytes += largest_bytes if name in _GATHERS else 0
        self.scattered_bytes += largest_bytes if name in _SCATTERS else 0
        self.reduced_bytes += largest_bytes if name in _REDUCES else 0
        existing = {tensor_state.storage_id(tensor) for tensor in inputs}
        for tensor in outputs:
            storage = tensor_state.storage_id(tensor)
            if storage not in existing and storage not in self._known:
                self._count_until_released(tensor)
        return result

    def start(self) -> None:
        """Begin to count; the first mark is called "start"."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self.mark("start")

    def mark(self, label: str) -> None:
        """Begin a new interval."""
        self._count_resized()
        super().mark(label)

    def stop(self) -> None:
        """End the count."""
        self._count_resized()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _count_resized(self) -> None:
        """Count the storages that were resized since."""
        for position, (storage, before) in enumerate(self._resized):
            after = storage.nbytes()
            if after != before:
                self._resized[position] = (storage, after)
                self.add(self._allocated(after) - self._allocated(before))

    def _count_until_released(self, tensor: torch.Tensor) -> None:
        storage = tensor_state.storage_id(tensor)
        size_bytes = self._allocated(tensor.untyped_storage().nbytes())

        def end() -> None:
            self._known.discard(storage)
            self.add(-size_bytes)

        self._known.add(storage)
        tensor_state.at_release(tensor, end)
        self.add(size_bytes)

    def _allocated(self, size_bytes: int) -> int:
        return allocated_bytes(size_bytes, self._device)


def _dense_among(values: Any) -> list[torch.Tensor]:
    return [part for tensor in tensor_state.tensors_among(values) for part in tensor_state.dense_parts(tensor)]


# ---------------------------------------------------------------- a GPU that is not there


def on_gpu(graph: Graph, device: torch.device) -> Graph:
    """Account a graph that was captured on CPU tensors as on a GPU."""
    storages = [replace(s, size_bytes=allocated_bytes(s.size_bytes, device)) for s in graph.storages]
    for mask in (n.outputs[1] for n in graph.nodes if n.op == "aten.native_dropout.default"):
        if (storage := graph.tensors[mask].storage) is not None:
            storages[storage] = replace(storages[storage], plain_times=1)  # a GPU's kernel gives booleans
    nodes = tuple(replace(n, is_random=n.is_random or is_order_dependent_on_gpu(n.op)) for n in graph.nodes)
    return replace(graph, storages=tuple(storages), nodes=nodes)


def with_gpu_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Replace attention, whose kernel depends on the device, in a graph that Dynamo captured."""
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        node.target = _gpu_attention
    module.recompile()
    return module


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for F.scaled_dot_product_attention with the kernel that a GPU would choose; tensors are fake."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    if attn_mask is None and str(query.dtype).removeprefix("torch.") in HALF_TYPES:
        flash = aten._scaled_dot_product_flash_attention.default
        return cast("torch.Tensor", flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0])
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention.default
    return cast("torch.Tensor", efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0])


# ---------------------------------------------------------------- what it does in a millisecond


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a millisecond, for estimates."""

    machine: Machine  # what it computes, and reads and writes
    source: str  # of these numbers
    link_bytes_per_ms: float  # what it sends to others, where there are several

    def __str__(self) -> str:
        """Write the rates for people."""
        machine = self.machine
        flops, half = f"{machine.flops_per_ms / 1e9:g} TFLOP/s", machine.half_flops_per_ms
        flops = flops if half is None else f"{flops} ({half / 1e9:g} in half precision)"
        return f"{flops}, {machine.bytes_per_ms / 1e6:g} GB/s: {self.source}"


DEFAULT_RATES = {
    "cpu": Rates(Machine(), "about one core of a server", 10e6),
    "cuda": Rates(replace(A100, half_flops_per_ms=312e9), "data sheet of an NVIDIA A100", 300e6),
}


def rates_of(
    device: torch.device, tflops: float | None = None, gb_per_s: float | None = None, link_gb_per_s: float | None = None
) -> Rates:
    """Return the rates of a kind of device, but for those that the user names."""
    rates = DEFAULT_RATES[device.type]
    if tflops is not None:
        machine = replace(rates.machine, flops_per_ms=tflops * 1e9, half_flops_per_ms=None)
        rates = replace(rates, machine=machine, source="as given")
    if gb_per_s is not None:
        rates = replace(rates, machine=replace(rates.machine, bytes_per_ms=gb_per_s * 1e6), source="as given")
    if link_gb_per_s is not None:
        rates = replace(rates, link_bytes_per_ms=link_gb_per_s * 1e6)
    return rates
