"""The torch.compile backend: Dynamo's captured code in, planned parts out.

Dynamo guards on shapes, dtypes and modes and survives graph breaks; AOTAutograd functionalises and traces the joint
graph. What is left to do here is to cut that graph for execution. Code without gradients runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ..capturing.capture import Captured, capture
from ..errors import CaptureError
from ..rewriting import assignments, casts, losses, pooling, views
from ..rewriting.contributions import Contributions, OtherTermsError, TermCounts, sums_alone
from ..rewriting.fused_kernel import Kernels
from ..rewriting.fusion import fuse
from ..rewriting.kernels import run_as_eager
from ..running.execution import Part
from ..running.program import stub_modules
from ..running.straight_line import compiled
from ..torch_private import aot, autocasting, backward_pass, tensor_state, user_compiled
from ..torch_private.changes import lost_changes
from ..torch_private.each_size import EachSize, LetRunCaptured, sizes_among
from ..torch_private.eager_tracing import traced_as_eager
from .proving import Proof

log = logging.getLogger("hiremate_lightning")


def planning_backend(
    make_part: Callable[[Captured], Part],
    kernels: Kernels | None = None,
    let_run_captured: LetRunCaptured = lambda code, size_bytes: False,
    prove: Callable[[Proof, Sequence[Any]], None] | None = None,
    say: Callable[[str], None] = log.warning,
) -> Any:
    """Build a backend that hands each captured graph to a session.

    Args:
        make_part: Called once for each joint graph; the part that it returns runs in the graph's place.
        kernels: Where the kernels of fused operations are kept; None to fuse nothing.
        let_run_captured: Lets code whose sizes don't repeat run without a plan, see `EachSize`.
        prove: Proves code before it runs, see `Proof`; None to believe what is captured.
        say: Warns.

    Returns:
        A backend for `torch.compile(..., backend=...)`.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for operation in user_compiled.cut_out(module):
            if operation.calls_modules:
                say(user_compiled.opaque_words(operation.name))
        return autocasting.leaving_as_found(module, run_in_place(module, inputs))

    def run_in_place(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        terms: TermCounts = {}  # at the size traced last

        def trace(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Callable[..., Any], int]:
            nonlocal terms
            compilation = _Compilation(make_part, kernels)
            run, terms = compilation.compile(module, inputs, terms)
            if prove is not None:
                run = Proof(module, run, compilation.part, prove)
            return run, compilation.size_bytes

        if not has_gradients(inputs):
            return module.forward
        if prove is not None and (lost := lost_changes(module)):
            raise CaptureError(
                f"Its captured code does not change {', '.join(lost)} in place as the code itself does, by a fault of "
                "torch.compile."
            )
        sizes = sizes_among(module, inputs)
        return EachSize(module, sizes, trace, let_run_captured).run if sizes else trace(module, inputs)[0]

    return backend


def has_gradients(inputs: Sequence[Any]) -> bool:
    """Whether captured code may get gradients; other code runs as it is, at all sizes: there is nothing to plan."""
    return torch.is_grad_enabled() and any(isinstance(i, torch.Tensor) and i.requires_grad for i in inputs)


def _running_statistics(module: fx.GraphModule) -> list[int]:
    """List the positions of the inputs that are running statistics of norms.

    PyTorch's own kernels update these without counting it as a change: what eager code has saved of them for a
    backward that waits is still taken for what it was.
    """
    norms = {node for node in module.graph.nodes if node.target in (F.batch_norm, F.instance_norm)}
    named = (node.kwargs.get(name) for node in norms for name in ("running_mean", "running_var"))
    found = {*(value for node in norms for value in node.args[1:3]), *named}
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    return [position for position, value in inputs if value in found and norms.issuperset(value.users)]


class _Compilation:
    """The state of one compilation: AOTAutograd calls partition, then forward, then backward."""

    def __init__(self, make_part: Callable[[Captured], Part], kernels: Kernels | None) -> None:
        self._make_part = make_part
        self._kernels = kernels
        self._parameters: frozenset[int] = frozenset()
        self._blocks: dict[str, int] = {}
        self._contributions = Contributions((), {})
        self._captured: Captured | None = None
        self._part: Part | None = None

    @property
    def part(self) -> Part | None:
        """What runs in the place of what was traced, None where nothing of it has a gradient."""
        return self._part

    @property
    def size_bytes(self) -> int:
        """Bytes of all values of what was traced, be they needed or not; 0 where nothing of it has a gradient."""
        return 0 if self._captured is None else sum(self._captured.graph.sizes)

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], terms: TermCounts
    ) -> tuple[Callable[..., Any], TermCounts]:
        """Trace captured code; where gradients turn out to be of other terms than expected, once more with those.

        Gives what runs in its place, and the terms that it has.
        """
        while True:
            try:
                return self._trace(module, inputs, terms)
            except user_compiled.NotCompiledError as missing:
                missing.compile()

    def _trace(
        self, module: fx.GraphModule, inputs: Sequence[Any], terms: TermCounts
    ) -> tuple[Callable[..., Any], TermCounts]:
        backward_pass.watch()
        self._parameters = frozenset(i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter))
        for device_type in {inputs[i].device.type for i in self._parameters}:
            self._blocks |= casts.remembering_blocks(module, device_type)
        backend = aot.make_backend(
            partition=self._partition, forward=self._forward, backward=self._backward, inference=self._inference
        )
        self._contributions = given = Contributions(inputs, terms)
        with traced_as_eager():
            try:
                with autocasting.as_found_on_error(), given.traced(module):
                    run = backend(module, given.expand_traced(inputs))
            except OtherTermsError as error:
                given.settle(error.terms)
                with autocasting.as_found_on_error(), given.traced(module):
                    run = backend(module, given.expand_traced(inputs))
        expanded = run if not given.terms else lambda *arguments: run(*given.expand(arguments))
        statistics = _running_statistics(module)
        if not statistics:
            return expanded, given.terms

        def run_uncounted(*arguments: Any) -> Any:
            with tensor_state.changes_uncounted([arguments[position] for position in statistics]):
                return expanded(*arguments)

        return run_uncounted, given.terms

    def _partition(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        joint.graph.eliminate_dead_code()
        self._contributions.hand_over(joint, num_fwd_outputs)
        if self._blocks:
            casts.share(joint, num_fwd_outputs, self._parameters, self._blocks)
        assignments.gather(joint)
        views.leave_out(joint)
        losses.join(joint)
        pooling.join(joint)
        if self._kernels is not None:
            fuse(joint, num_fwd_outputs, self._kernels)
        joint.recompile()
        captured = capture(joint, num_fwd_outputs, self._parameters)
        terms = sums_alone(captured.backward_outputs, self._contributions.of_leaves)
        self._captured = captured = replace(captured, terms=terms)
        return stub_modules(captured)

    def _forward(self, _: fx.GraphModule, __: Sequence[Any]) -> aot.Boxed:
        assert self._captured is not None, "AOTAutograd compiles a forward only after it partitioned"
        aot.allow_retain_graph()
        aot.take_gradients_as_they_come()
        self._part = part = self._make_part(self._captured)
        part.own = aot.take_over_results()
        return aot.mark_boxed(lambda arguments: part.forward(arguments))

    def _backward(self, _: fx.GraphModule, __: Sequence[Any]) -> aot.Boxed:
        part = self._part
        assert part is not None, "AOTAutograd compiles a backward only after its forward"
        return aot.mark_boxed(lambda arguments: part.backward(arguments))

    def _inference(self, module: fx.GraphModule, _: Sequence[Any]) -> aot.Boxed:
        run_as_eager(module.graph)
        return compiled(module)
