"""Steps of sizes that were never traced run by programs made from traces of others: exact, and within the budget."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.networks import Block
from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.proofs.proof import Proof, ProofAtSizes
from hiremate_lightning.proofs.trials import TrialOutcome
from hiremate_lightning.running.program_at_sizes import ProgramAtSizes
from hiremate_lightning.testing import captured_count, is_eager, is_from_other_sizes
from tests.exact import Log, differing, leave_behind, network, planned_alike
from tests.faults import change_absences, overwriting_nothing

pytestmark = pytest.mark.usefixtures("made_code_at_once")

WORDS, WIDTH, HEADS, LAYERS, BATCH = 64, 32, 4, 2, 8
FIRST, LONG, SHORT = 90, 83, 40  # planned; does not fit as it is written; does
NEW = [88, 79, 85, 76]  # come after a first length that does not fit as it is written


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(128, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        scores = self.norm(x) @ self.words.weight.t()
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@dataclass
class Training:
    """A model in training, step by step."""

    model: nn.Module
    step_count: int = 0
    peak_bytes: int = 0  # of the latest step, beyond what existed before it

    def step(self, length: int) -> Log:
        """Take a step of SGD; return the loss and all gradients."""
        torch.manual_seed(self.step_count)
        words = torch.randint(WORDS, (BATCH, length))
        self.model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []

        def run() -> None:
            losses.append(self.model(words))
            losses[0].backward()

        self.peak_bytes = measure_peak(run)
        log = [losses[0].detach().clone(), *(weight.grad.clone() for weight in self.model.parameters())]
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= 0.01 * weight.grad
        self.step_count += 1
        return log


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def budget_of(length: int, share: float) -> tuple[int, int]:
    """Return a budget of which a plain step of a length takes more, and what of it a step may add."""
    training = Training(SmallGPT())
    training.step(length)
    training.step(length)
    weights = sum(weight.nbytes for weight in training.model.parameters())
    added_bytes = int(share * training.peak_bytes)
    return weights + BATCH * length * 8 + added_bytes, added_bytes


def trainings(
    share: float = 0.75, make: Callable[[], nn.Module] = SmallGPT, **options: object
) -> tuple[Training, Training, int]:
    """Return a plain model and one with a budget of a share of the first length, and the bytes that a step may add."""
    budget_bytes, added_bytes = budget_of(FIRST, share)
    plain = make()
    planned = hiremate(copy.deepcopy(plain), budget_bytes, **{"verbose": False, **options})
    return Training(plain), Training(planned), added_bytes


def train_alike(plain: Training, planned: Training, *lengths: int) -> None:
    """Take steps with both; fail where their logs differ."""
    for length in lengths:
        assert differing(planned.step(length), plain.step(length)) == []


@pytest.mark.filterwarnings("error")
def test_new_sizes_run_by_made_code_within_the_budget():
    """Lengths that do not fit as they are written, each of them once."""
    plain, planned, added_bytes = trainings()
    has_symbols_at_once = hasattr(torch.compiler.config, "dynamic_values")  # else from the next capture on
    train_alike(plain, planned, FIRST, FIRST, SHORT, *([] if has_symbols_at_once else [LONG + 1]))

    for index, length in enumerate([LONG, *NEW]):
        before = captured_count(planned.model)
        train_alike(plain, planned, length)
        assert is_from_other_sizes(planned.model)
        assert captured_count(planned.model) - before == (0 if index else 3)  # samples
        assert 0 < planned.peak_bytes <= added_bytes

    train_alike(plain, planned, SHORT)
    assert is_eager(planned.model)


@pytest.fixture(name="proved")
def _proved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths at which decisions are proved."""
    lengths, learn = list[int](), ProofAtSizes.learn

    def note(known: ProofAtSizes, proof: Proof, sizes: tuple[int, ...], without: set[frozenset[int]]) -> None:
        lengths.extend(sizes)
        learn(known, proof, sizes, without)

    monkeypatch.setattr(ProofAtSizes, "learn", note)
    return lengths


@pytest.mark.parametrize(("tells_nothing", "expected"), [(False, [40]), (True, [LONG, NEW[0]])], ids=["half", "itself"])
def test_decisions_are_proved_at_half_a_length_or_there(
    proved: list[int], monkeypatch: pytest.MonkeyPatch, tells_nothing: bool, expected: list[int]
):
    """At the length itself where the outcome at half of it has NaN: these equal each other."""
    if tells_nothing:
        monkeypatch.setattr(TrialOutcome, "has_nan", property(lambda _: True))
    plain, planned, _ = trainings()
    train_alike(plain, planned, FIRST, FIRST, SHORT, LONG, *NEW)
    assert is_from_other_sizes(planned.model)
    assert set(proved) <= set(expected)
    assert proved
    plan = get_plan(planned.model)
    graphs, gradients = re.fullmatch(r"forward (\d+) of \1 graphs, gradients (\d+) of \2", plan.proved).groups()
    assert int(graphs) == int(gradients) > len(NEW)


class Scaled(SmallGPT):
    """Scales its loss by a float that is made of the length: a constant in each trace."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * (1.0 / words.shape[1])


def test_code_that_can_not_be_made_is_traced():
    plain, planned, _ = trainings(make=Scaled)
    train_alike(plain, planned, FIRST, FIRST, SHORT, LONG, *NEW)
    assert not is_from_other_sizes(planned.model)


class Cache:
    """What was seen of a text so far, and how much that is."""

    def __init__(self) -> None:
        self.length, self.keys, self.values = 0, None, None


@network(
    lambda: {
        **{name: nn.Linear(64, 64, bias=False) for name in ("query", "key", "value")},
        "up": nn.Linear(64, 256),
        "down": nn.Linear(256, 64),
    }
)
def recalling(self, x: Tensor, cache: Cache) -> Tensor:
    """Attends to a part of a text and to all before it, whose length it knows twice: it counts for its mask."""
    layers = self.query, self.key, self.value
    query, keys, values = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
    if cache.keys is not None:
        keys, values = torch.cat([cache.keys, keys], 2), torch.cat([cache.values, values], 2)
    cache.keys, cache.values = keys, values
    mask = torch.arange(cache.length + x.shape[1]) <= cache.length + torch.arange(x.shape[1])[:, None]
    cache.length = cache.length + x.shape[1]
    y = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2).flatten(-2)
    return self.down(F.gelu(self.up(x + y)))


def recall(module: nn.Module) -> Log:
    """Train on texts of four parts; each part attends to those before it."""
    log: Log = []
    for index in range(5):
        cache, losses = Cache(), []
        for part in torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(index)).split(16, 1):
            losses.append(module(part, cache).square().mean())
        sum(losses).backward()
        log += [*(loss.detach() for loss in losses), *leave_behind(module)]
        module.zero_grad()
    return log


def test_samples_keep_sizes_equal_that_always_were(recwarn: pytest.WarningsRecorder):
    """Made-up keys are as long as made-up values, and as their mask: the kernel of attention does not check that."""
    torch.manual_seed(0)
    planned_alike(recalling(), recall, "70%", on_infeasible="warn")
    assert not [str(warning.message) for warning in recwarn if "can't be measured alone" in str(warning.message)]


def test_several_new_sizes_wait_for_their_backwards():
    """Two lengths in one step, by the same captured code: each backward runs at its own."""
    plain, planned, _ = trainings()
    train_alike(plain, planned, FIRST, FIRST, SHORT, LONG, *NEW[:2])
    assert is_from_other_sizes(planned.model)
    gradients = []
    for model in (plain.model, planned.model):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        losses = [model(torch.randint(WORDS, (BATCH, length))) for length in NEW[2:]]
        (losses[0] * 2 + losses[1]).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert is_from_other_sizes(planned.model)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_made_code_whose_proof_fails_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """Its programs are of other sizes than they are asked for: these are traced, and training stays exact."""
    at = ProgramAtSizes.at
    monkeypatch.setattr(ProgramAtSizes, "at", lambda self, sizes: at(self, tuple(size + 1 for size in sizes)))
    plain, planned, _ = trainings()
    for length in [FIRST, FIRST, SHORT, LONG, *NEW]:
        train_alike(plain, planned, length)
        assert not is_from_other_sizes(planned.model)


class Scoring(SmallGPT):
    """Returns more than its loss."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.norm(self.blocks[0](self.words(words) + self.places(torch.arange(words.shape[1]))))
        scores = x @ self.words.weight.t()
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten()), x


def trained(model: nn.Module, losses: Callable[[Tensor, Tensor], Tensor], length: int, seed: int) -> list[Tensor]:
    """Add the gradients of a loss to those that exist; return all."""
    torch.manual_seed(seed)
    losses(*model(torch.randint(WORDS, (BATCH, length)))).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.filterwarnings("error")
def test_gradients_need_not_arrive_at_new_sizes(monkeypatch: pytest.MonkeyPatch):
    """The backward finds out which do, where nothing can be traced: whatever samples differ in, it fails in none."""
    models = [Scoring()]
    models.append(copy.deepcopy(models[0]))
    both, first, second = (lambda a, b: a + b.mean()), (lambda a, b: a), (lambda a, b: b.square().mean())
    trained(models[0], both, FIRST, 0)
    weights_bytes = sum(weight.nbytes for weight in models[0].parameters())
    peak_bytes = measure_peak(lambda: trained(models[0], both, FIRST, 0))
    plain, planned = models[0], hiremate(models[1], weights_bytes + int(0.75 * peak_bytes), verbose=False)
    calls, count = itertools.count(), 0
    for seed, (length, loss) in enumerate(
        [(90, both), (90, both), (83, both), (88, both), (79, first), (85, second), (76, both), (81, first)]
    ):
        if seed == 5:
            change_absences(monkeypatch, overwriting_nothing(lambda captured: next(calls) % 2))
        for model in models:
            model.zero_grad(set_to_none=True)
        for again in range(1 + (seed > 5)):  # in the last ones gradients exist
            one, other = (trained(model, loss, length - again, seed) for model in (planned, plain))
            assert differing(one, other) == []
        count += is_from_other_sizes(planned)
    assert count >= 4
    assert next(calls) > 0


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def numbered(self, x: Tensor) -> Tensor:
    """Computes with a size as a number, for which Dynamo has no symbol then."""
    return self.linear(x) / len(str(x.shape[1])) * x.shape[1]


def test_code_whose_size_is_a_number_is_traced_once_a_size(planning_log):
    """All samples of such code would be of that size."""
    lengths = [6, 9, 12, 14, 11, 13]
    model = hiremate(numbered(), "1 MiB", verbose=False)
    for length in lengths:
        model(torch.randn(8, length, WIDTH)).sum().backward()
    assert captured_count(model) <= len(lengths)
    assert not any("Expected the same code" in text for text in planning_log.texts)
