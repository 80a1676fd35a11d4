"""Kernels made of several operations: called like an operator, compiled by Inductor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import inductor, tensor_state


class Kernel:
    """A fused group of operations, called like an operator.

    What can't be compiled runs operation by operation.

    Args:
        module: The group: takes tensors, returns a list of tensors.
        key: Describes its work, shapes included.
        results: What it returns, on the fake device.
        announce: Told why it could not be compiled.
    """

    __module__ = "hiremate_lightning.rewriting.fused_kernel"

    def __init__(
        self, module: fx.GraphModule, key: str, results: Sequence[torch.Tensor], announce: Callable[[str], None]
    ) -> None:
        self.module = module
        self.__name__ = self.__qualname__ = "fused_" + hashlib.sha256(key.encode()).hexdigest()[:12]
        self._layouts = [_layout(r) for r in results]
        self._announce = announce
        self._run: inductor.Compiled | None = None

    def __str__(self) -> str:
        return f"hiremate.{self.__name__}"

    __repr__ = __str__

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Compute the results: a tensor, or several in a sequence."""
        if self._run is None:
            self.compile()
        assert self._run is not None, "it has just been compiled"
        results = self._run(list(inputs))
        return results[0] if len(self._layouts) == 1 else results

    @property
    def is_compiled(self) -> bool:
        """Whether the first call has nothing left to do."""
        return self._run is not None

    def compile(self) -> None:
        """Compile the group, and try the kernel on made-up inputs; outside of torch's tracing modes."""
        module = self.module
        shown = [p.meta["val"] for p in module.graph.find_nodes(op="placeholder")]
        try:
            inputs = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=s.device).zero_() for s in shown]
            run = inductor.compile_graph(module, inputs)
            self._check(run(list(inputs)), inputs)
        except Exception as error:  # whatever a compiler may fail with: the group runs all the same
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._announce(
                f"Inductor could not compile a group of {len(module.graph.nodes)} operations, "
                f"which run one by one: {type(error).__name__}: {reason}"
            )
            self._run = lambda arguments: module(*arguments)
        else:
            self._run = run

    def _check(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Hold a compiled kernel to what was traced: what follows relies on layouts, and on results of their own."""
        layouts = [_layout(r) for r in results]
        if layouts != self._layouts:
            raise ValueError(f"its results are laid out as {layouts}, expected {self._layouts}")
        storages = [tensor_state.storage_id(t) for t in results]
        if len(set(storages)) < len(storages) or set(storages) & {tensor_state.storage_id(t) for t in inputs}:
            raise ValueError("its results share memory")


class FusedKernels:
    """Gives each distinct group its kernel: equal groups, in all layers and graphs, share one.

    Args:
        announce: Told why a group could not be compiled.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._known: dict[str, Kernel] = {}

    def get(self, module: fx.GraphModule, results: Sequence[torch.Tensor]) -> Kernel:
        """Return the kernel of a group.

        Args:
            module: The group: takes tensors, returns a list of tensors.
            results: What it returns, on the fake device.
        """
        key = _describe(module.graph)
        if key not in self._known:
            self._known[key] = Kernel(module, key, results, self._announce)
        return self._known[key]

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile what is not compiled yet; the progress is the number of compiled kernels, and of all."""
        missing = [kernel for kernel in self._known.values() if not kernel.is_compiled]
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
