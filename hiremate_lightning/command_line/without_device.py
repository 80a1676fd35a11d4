"""Replacements for missing devices: a counter of bytes, a GPU's blocks and kernels, rates, other processes.

A `Layout` describes how a module is spread over processes: sharded by FSDP2, divided by tensor parallelism, or neither.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..errors import ConfigurationError, did_you_mean
from ..memory.allocator import allocated_bytes
from ..memory.metering import LiveBytes
from ..records.costs import A100, HALF_TYPES, Machine
from ..records.graph import Graph
from ..rewriting.nodes import is_order_dependent_on_gpu
from ..torch_private import sharding, tensor_state
from ..torch_private.tensor_state import TorchDispatchMode

aten = torch.ops.aten

COLLECTIVES = {  # by kind; the larger of input and output bytes counts
    **dict.fromkeys(("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"), "gathered"),
    **dict.fromkeys(("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor"), "scattered"),
    **dict.fromkeys(("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"), "reduced"),
}
SHARDS, PARTS = "shards", "parts"  # dimensions of the mesh
DIMENSIONS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}  # the dimension of a weight that a style divides
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")  # styles whose modules every process holds whole here

# ---------------------------------------------------------------- what tensors without memory would take


class CountingMeter(LiveBytes, TorchDispatchMode):
    """Counts live bytes and peaks of fake tensors, by the storages that operations make and release.

    It does not see allocations inside of kernels, or operations in the graphs of higher-order operators (`torch.cond`).
    It also counts storages of some existing tensors that other code resizes, as FSDP2 does with whole parameters.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, resized: Iterable[torch.Tensor] = ()) -> None:
        LiveBytes.__init__(self)
        TorchDispatchMode.__init__(self)
        self.sent = Counter[str]()  # bytes of collectives so far, by kind (COLLECTIVES)
        self._device, self._allocated = device, partial(allocated_bytes, device=device)
        self._known = WeakSet(tensor.untyped_storage() for tensor in resized)  # the storages that are counted
        self._resized = [(storage, storage.nbytes()) for storage in self._known]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile still captures new code under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages that it makes and the bytes that it sends."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its operations on local tensors come here too
        self._count_resized()
        if sharding.casts_gradients(func, args, self._device):
            with self:
                return sharding.run_in_the_open(func, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _dense_among((args, kwargs)), _dense_among(result)
        if (kind := COLLECTIVES.get(func.name().partition(".")[0])) is not None:
            self.sent[kind] += max((t.nbytes for t in (*inputs, *outputs)), default=0)
        existing = {tensor.untyped_storage() for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage not in existing and storage not in self._known:
                size_bytes = self._allocated(storage.nbytes())
                self._known.add(storage)
                tensor_state.at_release(tensor, partial(self.add, -size_bytes))
                self.add(size_bytes)
        return result

    def start(self) -> None:
        """Begin to count; the first interval is called "start"."""
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
        """Count the storages that were resized since the last call."""
        for position, (storage, before) in enumerate(self._resized):
            after = storage.nbytes()
            if after != before:
                self._resized[position] = (storage, after)
                self.add(self._allocated(after) - self._allocated(before))


def _dense_among(values: Any) -> list[torch.Tensor]:
    return [part for tensor in tensor_state.tensors_among(values) for part in tensor_state.dense_parts(tensor)]


# ---------------------------------------------------------------- a GPU that is not there


def on_gpu(graph: Graph, device: torch.device) -> Graph:
    """Return a graph that was captured on CPU tensors, with bytes as on a GPU."""
    storages = [replace(s, size_bytes=allocated_bytes(s.size_bytes, device)) for s in graph.storages]
    for mask in (n.outputs[1] for n in graph.nodes if n.op == "aten.native_dropout.default"):
        if (storage := graph.tensors[mask].storage) is not None:
            storages[storage] = replace(storages[storage], eager_times=1)  # the kernel of a GPU returns booleans
    nodes = tuple(replace(n, is_random=n.is_random or is_order_dependent_on_gpu(n.op)) for n in graph.nodes)
    return replace(graph, storages=tuple(storages), nodes=nodes)


def with_gpu_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Replace attention, whose kernel depends on the device, by a GPU's kernel in a graph that Dynamo captured."""
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
    """Replace F.scaled_dot_product_attention by the kernel that a GPU would choose, on fake tensors."""
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
    """The rates of a device per millisecond, for estimates."""

    machine: Machine  # rates of computation, and of reads and writes
    source: str  # where the numbers come from
    link_bytes_per_ms: float  # rate to other devices, if there are several

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
    """Return the rates of a kind of device; rates that the user gives replace them."""
    rates = DEFAULT_RATES[device.type]
    machine, link_bytes_per_ms = rates.machine, rates.link_bytes_per_ms
    if tflops is not None:
        machine = replace(machine, flops_per_ms=tflops * 1e9, half_flops_per_ms=None)
    if gb_per_s is not None:
        machine = replace(machine, bytes_per_ms=gb_per_s * 1e6)
    if link_gb_per_s is not None:
        link_bytes_per_ms = link_gb_per_s * 1e6
    return Rates(machine, rates.source if machine is rates.machine else "as given", link_bytes_per_ms)


# ---------------------------------------------------------------- other processes


@dataclass(frozen=True, slots=True)
class Layout:
    """How a module is sharded and divided over processes."""

    shards: int = 1  # number of processes that `fully_shard` shards parameters over
    parts: int = 1  # number of processes that each block is divided over
    units: tuple[str, ...] = ()  # classes of the units to shard, besides the root; (): repeated blocks
    dtype: torch.dtype | None = None  # for gathered parameters, with gradients in float32; None: their own

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.shards * self.parts

    @contextmanager
    def processes(self, device: torch.device) -> Iterator[Any]:
        """Pretend to be rank 0 of all processes while a block runs; yield the mesh."""
        if sharding.may_shard():
            raise ConfigurationError(
                "The factory has started a process group, and --fsdp and --tp imagine one. Let it build the module "
                "alone."
            )
        from torch.distributed.device_mesh import init_device_mesh

        with sharding.imagined_group(self.count):
            yield init_device_mesh(device.type, (self.shards, self.parts), mesh_dim_names=(SHARDS, PARTS))

    def spread(self, root: nn.Module, mesh: Any) -> None:
        """Divide and shard a module in place."""
        if self.parts > 1:
            divide(root, mesh[PARTS])
        if self.shards == 1:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds to load

        policy = MixedPrecisionPolicy() if self.dtype is None else MixedPrecisionPolicy(self.dtype, torch.float32)
        for module in [*self.units_of(root), root]:
            fully_shard(module, mesh=mesh[SHARDS], mp_policy=policy)

    def units_of(self, root: nn.Module) -> list[nn.Module]:
        """List the units to shard, without the root."""
        if not self.units:
            return repeated_blocks(root)
        kinds = {type(module).__name__ for module in root.modules()}
        for name in self.units:
            if name not in kinds:
                raise ConfigurationError(
                    f"{type(root).__name__} has no module of a class {name!r} to shard.{did_you_mean(name, kinds)} "
                    "Name classes of its modules with --units, such as that of its layers."
                )
        return [module for module in root.modules() if type(module).__name__ in self.units and module is not root]


ONE = Layout()


def divide(root: nn.Module, mesh: Any) -> None:
    """Divide modules over processes by the model's own plan for tensor parallelism; refuse unsupported plans."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = _styles_of(root)
    for path, style in styles.items():
        size = root.get_parameter(f"{path}.weight").shape[DIMENSIONS[style]]
        if size % mesh.size():
            raise ConfigurationError(f"--tp {mesh.size()} doesn't divide the {size} features of {path}.")
    heads = getattr(getattr(root, "config", None), "num_key_value_heads", None)
    if isinstance(heads, int) and heads % mesh.size():
        raise ConfigurationError(f"--tp {mesh.size()} doesn't divide the {heads} heads of keys and values.")
    made = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
    }
    uses = Counter(id(p) for module in root.modules() for p in module.parameters(recurse=False))
    own = {path: style for path, style in styles.items() if uses[id(root.get_submodule(path).weight)] == 1}
    parallelize_module(root, mesh, {path: made[style] for path, style in own.items()})


def _styles_of(root: nn.Module) -> dict[str, str]:
    """Return {module path: style} of all divided modules, from the model's own plan."""
    plan = getattr(root, "_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"{type(root).__name__} has no plan for tensor parallelism: expected _tp_plan, as models of transformers "
            "have it, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}. Set it in the factory, or leave "
            "--tp out."
        )
    patterns = [(re.compile(re.escape(path).replace(r"\*", "[^.]+")), style) for path, style in plan.items()]
    styles = dict[str, str]()  # in a plan, * matches one part of a path
    for path, module in root.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(path)), WHOLE[0])
        if style in WHOLE:
            continue
        if style not in DIMENSIONS or not isinstance(module, nn.Linear):
            raise ConfigurationError(
                f"Can't divide {path} ({type(module).__name__}) by the style {style!r} of the model's _tp_plan. "
                f"Expected a torch.nn.Linear and one of: {', '.join([*DIMENSIONS, *WHOLE])}. Use --fsdp alone."
            )
        styles[path] = style
    return styles


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """List the outermost modules with children that have a sibling of the same class: the layers of a transformer."""
    children = [child for child in root.children() if next(child.parameters(), None) is not None]
    kinds = Counter(type(child) for child in children if next(child.children(), None) is not None)
    blocks = ([child] if kinds[type(child)] > 1 else repeated_blocks(child) for child in children)
    return [block for inner in blocks for block in inner]


def planned_paths(module: nn.Module, path: str = "") -> list[str]:
    """List the paths of the outermost trained modules that have no units below them: the module's own without units."""
    if not sharding.has_units_below(module):
        return [path] if any(p.requires_grad for p in module.parameters()) else []
    below = (planned_paths(child, f"{path}.{name}".lstrip(".")) for name, child in module.named_children())
    return [inner for paths in below for inner in paths]
