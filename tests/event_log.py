"""What a planned model did in some forty training runs: how each step ran, its plans, captures and warnings.

    python -m tests.event_log                 run all, and say what differs from `event_log.json`
    python -m tests.event_log --write         keep what they do now as what is expected
    python -m tests.event_log gpt-50 gan      run some

A change of structure leaves the log as it is. A change of behaviour shows up in it as a few lines that a reviewer can
judge. Times are estimates, so that the log is the same on every machine; losses are compared with plain PyTorch's on
the same machine, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, Plan, hiremate, remove_hiremate, testing
from hiremate_lightning.records.schedule import Compute, Free
from hiremate_lightning.units import format_bytes
from tests.life import Net, batch
from tests.models import GPT, Model, ResNet, UNet, build_bert, build_vit

FILE = Path(__file__).with_name("event_log.json")
STEPS = 5
Record = dict[str, Any]


class Recorder:
    """Stands beside a training loop: plans its models, or leaves them plain, and notes what each step did.

    Attributes:
        losses: Bits of each loss, in order.
        steps: How each step of each model ran.
    """

    def __init__(self, is_planned: bool) -> None:
        self._is_planned, self._models = is_planned, dict[str, nn.Module]()
        self.losses, self.steps = list[str](), list[str]()

    def plan(self, model: nn.Module, budget: str | int, name: str = "", **options: Any) -> nn.Module:
        """Plan a model in the planned run."""
        if self._is_planned:
            hiremate(model, budget, **{"verbose": False, "on_infeasible": "warn", "time_limit_s": 60, **options})
            self._models[name] = model
        return model

    def loss(self, loss: Tensor) -> None:
        """Keep the bits of a loss."""
        self.losses.append(loss.detach().float().item().hex())

    def stepped(self, loss: Tensor) -> None:
        """Keep the loss of the step that has just had its backward, and note how it ran."""
        self.loss(loss)
        for name, model in self._models.items():
            view = testing.step_under_way(model)
            if view is not None:
                prefix = f"{name}: " if name else ""
                self.steps.append(f"{prefix}{'+'.join(map(str, view.signature)) or '-'} {', '.join(view.modes)}")

    def ended(self) -> Record:
        """End all models; return what they did."""
        found: Record = {"steps": _in_runs(self.steps), "plans": {}, "captured": {}}
        for name, model in self._models.items():
            testing.end_step(model)
            found["captured"][name] = testing.captured_count(model)
            found["plans"][name] = [
                f"{_digest(plan)}, {format_bytes(plan.unplanned_peak_bytes)} -> "
                f"{format_bytes(plan.planned_peak_bytes)} of {format_bytes(plan.budget_bytes)}, "
                f"{len(plan.schedule.recomputed(plan.graph))} operations again{_measured(plan)}"
                for plan in testing.plans(model)
            ]
        for model in self._models.values():
            remove_hiremate(model)  # for all that are planned together
        return found


def _digest(plan: Plan) -> str:
    """Return a short digest of what a plan runs: its operations in order, and what is freed after each."""
    schedule = plan.schedule
    lines = []
    for operation in (*schedule.forward, *schedule.backward):
        match operation:
            case Compute(node):
                op = plan.graph.nodes[node].op.replace("_unsafe_view", "view")  # one and the same before PyTorch 2.15
                lines.append(f"{node} {op}")
            case Free(tensor):
                lines.append(f"free {tensor}")
            case copying:
                lines.append(f"{type(copying).__name__} {copying.storage}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _measured(plan: Any) -> str:
    """Describe whether the measured peak is the predicted one, within a per cent."""
    peak = plan.measured.peak_bytes
    if peak is None:
        return ", not measured"
    is_near = abs(peak - plan.planned_peak_bytes) <= 0.01 * peak
    return ", measured as predicted" if is_near else ", measured otherwise than predicted"


def _in_runs(lines: Sequence[str]) -> list[str]:
    """Shorten equal lines in a row to one."""
    found = list[list[Any]]()
    for line in lines:
        if found and found[-1][0] == line:
            found[-1][1] += 1
        else:
            found.append([line, 1])
    return [f"{line} (x{count})" if count > 1 else line for line, count in found]


# -------------------------------------------------------------------- loops

Run = Callable[[Recorder], None]


def steps_of(
    model: nn.Module,
    recorder: Recorder,
    loss_of: Callable[[int], Tensor],
    seeds: Iterable[int] = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
    set_to_none: bool = True,
) -> None:
    """Take a step for each number, from which its loss is made."""
    optimizer = optimizer or adam(model)
    for seed in seeds:
        optimizer.zero_grad(set_to_none)
        loss = loss_of(seed)
        loss.backward()
        optimizer.step()
        recorder.stepped(loss)
        del loss


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters() if p.requires_grad], lr=1e-3)


def network(build: Callable[[], Model], budget: str, recorder: Recorder, **options: Any) -> None:
    """Train a network on batches of one size."""
    built = build()
    module = recorder.plan(built.module, budget, **options)
    steps_of(module, recorder, lambda seed: built.loss_of(module(*built.make_batch(seed))))


class Chain(Net):
    def __init__(self, depth: int = 4, width: int = 32, out: int | None = None) -> None:
        super().__init__(depth, width, out)


class Blocks(nn.Module):
    """Residual blocks on sequences, as transformers have them."""

    def __init__(self, depth: int = 4, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.1, self.training)
        return self.head(x)


rows = partial(batch, rows=512, width=32)


def tokens(seed: int, length: int, count: int = 8) -> Tensor:
    return torch.randint(64, (count, length), generator=torch.Generator().manual_seed(seed))


def chain(
    budget: str | int,
    recorder: Recorder,
    make: Callable[[], nn.Module] = Chain,
    shape: tuple[int, int] = (512, 32),
    steps: int = STEPS,
    **options: Any,
) -> None:
    """Train a chain, or another model of rows."""
    model = recorder.plan(make(), budget, **options)
    steps_of(model, recorder, lambda seed: squares(model, rows(seed, rows=shape[0], width=shape[1])), range(steps))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def lengths(budget: str | int, recorder: Recorder, order: Sequence[int], **options: Any) -> None:
    model = recorder.plan(Blocks(), budget, **options)
    steps_of(model, recorder, lambda seed: squares(model, tokens(seed, order[seed])), range(len(order)))


def accumulation(recorder: Recorder) -> None:
    """Two micro-batches for each update."""
    model = recorder.plan(Chain(), "60%")
    optimizer = adam(model)
    for index in range(6):
        for micro in range(2):
            loss = model(rows(2 * index + micro)).square().mean() / 2
            loss.backward()
            recorder.stepped(loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def gan(recorder: Recorder) -> None:
    """Two networks trained in turn, the second through the first."""
    maker = recorder.plan(Chain(), "70%", "maker")
    critic = recorder.plan(Chain(out=1), "70%", "critic")
    for_maker, for_critic = adam(maker), adam(critic)

    def loss_of_critic(seed: int) -> Tensor:
        return critic(rows(seed)).mean() - critic(maker(rows(100 + seed)).detach()).mean()

    for index in range(5):
        steps_of(critic, recorder, loss_of_critic, [index], for_critic)
        steps_of(maker, recorder, lambda seed: -critic(maker(rows(200 + seed))).mean(), [index], for_maker)


def retained(recorder: Recorder) -> None:
    """Two backwards through one graph."""
    model = recorder.plan(Chain(), "70%")
    optimizer = adam(model)
    for index in range(STEPS):
        optimizer.zero_grad()
        out = model(rows(index))
        out.square().mean().backward(retain_graph=True)
        loss = out.abs().mean()
        loss.backward()
        optimizer.step()
        recorder.stepped(loss)
        del loss, out


def waiting(recorder: Recorder) -> None:
    """The backward of each batch comes after the forward of the next one, as in pipelines."""
    model = recorder.plan(Chain(), "70%")
    optimizer, pending = adam(model), None
    for index in range(8):
        loss = model(rows(index)).square().mean()
        if pending is not None:
            pending.backward()
            optimizer.zero_grad()
        pending = loss
        recorder.stepped(loss)
        del loss


def twice_called(recorder: Recorder) -> None:
    """Two forwards and one backward, as contrastive losses have them."""
    model = recorder.plan(Chain(), "60%")
    steps_of(model, recorder, lambda seed: (model(rows(seed)) * model(rows(50 + seed))).mean())


class Broken(Chain):
    """Ends its captured graph in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[:8](x)
        torch._dynamo.graph_break()
        return self.head(self.body[8:](x))


def budgets(recorder: Recorder) -> None:
    """The budget changes while training goes on."""
    model = recorder.plan(Chain(), "90%")
    optimizer = adam(model)
    steps_of(model, recorder, lambda seed: squares(model, rows(seed)), range(4), optimizer)
    recorder.plan(model, "60%")
    steps_of(model, recorder, lambda seed: squares(model, rows(seed)), range(4, 8), optimizer)


def plain_optimizer(recorder: Recorder) -> None:
    """Gradients are kept between steps, and set to zero in place."""
    model = recorder.plan(Chain(), "60%")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    steps_of(model, recorder, lambda seed: squares(model, rows(seed)), optimizer=optimizer, set_to_none=False)


def half_frozen() -> nn.Module:
    """Make a chain whose first half is frozen."""
    model = Chain()
    model.body[:8].requires_grad_(False)
    return model


def half(recorder: Recorder) -> None:
    """Autocast to bfloat16, at a budget for which one plan is best with the kernels of many processors."""
    model = recorder.plan(Chain(), "50%")

    def loss_of(seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows(seed)).float().square().mean()

    steps_of(model, recorder, loss_of)


class Compiled(Chain):
    """Calls a function that its author compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._act = torch.compile(lambda x: torch.tanh(x) * x, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self._act(super().forward(x))


def evaluation(recorder: Recorder) -> None:
    """Evaluation comes between steps."""
    model = recorder.plan(Chain(), "60%")
    optimizer = adam(model)
    for index in range(STEPS):
        steps_of(model, recorder, lambda seed: squares(model, rows(seed)), [index], optimizer)
        model.eval()
        with torch.no_grad():
            recorder.loss(model(rows(900 + index)).square().mean())
        model.train()


def two_batch_sizes(recorder: Recorder) -> None:
    """The last batch of each epoch is smaller."""
    model = recorder.plan(Chain(), "60%")
    steps_of(model, recorder, lambda seed: squares(model, rows(seed, rows=512 if seed % 4 < 3 else 200)), range(12))


class Forces(nn.Module):
    """Gives the gradient of an energy with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


def gpt() -> Model:
    module = GPT(blocks=2, width=64, context=64)
    return _model(module, lambda generator: torch.randint(256, (4, 64), generator=generator))


def _model(module: nn.Module, draw: Callable[[torch.Generator], Tensor]) -> Model:
    def batch(seed: int) -> tuple[Tensor]:
        return (draw(torch.Generator().manual_seed(seed)),)

    return Model(module, batch, lambda output: output.float().square().mean())


def pictures(module: nn.Module, count: int, side: int) -> Model:
    return _model(module, lambda generator: torch.randn(count, 3, side, side, generator=generator))


NETWORKS: dict[str, Callable[[], Model]] = {
    "gpt": gpt,
    "unet": lambda: pictures(UNet(8, 2), 2, 48),
    "resnet": lambda: pictures(ResNet(4, (1, 1, 2, 1)), 4, 32),
    "bert": partial(build_bert, layers=4),
    "vit": partial(build_vit, depth=6),
}
MORE_LENGTHS = (32, 16, 32, 24, 8, 40, 32, 12, 36, 20, 40, 28, 32, 44)
RUNS: dict[str, Run] = {
    **{f"chain-{budget}": partial(chain, f"{budget}%") for budget in (100, 80, 60, 45)},
    **{f"{name}-{budget}": partial(network, NETWORKS[name], f"{budget}%") for name in NETWORKS for budget in (80, 50)},
    "gpt-hilp": partial(network, gpt, "60%", solver="hilp"),
    "gpt-checkmate": partial(network, gpt, "60%", solver="checkmate"),
    "gpt-none": partial(network, gpt, "100%", solver="none"),
    "lengths-share": partial(lengths, "60%", order=MORE_LENGTHS),
    "lengths-bytes": partial(lengths, 1_600_000, order=MORE_LENGTHS),
    "lengths-plenty": partial(lengths, 2**30, order=MORE_LENGTHS),
    "lengths-few-plans": partial(lengths, "60%", order=MORE_LENGTHS, max_plans=1),
    "lengths-named": partial(lengths, "60%", order=MORE_LENGTHS, sizes={"tokens": {1: (1, 44)}}),
    "many-steps": partial(chain, "60%", steps=12),
    "unverified": partial(chain, "60%", verify="off"),
    "accumulation": accumulation,
    "gan": gan,
    "retained": retained,
    "waiting": waiting,
    "twice-called": twice_called,
    "broken": partial(chain, "60%", make=Broken),
    "parts": partial(chain, "70%", target=["body"]),
    "budgets": budgets,
    "too-small": partial(chain, 1_100_000, make=partial(Chain, depth=2, width=64), shape=(2048, 64)),
    "plain-optimizer": plain_optimizer,
    "frozen": partial(chain, "70%", make=half_frozen),
    "half": half,
    "authors-compile": partial(chain, "70%", make=Compiled),
    "evaluation": evaluation,
    "two-batch-sizes": two_batch_sizes,
    "inner-gradient": partial(chain, "70%", make=Forces),
}


# -------------------------------------------------------------------- the log


def record(name: str) -> Record:
    """Make a run twice, plain and planned, and return what the planned one did."""
    logs, found, texts = [], Record(), list[str]()
    for is_planned in (False, True):
        torch.compiler.reset()
        recorder = Recorder(is_planned)
        torch.manual_seed(1)
        as_ever = testing.changed_thresholds(measures_times=False, worth_made_code=0.0, gives_back=True)
        with as_ever, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", HiRemateWarning)
            RUNS[name](recorder)
            found = recorder.ended()
        texts = [_sentence(str(w.message)) for w in caught if issubclass(w.category, HiRemateWarning)]
        logs.append((recorder.losses, torch.get_rng_state().tolist()))
    return {**found, "warnings": texts, "like_plain": logs[0] == logs[1]}


def _sentence(text: str) -> str:
    """Shorten a warning to its first sentence."""
    first = text.split("\n")[0].split(". ")[0]
    return first if len(first) <= 160 else f"{first[:160]}..."


def expected() -> dict[str, Record]:
    """Read what the runs are expected to do."""
    found: dict[str, Record] = json.loads(FILE.read_text())
    return found


def differences(found: Record, wanted: Record) -> Iterator[str]:
    """Describe what differs between two records."""
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            values = (json.dumps(record.get(key), indent=1) for record in (wanted, found))
            yield "{}: expected {}\nfound {}".format(key, *values)


def main() -> int:
    """Compare all runs with what is expected, or keep what they do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=[[], *RUNS], default=[], help="all, if none is named")
    parser.add_argument("--write", action="store_true", help="keep what they do as what is expected")
    options = parser.parse_args()
    log, differing = expected() if FILE.exists() else {}, 0
    for name in options.runs or RUNS:
        found = record(name)
        changes = list(differences(found, log.get(name, {})))
        differing += bool(changes)
        sys.stdout.write(f"{name}: {'as expected' if not changes else chr(10).join(['differs', *changes])}\n")
        sys.stdout.flush()
        log[name] = found
        if options.write:
            FILE.write_text(json.dumps({name: log[name] for name in RUNS if name in log}, indent=1) + "\n")
    return 0 if options.write else min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())
