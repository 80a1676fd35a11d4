"""A captured graph says what a step does: who computed what, on which storage, and what must never run twice."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.records.graph import Direction, StorageKind
from hiremate_lightning.rewriting import nodes
from tests.exact import captured_by, network
from tests.tiny import recompute_lazily

ROWS, WIDTH = 256, 16


class Net(nn.Module):
    """Layers of each kind that capture treats in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x)))


def captured_of(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    """Run one planned forward and give what was captured."""
    return captured_by(model, *(inputs or (torch.randn(ROWS, WIDTH),)))


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return captured_of(Net())


def node_of(graph, op):
    return next(node for node in graph.nodes if node.op.startswith(op))


def storage_of(graph, tensor):
    return graph.tensors[tensor].storage


def recomputed_ops(graph):
    """List the operators that run again where nothing is kept."""
    return [graph.nodes[n].op for before in recompute_lazily(graph, ()) for n in before]


def test_nodes_know_the_module_and_line_that_called_them(captured):
    graph = captured.graph
    modules = {node.module for node in graph.nodes if node.direction is Direction.FORWARD}
    assert {"blocks.0.0", "blocks.0.1", "blocks.1.0", "norm", "dropout", "head"} <= modules
    assert node_of(graph, "aten.gelu_backward").module == "blocks.1.1"
    sources = {node.source.rpartition(":")[0] for node in graph.nodes}
    assert sources <= {"", __file__}, "lines of torch and of this package are not the user's"
    file, line = node_of(graph, "aten.native_dropout.").source.rsplit(":", 1)
    assert file.endswith(".py")
    assert int(line) > 0


def test_records_and_fx_nodes_have_the_same_indices(captured):
    graph = captured.graph
    assert len(captured.fx_nodes) == len(graph.nodes)
    assert len(captured.fx_values) == len(graph.tensors)
    for node, fx_node in zip(graph.nodes, captured.fx_nodes, strict=True):
        assert node.replays is not None or node.name == fx_node.name


def test_views_share_storages_which_have_sizes_and_kinds(captured):
    graph = captured.graph
    views = [n for n in graph.nodes if n.op == "aten.t.default"]
    assert views
    for view in views:
        assert storage_of(graph, view.outputs[0]) == storage_of(graph, view.inputs[0])
    gelu = node_of(graph, "aten.gelu.default")
    assert graph.storages[storage_of(graph, gelu.outputs[0])].size_bytes == ROWS * WIDTH * 4
    inputs = [graph.storages[s] for t in graph.inputs if (s := storage_of(graph, t)) is not None]
    assert all(storage.kind.is_resident for storage in inputs)
    assert {storage.kind for storage in inputs} == {StorageKind.PARAMETER, StorageKind.INPUT}
    parameters = [s.size_bytes for s in graph.storages if s.kind is StorageKind.PARAMETER]
    assert sum(parameters) == sum(p.nbytes for p in Net().parameters())


def test_a_tensor_that_is_transposed_and_sliced_is_one_storage():
    @network(lambda: {"layer": nn.Linear(WIDTH, 2 * WIDTH)})
    def views(self, x):
        a, b = self.layer(x).chunk(2, dim=-1)
        return a * b.t().t().view(-1, WIDTH) if b.is_contiguous() else a * b.t().t()

    graph = captured_of(views()).graph
    split = node_of(graph, "aten.split")
    made = {storage_of(graph, t) for t in split.outputs}
    assert made == {storage_of(graph, split.inputs[0])}


def test_a_dropout_is_random_and_replayed_from_input_and_mask(captured):
    graph = captured.graph
    index, dropout = next((i, n) for i, n in enumerate(graph.nodes) if n.op == "aten.native_dropout.default")
    replay = next(n for n in graph.nodes if n.replays == index)
    assert dropout.is_random
    assert not dropout.is_repeatable
    assert replay.is_repeatable
    assert replay.outputs == (dropout.outputs[0],)
    assert set(replay.inputs) == {dropout.inputs[0], dropout.outputs[1]}
    assert graph.nodes.index(replay) not in graph.forward
    assert "aten.native_dropout.default" not in recomputed_ops(graph), "it is replayed, never drawn again"


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli, lambda x: F.gumbel_softmax(x)])
def test_random_operations_are_never_recomputed(draw):
    @network(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
    def draws(self, x):
        return (self.layer(x) * draw(x.abs().clamp(max=1))).square()

    graph = captured_of(draws()).graph
    drawn = {i for i, node in enumerate(graph.nodes) if node.is_random}
    assert drawn
    assert not drawn & {n for before in recompute_lazily(graph, ()) for n in before}


def test_attention_may_run_again_only_without_dropout():
    @network(lambda probability: {"layer": nn.Linear(WIDTH, WIDTH), "probability": probability})
    def attends(self, x):
        q = self.layer(x).view(4, 4, -1, WIDTH // 4)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.probability)

    plain, dropping = (captured_of(attends(p)).graph for p in (0.0, 0.5))
    assert not any(node.is_random for node in plain.nodes)
    assert any(node.is_random for node in dropping.nodes)


def test_a_batch_norm_runs_again_and_updates_its_statistics_once(captured):
    graph = captured.graph
    assert node_of(graph, "aten._native_batch_norm_legit_functional").is_repeatable
    writes = [i for i, node in enumerate(graph.nodes) if node.op == "aten.copy_.default"]
    assert len(writes) == 3  # running mean and variance, number of batches
    assert all(graph.nodes[i].is_mutating for i in writes)
    assert all(i in graph.forward for i in writes)
    assert not set(writes) & {n for before in recompute_lazily(graph, ()) for n in before}


def test_what_reads_an_overwritten_buffer_is_not_recomputed():
    @network(lambda: {"layer": nn.Linear(WIDTH, WIDTH), "mean": torch.zeros(WIDTH)})
    def averages(self, x):
        y = self.layer(x)
        z = (y - self.mean).exp()
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return z.square()

    captured = captured_of(averages())
    graph = captured.graph
    reader = next(n for n in graph.nodes if n.op == "aten.sub.Tensor" and n.direction is Direction.FORWARD)
    assert reader.reads_mutated
    assert not reader.is_repeatable
    assert "aten.sub.Tensor" not in recomputed_ops(graph)
    assert [graph.tensors[t].shape for t in captured.mutated] == [(WIDTH,)]


def test_what_needs_no_gradient_runs_just_before_its_first_use():
    @network(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
    def cubic(self, x):
        for _ in range(4):
            x = self.layer(x) ** 3
        return x

    graph = captured_of(cubic()).graph
    made_at = {t: place for place, n in enumerate(graph.backward) for t in graph.nodes[n].outputs}
    powers = [n for n in graph.backward if graph.nodes[n].op == "aten.pow.Tensor_Scalar"]
    assert len(powers) == 4
    for index in powers:
        output = graph.nodes[index].outputs[0]
        users = [p for p, n in enumerate(graph.backward) if output in graph.nodes[n].inputs]
        between = graph.backward[made_at[output] + 1 : min(users)]
        assert {graph.nodes[n].op for n in between} <= {"aten.mul.Scalar"}


def test_every_tensor_is_made_before_it_is_read(captured):
    graph = captured.graph
    there = {*graph.inputs, *graph.tangents}
    for index in (*graph.forward, *graph.backward):
        assert there.issuperset(graph.nodes[index].inputs), graph.nodes[index].name
        there.update(graph.nodes[index].outputs)
    assert there.issuperset(graph.gradients)


def test_keys_are_equal_for_equal_work_of_equal_shapes_only(captured):
    @network(lambda: {"a": nn.Linear(WIDTH, 8), "b": nn.Linear(8, WIDTH)})
    def two(self, x):
        return F.gelu(self.b(F.gelu(self.a(x))))

    for found, different in ((captured, 1), (captured_of(two()), 2)):
        keys = [node.key for node in found.graph.nodes if node.op == "aten.gelu.default"]
        assert len(keys) == 2
        assert len(set(keys)) == different


def test_matrix_products_have_their_flops(captured):
    product = node_of(captured.graph, "aten.addmm.default")
    assert product.flops == 2 * ROWS * WIDTH * WIDTH


def test_the_same_model_gives_the_same_graph():
    assert captured_of(Net()).graph == captured_of(Net()).graph


@pytest.mark.parametrize(
    ("target", "device", "runs_once"),
    [
        (torch.ops._c10d_functional.all_reduce.default, "cpu", True),
        (torch.ops._c10d_functional.wait_tensor.default, "cpu", True),
        (torch.ops.aten.cumsum.default, "cuda", True),
        (torch.ops.aten.cumsum.default, "cpu", False),
        (torch.ops.aten.scatter.src, "cuda", True),
        (torch.ops.aten.scatter.value, "cuda", False),
        (torch.ops.aten.index_reduce.default, "cuda", True),
        (torch.ops.aten.median.dim, "cuda", True),
        (torch.ops.aten.mm.default, "cuda", False),
    ],
)
def test_collectives_and_sums_in_any_order_run_once(target, device, runs_once):
    node = torch.fx.Graph().call_function(target)
    assert nodes.is_random(node, torch.device(device)) is runs_once


def test_what_a_gpu_sums_in_any_order_is_named_as_by_pytorch():
    names = nodes._ORDER_DEPENDENT_ON_GPU.pattern.removeprefix(r"aten\.(").removesuffix(r")\b").replace("\\", "")
    for name in names.split("|"):
        assert str(attrgetter(name)(torch.ops.aten)).startswith("aten.")


@pytest.mark.parametrize(
    ("is_transposed", "is_fixed", "runs_once"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_transposed_convolutions_run_once_on_a_gpu_of_any_order(is_transposed, is_fixed, runs_once):
    x, weight = torch.zeros(1, 2, 4, 4), torch.zeros(2, 2, 3, 3)
    arguments = (x, weight, None, [1, 1], [0, 0], [1, 1], is_transposed, [0, 0], 1)
    torch.ops.aten.convolution.default(*arguments)
    node = torch.fx.Graph().call_function(torch.ops.aten.convolution.default, (None, None, *arguments[2:]))
    with torch.backends.cudnn.flags(deterministic=is_fixed):
        assert nodes.is_random(node, torch.device("cuda")) is runs_once
    assert not nodes.is_random(node, torch.device("cpu"))


def test_convolutions_timed_anew_may_take_another_algorithm():
    ops = {"aten.relu.default", str(torch.ops.aten.convolution.default)}
    assert not nodes.may_choose_anew(ops, torch.device("cuda"))
    with torch.backends.cudnn.flags(benchmark=True):
        assert nodes.may_choose_anew(ops, torch.device("cuda"))
        assert not nodes.may_choose_anew({"aten.relu.default"}, torch.device("cuda"))
        assert not nodes.may_choose_anew(ops, torch.device("cpu"))
