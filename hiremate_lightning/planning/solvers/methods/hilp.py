"""The hierarchical program: options of clusters in the small, merged by the phased model of the whole.

Source: Gusak, Zhao, Le Hellard, Beaumont, Eyraud-Dubois, Shilova et al., "HiRemate: Hierarchical Approach for Efficient
Re-materialization of Neural Networks", ICML 2025, PMLR 267. As there, the forward is partitioned into clusters; each
cluster has a frontier of options; equal clusters are solved once; a program on top chooses one option for each cluster
and says what is recomputed when. Changed: an option says which values of the cluster are kept through the turn, and
the program on top is the phased model, which counts every storage, so that an option has no peak of its own that could
be misjudged; values may be recomputed as often as pays; and the solution is replayed, repaired and filled up across
the borders of clusters.

H-Rockmate is the forerunner of HiRemate by the same authors (2023, OpenReview zLwCT9srfo). It differs in the partition:
it cuts a sequence of blocks, as Rockmate does, and splits large blocks further; HiRemate groups any graph from its
nodes up, as `partition` does here. Its options and its program on top, H-ILP, are those of HiRemate. By `partition`
this is HiRemate; with blocks for clusters it would be H-Rockmate.

    (7)  sum_o f[j, o] = 1                      one option for each cluster j
    (8)  S[0, d] = sum_(o keeps d) f[j, o]      d made in j and not read by other clusters

An option of cluster j under a limit on its saved bytes is the turn-point program of its nodes, its inputs taken to be
there:

    minimise  sum_k c_k y_k;  x_d + y_p(d) >= 1;  x_d + y_p(d) >= y_k;  sum_d m_d x_d <= limit

It can't mix two options of one cluster: values of a cluster go together, unless filling up keeps more of them. The
program on top has to check memory at many instants where the budget is small, and may end without a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...partition import Cluster, partition
from ..base import Status
from ..choices import Policy
from ..incumbent import Search
from ..mip_backend import solve
from ..model import StepModel
from ..phases import PhasedProgram
from ..proposals import method
from ..refine import Restriction, refine
from ..segments import try_segments
from ..turn_point import keeping_program, prove

SAVED_SHARES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)  # of a cluster's bytes: limits of its options
OPTION_LIMIT_S = 2.0
RESERVED_SHARE = 0.1  # of the time limit, for segments and to fill up
MS_PER_BYTE = 1e-15  # so that of options of the same time the one that saves least is chosen

Frontier = tuple[frozenset[int], ...]


def frontiers(model: StepModel, clusters: Sequence[Cluster]) -> Iterator[tuple[list[int], Frontier]]:
    """Yield of each cluster with values of its own these and its options, the one that saves most first.

    An option is the values that are kept. Equal clusters are solved once.
    """
    solved: dict[str, tuple[tuple[int, ...], ...]] = {}
    for cluster in clusters:
        inside = values_of(model, cluster)
        if not inside:
            continue
        if cluster.key not in solved:
            place = {s: i for i, s in enumerate(inside)}
            solved[cluster.key] = tuple(tuple(place[s] for s in sorted(o)) for o in _options(model, inside))
        yield inside, tuple(frozenset(inside[i] for i in option) for option in solved[cluster.key])


def values_of(model: StepModel, cluster: Cluster) -> list[int]:
    """Return the choices that a cluster makes and that no other cluster reads in the forward."""
    nodes = set(cluster.nodes)
    made = {s for n in cluster.nodes for s in model.graph.allocates[n]}
    outside = {
        model.storage_of[t]
        for t, readers in model.forward_readers.items()
        if model.storage_of[t] in made and not nodes.issuperset(readers)
    }
    return [s for s in model.choices if s in made and s not in outside and s in model.producer]


def _options(model: StepModel, inside: Sequence[int]) -> list[frozenset[int]]:
    """Solve the turn-point program of a cluster under several limits; options that save as much appear once."""
    used = [s for s in inside if s in model.uses]
    total = sum(model.sizes[s] for s in used)
    options = dict[frozenset[int], None]()
    for share in SAVED_SHARES:
        program, keep = keeping_program(model, inside, used, share * total, ms_per_byte=MS_PER_BYTE)
        result = solve(program, model.problem.options, OPTION_LIMIT_S, work=model.work)
        if result.status is Status.INFEASIBLE:
            break
        if result.values:
            options[frozenset(s for s, v in keep.items() if result.values[v] >= 0.5)] = None
    return list(options) or [frozenset(inside)]


def restriction(options: Sequence[tuple[list[int], Frontier]]) -> Restriction:
    """Return a function that adds (7) and (8) to a phased program, for the values and options of each cluster."""

    def restrict(phased: PhasedProgram) -> None:
        program = phased.program
        for number, (values, frontier) in enumerate(options):
            chosen = [program.variable(0.0) for _ in frontier]
            program.row(f"7_{number}", [(f, 1.0) for f in chosen], lower=1.0, upper=1.0)
            for storage in values:
                if (0, storage) in phased.held:
                    keeping = [(f, 1.0) for f, option in zip(chosen, frontier, strict=True) if storage in option]
                    terms = [*keeping, (phased.held[0, storage], -1.0)]
                    program.row(f"8_{number}_{storage}", terms, lower=0.0, upper=0.0)

    return restrict


@method("hilp", needs_programs=True)
def propose(search: Search) -> Iterator[Policy]:
    """Propose the best choice among the options of clusters; say so where segments are faster."""
    if not prove(search):
        return
    options = list(frontiers(search.model, partition(search.model.graph)))
    refine(search, restrict=restriction(options), reserve_s=RESERVED_SHARE * search.left_s())
    if search.best is not None:
        chosen = search.best
        yield chosen.policy
        try_segments(search, search.within(0.5))
        if search.best is not chosen:
            search.say("Segments, filled up, are faster here than the choice among the options of clusters.")
