"""The torch.compile backend: takes captured graphs from Dynamo, returns the functions that run them.

Dynamo guards on shapes, dtypes and modes and handles graph breaks; AOTAutograd functionalises the code and traces the
joint graph. The backend rewrites the joint graph, pass by pass, and makes its records, see `capture`. AOTAutograd
partitions the joint graph into two modules. Both are stubs that never run; only their calling convention is used. Code
without gradients runs as captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ..errors import CaptureError
from ..housekeeping import log
from ..rewriting import casts
from ..rewriting.contributions import Contributions, OtherTermsError, TermCounts, casts_alone, sums_alone
from ..rewriting.joint import Joint, Source
from ..rewriting.kernels import FusedKernels, as_eager
from ..rewriting.nodes import drop_unread
from ..rewriting.passes import run_passes
from ..rewriting.straight_line import compiled
from ..torch_private import aot, autocasting, backward_pass, captured_code, compiled_by_torch, tensor_state
from ..torch_private.eager_tracing import traced_as_eager
from ..torch_private.size_symbols import sizes_among
from .capture import Captured, capture, order_of_gradients
from .each_size import EachSize, Runner, RuntimeSource, Smaller, TraceAhead, TracedCode
from .same_captures import SameCaptures

# Makes the `running.execution.GraphRuntime` that runs in place of a joint graph.
MakeRuntime = Callable[[Captured], Any]
Prove = Callable[[fx.GraphModule, Runner, Any, Smaller | None], Runner]


def planning_backend(
    make_runtime: MakeRuntime,
    kernels: FusedKernels | None = None,
    prove: Prove | None = None,
    warn: Callable[[str], None] = log.warning,
    trace_ahead: TraceAhead = lambda run, sizes, trace: None,
    runtime_source: RuntimeSource | None = None,
    same: SameCaptures | None = None,
) -> Any:
    """Build a backend for `torch.compile(..., backend=...)` that hands each captured graph to a session.

    Args:
        make_runtime: Called once for each joint graph; the runtime that it returns runs in the graph's place.
        kernels: Cache of the kernels of fused operations; None to fuse nothing.
        prove: Wraps a runner so that it is compared with eager PyTorch first. Its arguments are the captured code, its
            runner, the runner's runtime (None if nothing has a gradient), and a function that makes the code at smaller
            sizes, on which the proof then runs instead (or None). None to run without proof.
        warn: Logs a warning.
        trace_ahead: Called after each trace; may trace the code at larger sizes in advance, see `EachSize`.
        runtime_source: Makes runtimes for sizes that were not traced; None to trace each size.
        same: Finds the runner of an earlier capture of the same code; None to start with no captures.
    """
    same = same or SameCaptures()

    def proving(module: fx.GraphModule, run: Runner, runtime: Any, smaller: Smaller | None = None) -> Runner:
        return run if prove is None else prove(module, run, runtime, smaller)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not captured_code.keep_modes_of_backwards(module):
            raise CaptureError(
                "It takes gradients with torch.autograd.grad of a torch.autograd.Function whose backward switches "
                "gradients on or off, of which torch.compile reads other second derivatives."
            )
        for operation in compiled_by_torch.cut_out(module):
            if operation.calls_modules:
                warn(
                    f"Nothing inside of {operation.name} is planned: its author compiled it, with the modules that it "
                    "calls, and it stays compiled. Each of its calls is one operation, whose results are kept or "
                    "computed again as a whole. To plan what is inside, leave @torch.compile off it, or compile only "
                    "functions that it calls."
                )
        return autocasting.leaving_as_found(module, same.run_of(run_in_place, module, inputs))

    def run_in_place(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not has_gradients(inputs):
            return module.forward
        if prove is not None and (lost := captured_code.lost_changes(module)):
            raise CaptureError(
                f"Its captured code does not change {', '.join(lost)} in place as the code itself does, by a fault of "
                "torch.compile."
            )
        sizes = sizes_among(module, inputs)
        terms: TermCounts = {}

        def trace(module: fx.GraphModule, inputs: Sequence[Any]) -> TracedCode:
            nonlocal terms
            compilation = _Compilation(make_runtime, kernels, serves_other_sizes=bool(sizes))
            run = compilation.compile(module, inputs, terms)
            terms = compilation.contributions.terms  # the first guess for the next size

            def at_other_sizes(module: fx.GraphModule, runtime: Any, smaller: Smaller | None) -> Runner:
                return proving(module, compilation.running(runtime, run), runtime, smaller)

            return TracedCode(proving(module, run, compilation.runtime), compilation.runtime, at_other_sizes)

        return EachSize(module, sizes, trace, trace_ahead, runtime_source, same).run if sizes else trace(module, inputs)

    return backend


OPAQUE = (("tensorly", "einsum"),)  # module and function; the result depends on the arguments alone


def capture_opaque() -> None:
    """Let torch.compile capture the functions in `OPAQUE` as one call each, since Dynamo fails inside of them.

    AOTAutograd can trace their tensor operations; Dynamo fails on tensorly's search for an order of contraction, which
    neural operators use. Modules that are not imported yet are skipped: no captured code can call them.
    """
    for name, function in OPAQUE:
        opaque = getattr(sys.modules.get(name), function, None)
        if opaque is not None:
            torch.compiler.allow_in_graph(opaque)


def has_gradients(inputs: Sequence[Any]) -> bool:
    """Whether captured code may get gradients; code without gradients has no plan and runs as captured."""
    return torch.is_grad_enabled() and any(isinstance(i, torch.Tensor) and i.requires_grad for i in inputs)


def _running_statistics(module: fx.GraphModule) -> list[int]:
    """List the positions of the inputs that are running statistics of norms.

    PyTorch's kernels update running statistics without incrementing the version counter, so that a pending backward
    that has saved them raises no error. A planned forward must not increment the counter either.
    """
    norms = {node for node in module.graph.nodes if node.target in (F.batch_norm, F.instance_norm)}
    named = (node.kwargs.get(name) for node in norms for name in ("running_mean", "running_var"))
    values = {*(value for node in norms for value in node.args[1:3]), *named}
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    return [position for position, value in inputs if value in values and norms.issuperset(value.users)]


class _Compilation:
    """One compilation of captured code: AOTAutograd calls partition, then forward, then backward.

    AOTAutograd's caches keep this object alive. So it must not refer to the code or its inputs, which would keep the
    model alive. The compiled function may also run the code at other sizes, see `running`.
    """

    def __init__(
        self, make_runtime: MakeRuntime, kernels: FusedKernels | None, serves_other_sizes: bool = False
    ) -> None:
        self.runtime: Any = None  # runs in place of the joint graph; None if nothing has a gradient
        self._at_other_sizes: Any = None  # the runtime at other sizes that runs at the moment in place of `runtime`
        self._make_runtime, self._kernels, self._serves_other_sizes = make_runtime, kernels, serves_other_sizes
        self._parameters: frozenset[int] = frozenset()
        self._blocks: dict[Source, int] = {}
        self.contributions = Contributions((), {})  # of the current trace
        self._captured: Captured | None = None

    def running(self, runtime: Any, run: Runner) -> Runner:
        """Return a function that runs the code at other sizes by `runtime`; the backward finds it in saved tensors."""

        def run_at_sizes(*arguments: Any) -> Any:
            self._at_other_sizes = runtime
            try:
                return run(*arguments)
            finally:
                self._at_other_sizes = None

        return run_at_sizes

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], terms: TermCounts) -> Runner:
        """Trace captured code; return a function that runs it and gives each result its own autograd node."""
        self._parameters = frozenset(i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter))
        backward_pass.watch()
        self.contributions = Contributions(inputs, terms)
        while True:
            try:
                with traced_as_eager():
                    run = self._trace(module, inputs)
                break
            except compiled_by_torch.NotCompiledError as missing:
                missing.compile()
            except OtherTermsError as error:
                log.debug("tracing again, with other terms of gradients")
                self.contributions = Contributions(inputs, error.terms, is_settled=True)
        contributions, statistics = self.contributions, _running_statistics(module)
        is_planned = self.runtime is not None

        def run_whole(*arguments: Any) -> Any:
            with tensor_state.changes_uncounted([arguments[position] for position in statistics]):
                results = run(*contributions.expand(arguments))
                if is_planned:
                    aot.give_own_nodes(results)
            return results

        return run_whole

    def _trace(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        backend = aot.make_backend(
            partition=self._partition, forward=self._forward, backward=self._backward, inference=self._inference
        )
        contributions, self._blocks = self.contributions, casts.outermost_autocasts(module)
        with autocasting.as_found_on_error(), contributions.traced(module):
            run: Runner = backend(module, contributions.expand_traced(inputs))
        return run

    def _partition(self, joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        finished = order_of_gradients(joint, num_fwd_outputs)
        drop_unread(joint.graph)
        self.contributions.hand_over(joint, num_fwd_outputs)
        rewritten = Joint(
            joint, num_fwd_outputs, self._parameters, self._blocks, self.contributions.of_any_type, self._kernels
        )
        run_passes(rewritten)
        captured = capture(joint, num_fwd_outputs, self._parameters)
        terms = sums_alone(captured.backward_outputs, self.contributions.of_leaves)
        cast_terms = casts_alone(captured.backward_outputs, rewritten.terms_of_casts)
        self._captured = replace(captured, terms=terms, cast_terms=cast_terms, finished=finished)
        return _stub_modules(self._captured)

    def _forward(self, _: fx.GraphModule, __: Sequence[Any]) -> aot.Boxed:
        assert self._captured is not None, "AOTAutograd compiles a forward only after it partitioned"
        self.runtime = runtime = self._make_runtime(self._captured)
        runtime.own = aot.settle_forward(self._serves_other_sizes)
        return aot.mark_boxed(lambda arguments: (self._at_other_sizes or runtime).forward(arguments))

    def _backward(self, _: fx.GraphModule, __: Sequence[Any]) -> aot.Boxed:
        runtime = self.runtime
        assert runtime is not None, "AOTAutograd compiles a backward only after its forward"
        return aot.mark_boxed(lambda arguments: runtime.backward(arguments))

    def _inference(self, module: fx.GraphModule, _: Sequence[Any]) -> aot.Boxed:
        for node, call in [(n, as_eager(n)) for n in module.graph.nodes if n.op == "call_function"]:
            node.target, node.args = call
        return compiled(module)


def _stub_modules(captured: Captured) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make the stub modules of the forward and the backward; their only saved tensor is an empty token."""
    _, _, of_forward, of_backward = aot.joint_outputs(captured.joint, len(captured.forward_outputs))
    token = fx.Graph().placeholder("token")
    with tensor_state.fake_mode_of([n.meta.get("val") for n in captured.placeholders]):
        token.meta["val"] = torch.empty(0)
    results, of_results = (*captured.forward_outputs, token), [*of_forward, aot.SAVED]
    forward = _stub(captured.joint, captured.placeholders, results, of_results)
    return forward, _stub(captured.joint, (token, *captured.tangents), captured.backward_outputs, of_backward)


def _stub(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[Any], descriptions: list[Any]
) -> fx.GraphModule:
    """Make a module whose inputs and outputs are described as these nodes are."""
    graph, stand_ins = fx.Graph(), dict[Any, fx.Node]()
    for node in inputs:
        stand_ins[node] = graph.placeholder(node.name)
    for node in outputs:
        if isinstance(node, fx.Node) and node not in stand_ins:
            stand_ins[node] = graph.call_function(torch.empty, ((0,),))
    for node, stand_in in stand_ins.items():
        stand_in.meta = dict(node.meta)
    graph.output(tuple(stand_ins.get(value, value) for value in outputs)).meta["desc"] = descriptions
    return captured_code.module_of(joint, graph)
