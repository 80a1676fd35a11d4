"""The innermost backward that runs in this thread: what it will do, and when it has ended."""

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

Edge = tuple[Node, int]  # of autograd's graph: a node, and the number of one of its inputs
_told = weakref.WeakSet[Any]()
_running: ContextVar[_Running | None] = ContextVar("hiremate_running_backward", default=None)
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Running:
    """A backward that was called from Python.

    Attributes:
        roots: What it begins with; nothing any more when it has ended.
        notes: What others note about it until it ends.
    """

    def __init__(self, roots: Sequence[torch.Tensor | GradientEdge], creates_graph: bool) -> None:
        self.roots = tuple(roots)
        self.creates_graph = creates_graph
        self.notes: dict[str, Any] = {}

    @functools.cached_property
    def edges(self) -> Counter[Edge]:
        """How often each edge is followed from the roots."""
        return edges_from(self.roots)

    @functools.cached_property
    def accumulating(self) -> dict[int, Edge]:
        """The edges that add to the `.grad` of leaves, by identity of the leaf."""
        leaves: Any = [edge for edge in self.edges if type(edge[0]) is _AccumulateGrad]
        return {id(node.variable): (node, number) for node, number in leaves}

    def end(self) -> None:
        """Drop the graph: autograd's threads keep this object."""
        self.roots, self.edges, self.accumulating = (), Counter(), {}
        self.notes.clear()


def edges_from(roots: Iterable[torch.Tensor | GradientEdge]) -> Counter[Edge]:
    """Count how often autograd follows each edge of its graph on the way back from some tensors or edges."""
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
    """Remember the roots of each backward from now on."""
    original = torch.autograd._engine_run_backward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # captured code may take gradients between its graphs
    @functools.wraps(original)
    def run(
        roots: Sequence[torch.Tensor | GradientEdge],
        tangents: Sequence[torch.Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # else it may be traced, and what listeners do with it
            for listener in tuple(_told):
                listener.backward_called()
        running = _Running(roots, create_graph)
        token = _running.set(running)  # autograd hands this context on to its threads
        try:
            return original(roots, tangents, retain_graph, create_graph, *args, **kwargs)
        finally:
            _running.reset(token)
            running.end()

    setattr(torch.autograd, "_engine_run_backward", run)  # noqa: B010  mypy takes it for a function that stays


def tell(listener: Any) -> None:
    """Call `backward_called` of a listener before each backward that is called from Python, as long as it lives."""
    _told.add(listener)


def taking_one(leaves: Mapping[int, torch.Tensor]) -> frozenset[int]:
    """List the leaves with which the running backward does nothing but add one gradient, from one place, to `.grad`."""
    running = _current()
    if running is None:
        return frozenset()
    usual = {
        key: running.accumulating[id(leaf)]
        for key, leaf in leaves.items()
        if leaf.requires_grad and not has_hooks(leaf) and id(leaf) in running.accumulating
    }
    once = {key: edge for key, edge in usual.items() if running.edges[edge] == 1}
    return frozenset(key for key, edge in once.items() if _will_run(edge, if_returned=False))


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks of a leaf see its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _will_run(accumulating: Edge, if_returned: bool) -> bool:
    """Whether the running backward will add to the `.grad` of a leaf; `if_returned` where it returns the gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulating[0]))
    except RuntimeError:  # autograd.grad() asks for the gradient of a leaf: it is returned, not added
        return if_returned


def notes() -> dict[str, Any] | None:
    """Return what is noted about the running backward, to be read and changed; None where it is not known."""
    running = _current()
    return None if running is None else running.notes


def terms_to(leaf: torch.Tensor) -> int:
    """Count the places from which gradients of a leaf will be added up; 0 where none will."""
    running = _current()
    if running is None:
        return 0
    edge = running.accumulating.get(id(leaf))
    return 0 if edge is None or not _will_run(edge, if_returned=True) else running.edges[edge]


def saved_by_captured() -> Iterator[torch.Tensor]:
    """List what code that AOTAutograd has captured saved for the running backward, and that is not freed yet."""
    running = _current()
    for node in () if running is None else dict.fromkeys(node for node, _ in running.edges):
        if node.name() == "CompiledFunctionBackward":
            with suppress(RuntimeError):  # it has run, and they are freed
                yield from node.saved_tensors  # type: ignore[attr-defined]


def _current() -> _Running | None:
    running = _running.get()
    if running is None:  # a thread of autograd's, on a GPU
        context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
        running = context.get(_running) if isinstance(context, Context) else None
    return running if running is not None and running.roots else None


def is_running() -> bool:
    """Whether this thread is inside of a backward, whoever called it."""
    return int(torch._C._current_graph_task_id()) != -1


def will_run_again() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def creates_graph() -> bool:
    """Whether the running backward was called with `create_graph=True`; False where that is not known."""
    running = _current()
    return running is not None and running.creates_graph


def at_end(function: Callable[[], None]) -> None:
    """Call a function when the running backward has ended, that of all graphs; not where it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
