"""Patch autograd's entry to see the innermost backward of this thread: its roots, edges and options, and its end."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]  # a node of autograd's graph, and the number of one of its inputs
_listeners = weakref.WeakSet[Any]()
_running: ContextVar[_Running | None] = ContextVar("hiremate_running_backward", default=None)
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Running:
    """A backward that was called from Python.

    Attributes:
        roots: The tensors or edges that it begins with; empty when it has ended.
        notes: What other modules record about it until it ends.
    """

    def __init__(self, roots: Sequence[torch.Tensor | GradientEdge], creates_graph: bool) -> None:
        self.roots = tuple(roots)
        self.creates_graph = creates_graph
        self.notes: dict[str, Any] = {}

    @functools.cached_property
    def edges(self) -> Counter[Edge]:
        """How often autograd follows each edge from the roots."""
        return edges_from(self.roots)

    @functools.cached_property
    def accumulating(self) -> dict[int, Edge]:
        """The edges into AccumulateGrad nodes of leaves, by identity of the leaf."""
        leaves: Any = [edge for edge in self.edges if type(edge[0]) is _AccumulateGrad]
        return {id(node.variable): (node, number) for node, number in leaves}

    def terms_to(self, leaf: torch.Tensor, if_returned: bool) -> int:
        """Return how many gradients of a leaf it adds up; 0 for none, or if `autograd.grad` returns them, by choice."""
        edge = self.accumulating.get(id(leaf))
        if edge is None:
            return 0
        try:
            runs = bool(torch._C._will_engine_execute_node(edge[0]))
        except RuntimeError:  # autograd.grad() returns the gradient of this leaf
            runs = if_returned
        return self.edges[edge] if runs else 0

    def end(self) -> None:
        """Drop references to the graph: autograd's threads keep this object."""
        self.roots, self.edges, self.accumulating = (), Counter(), {}
        self.notes.clear()


def edges_from(roots: Iterable[torch.Tensor | GradientEdge]) -> Counter[Edge]:
    """Count how often a backward from `roots` follows each edge of autograd's graph."""
    first = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    edges = Counter((edge.node, edge.output_nr) for edge in first)
    ahead = list(dict.fromkeys(edge.node for edge in first))
    seen = set(ahead)
    while ahead:
        for node, number in ahead.pop().next_functions:
            if node is not None:
                edges[node, number] += 1
                if node not in seen:
                    seen.add(node)
                    ahead.append(node)
    return edges


@functools.cache
def watch() -> None:
    """Patch autograd to record the roots of each backward from now on, and to call the listeners."""
    original = torch.autograd._engine_run_backward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # captured code may call autograd between its graphs
    @functools.wraps(original)
    def run(
        roots: Sequence[torch.Tensor | GradientEdge],
        tangents: Sequence[torch.Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # a mode may trace the backward, and the listeners with it
            for listener in tuple(_listeners):
                listener.backward_called()
        running = _Running(roots, create_graph)
        token = _running.set(running)  # autograd copies this context to its threads
        try:
            return original(roots, tangents, retain_graph, create_graph, *args, **kwargs)
        finally:
            _running.reset(token)
            running.end()

    setattr(torch.autograd, "_engine_run_backward", run)  # noqa: B010  mypy takes it for a function that stays


def add_listener(listener: Any) -> None:
    """Call the listener's `backward_called` before each backward that is called from Python, as long as it lives."""
    _listeners.add(listener)


def taking_one(leaves: Mapping[int, torch.Tensor]) -> frozenset[int]:
    """Return the keys of leaves for which the running backward only adds one gradient, from one place, to `.grad`."""
    running = _current()
    if running is None:
        return frozenset()
    usual = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad and not has_hooks(leaf)}
    return frozenset(key for key, leaf in usual.items() if running.terms_to(leaf, if_returned=False) == 1)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether a leaf has hooks that see its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def notes() -> dict[str, Any] | None:
    """Return the notes on the running backward, which callers read and change; None without a known backward."""
    running = _current()
    return None if running is None else running.notes


def terms_to(leaf: torch.Tensor) -> int:
    """Return how many gradients of a leaf the running backward adds up; 0 if it computes none."""
    running = _current()
    return 0 if running is None else running.terms_to(leaf, if_returned=True)


def saved_by_captured() -> Iterator[torch.Tensor]:
    """Yield the saved tensors of AOTAutograd's nodes in the running backward that are not freed yet."""
    running = _current()
    for node in () if running is None else dict.fromkeys(node for node, _ in running.edges):
        if node.name() == "CompiledFunctionBackward":
            with suppress(RuntimeError):  # the node has run, and its saved tensors are freed
                yield from node.saved_tensors  # type: ignore[attr-defined]


def _current() -> _Running | None:
    running = _running.get()
    if running is None:  # in autograd's thread of a GPU
        context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
        running = context.get(_running) if isinstance(context, Context) else None
    return running if running is not None and running.roots else None


def is_running() -> bool:
    """Whether this thread is inside of a backward, also of one that C++ called."""
    return int(torch._C._current_graph_task_id()) != -1


def will_run_again() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def creates_graph() -> bool:
    """Whether the running backward was called with `create_graph=True`; False if it is not known."""
    running = _current()
    return running is not None and running.creates_graph


def at_end(function: Callable[[], None]) -> None:
    """Call a function when the running backward has ended for all graphs; not if the backward fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
