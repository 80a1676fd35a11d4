"""Random operations and norms come back bit for bit, and the generator is left as plain training leaves it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hiremate_lightning.rewriting import replays
from hiremate_lightning.rewriting.kernels import eager_scale
from hiremate_lightning.rewriting.replays import DRAW_AGAIN, DRAW_MASK, NORMALIZE, again, generator_state
from tests.behaviour.exactness.test_execution import compiled, exact_by, held, keep_all, nothing_kept, results
from tests.exact import assert_same, network
from tests.tiny import recompute_lazily

ROWS, WIDTH, CHANNELS = 256, 16, 6
CPU = torch.device("cpu")


@network(lambda noise: {"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), "noise": noise})
def noisy(self, x: torch.Tensor) -> torch.Tensor:
    """Three layers, each followed by something random."""
    for layer in self.layers:
        x = torch.tanh(self.noise(layer(x)))
    return x


NOISES = {
    "dropout": nn.Dropout(0.3),
    "dropout of a transposed tensor": lambda x: F.dropout(x.t(), 0.1).t(),
    "dropout of a slice": lambda x: torch.cat([F.dropout(x[:, 3:9], 0.15), x[:, :3], x[:, 9:]], 1),
    "dropout of all": nn.Dropout(1.0),
    "dropout of none": nn.Dropout(0.0),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0],
    "Gaussian noise": lambda x: x * torch.randn_like(x),
    "stochastic depth": lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.8),
    "Gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "Bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "randomised leaky ReLU": lambda x: F.rrelu(x, training=True),
    "fractional pooling": lambda x: (
        F.fractional_max_pool2d(x.view(1, 16, 16, 16), 2, 8).repeat(1, 1, 2, 2).view(-1, WIDTH)
    ),
    "permutation": lambda x: x[torch.randperm(ROWS, device=x.device)],
}


def make(noise: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return noisy(NOISES[noise]), torch.randn(ROWS, WIDTH, requires_grad=True)


def ops_of(decide, graph) -> set[str]:
    return {graph.nodes[n].op for before in decide(graph) for n in before}


@pytest.mark.parametrize("noise", NOISES)
def test_what_was_drawn_is_drawn_again_bit_for_bit(noise):
    graph = exact_by(nothing_kept, partial(make, noise))
    if any(node.is_random for node in graph.nodes):
        assert ops_of(nothing_kept, graph) & {DRAW_MASK, DRAW_AGAIN}


@torch.library.custom_op("hiremate_tests::by_columns", mutates_args=())
def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


by_columns.register_fake(torch.empty_like)  # which says that the result lies by rows
by_columns.register_autograd(lambda _, gradient: gradient.clone())


def test_masks_are_drawn_again_in_the_order_of_a_kernel_s_memory():
    found = []
    for decide in (keep_all, nothing_kept):  # eager's products of such gradients are rounded otherwise
        torch.manual_seed(1)
        model, x = noisy(lambda x: F.dropout(by_columns(x), 0.3)), torch.randn(ROWS, WIDTH, requires_grad=True)
        call, conductor = compiled(model, decide)
        found.append(results(model, x, call))
    assert DRAW_MASK in ops_of(nothing_kept, conductor.runtimes[0].captured.graph)
    assert_same(*found)


def test_masks_need_no_memory_between_forward_and_backward():
    @network(lambda: {})
    def masked(self, x):
        for _ in range(8):
            x = F.dropout(x, 0.5)
        return x

    x = torch.randn(4096, 64, requires_grad=True)
    mask_bytes = x.numel()
    assert held(masked(), x, keep_all) - held(masked(), x, nothing_kept) > 5 * mask_bytes


def test_states_that_nobody_reads_are_not_taken():
    model, x = make("dropout")
    call, conductor = compiled(model, keep_all)
    results(model, x, call)
    program, _ = conductor.start(conductor.runtimes[0], ())
    tensors = conductor.runtimes[0].captured.graph.tensors
    assert not any("state" in tensors[saved].name for saved in program.schedule.saved)
    assert "_state" not in program.forward_module.code


def test_even_a_failing_draw_leaves_the_generator_alone():
    state = generator_state(CPU)
    first = torch.rand(5)
    before = generator_state(CPU)
    assert torch.equal(again(torch.rand)(state, CPU, 5), first)
    with pytest.raises(TypeError):
        again(torch.rand)(state, CPU, "five")
    assert torch.equal(generator_state(CPU), before)


def test_the_mask_of_a_dropout_of_all_is_saved():
    graph = exact_by(nothing_kept, partial(make, "dropout of all"))  # no kernel of ours stands in for it
    assert DRAW_MASK not in {node.op for node in graph.nodes}


def test_states_are_never_recomputed():
    graph = exact_by(nothing_kept, partial(make, "Gaussian noise"))
    random = {i for i, node in enumerate(graph.nodes) if node.is_random}
    assert random
    assert not random & {n for before in recompute_lazily(graph, ()) for n in before}


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("probability", [0.04, 0.1, 0.15, 0.47])
def test_the_scale_of_a_dropout_on_a_gpu_is_rounded_twice(probability, dtype, rounded):
    """Its kernel takes the probability to keep as a number of its own type, and divides by that."""
    source = torch.fx.Graph().placeholder("source")
    source.meta["val"] = torch.empty((), dtype=dtype, device="meta")
    keep = torch.tensor(1 - probability, dtype=rounded).double()
    assert eager_scale(source, probability) == (1 / keep).to(rounded).item()


# ---------------------------------------------------------------- norms


@network(
    lambda norm, space, prepare=lambda x: x: {
        "factors": nn.ParameterList(torch.randn(CHANNELS, *[1] * len(space)) for _ in range(3)),
        "norms": nn.ModuleList(norm() for _ in range(3)),
        "space": space,
        "prepare": prepare,
    }
)
def normed(self, x: torch.Tensor) -> torch.Tensor:
    """Three times a product, a norm and an activation."""
    x = self.prepare(x.view(-1, CHANNELS, *self.space))
    for factor, norm in zip(self.factors, self.norms, strict=True):
        x = torch.tanh(norm(x * factor))
    return x.float()


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


NORMS = {
    "rows": lambda: normed(lambda: nn.BatchNorm1d(CHANNELS), ()),
    "signals": lambda: normed(lambda: nn.BatchNorm1d(CHANNELS), (20,)),
    "pictures": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4)),
    "pictures, channels last": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), channels_last),
    "volumes": lambda: normed(lambda: nn.BatchNorm3d(CHANNELS), (5, 2, 2)),
    "volumes, channels last": lambda: normed(lambda: nn.BatchNorm3d(CHANNELS), (5, 2, 2), channels_last),
    "no weights": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS, affine=False), (5, 4)),
    "no running statistics": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (5, 4)),
    "large epsilon": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS, eps=0.5), (5, 4)),
    "instances": lambda: normed(lambda: nn.InstanceNorm2d(CHANNELS), (5, 4)),
    "instances with weights": lambda: normed(
        lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True), (5, 4)
    ),
    "double precision": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), torch.Tensor.double).double(),
    "half precision": lambda: normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), torch.Tensor.bfloat16).bfloat16(),
    "half precision, whole weights": lambda: normed(lambda: Bfloat16Norm(CHANNELS), (5, 4)),
}


class Bfloat16Norm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def make_normed(name: str, rows: int = 64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = NORMS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    return model, torch.randn(rows, CHANNELS * 20, requires_grad=True)


@pytest.mark.parametrize("name", NORMS)
def test_norms_come_back_from_their_statistics_bit_for_bit(name):
    graph = exact_by(nothing_kept, partial(make_normed, name))
    again = [graph.nodes[n].op for before in nothing_kept(graph) for n in before]
    assert again.count(NORMALIZE) == 3
    assert not any("batch_norm" in op for op in again)


def norms_replayed_in(model: nn.Module, x: torch.Tensor) -> int:
    call, conductor = compiled(model, keep_all)
    results(model, x, call)
    return sum(node.op == NORMALIZE for node in conductor.runtimes[0].captured.graph.nodes)


@pytest.mark.parametrize("rows", [2, 64])
def test_norms_of_few_rows_come_back_as_those_of_many(rows):
    assert norms_replayed_in(*make_normed("rows", rows)) == 3


def test_a_norm_of_evaluation_or_transposed_input_runs_again():
    model, x = make_normed("pictures")
    assert norms_replayed_in(model.eval(), x) == 0
    model = normed(lambda: nn.BatchNorm2d(CHANNELS), (5, 4), lambda x: x.transpose(2, 3))
    assert norms_replayed_in(model, x) == 2  # its own result is not transposed


@pytest.fixture
def _compared_anew():
    """Forget which kernels were found to agree, before and after."""
    replays._gives_the_same.cache_clear()
    yield
    replays._gives_the_same.cache_clear()


@pytest.mark.usefixtures("_compared_anew")
def test_kernels_that_round_otherwise_are_not_used(monkeypatch):
    def slightly_other(*arguments):
        return torch.nextafter(exact(*arguments), torch.tensor(torch.inf))

    exact = replays.normalize
    monkeypatch.setattr(replays, "normalize", slightly_other)
    model, x = make_normed("pictures")
    assert norms_replayed_in(model, x) == 0
