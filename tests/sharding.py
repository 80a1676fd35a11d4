"""Training scripts with FSDP2, with and without a plan, as each of two processes runs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.testing import session_of
from tests.exact import recorded
from tests.shared_memory import SharedMemory, collectives_through, communicate_through

STEPS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOO_SMALL = "too small for one rank"  # name of what two ranks with different budgets left


@dataclass(frozen=True)
class Case:
    name: str  # what is special about it
    model: Callable[[], nn.Module]  # makes the model, from the random state
    rows: int = 8  # rows of each batch
    length: int = 32  # in tokens
    reshard: bool = True  # whether blocks free their parameters after the forward
    bf16: bool = False  # whether parameters are gathered in bfloat16, and gradients reduced in float32
    group_head: bool = False  # whether norm and head are one unit
    mesh: tuple[int, ...] = (2,)  # shape of the mesh: replicas and shards
    when: str = "after"  # whether hiremate() comes "before" or "after" fully_shard()
    blocks: bool = False  # whether the blocks are named as targets
    budget: str = "60%"  # of the planned run
    micro: int = 1  # backwards for each step of the optimizer, of which only the last one reduces gradients
    keeps: bool = False  # whether the other backwards keep the parameters whole
    clips: bool = False  # gradients
    trains: str = ""  # part of the names of what is trained
    evaluates: bool = False  # whether the model is evaluated, and its state read, between steps
    # Whether the last dimension of the mesh is of parts of each block, with the same batch for all of them
    parts: bool = False
    sequence: bool = False  # whether the blocks get a part of each row
    gloo: bool = False  # whether collectives inside of blocks go through gloo, which frees their buffers unseen

    def __str__(self) -> str:
        return self.name


@dataclass
class Left:
    """What a training left on this rank."""

    losses: list[Tensor] = field(default_factory=list)  # of each backward
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # local gradients of each step
    weights: dict[str, Tensor] = field(default_factory=dict)  # local weights at the end
    peak_bytes: int = 0  # of the last step: that of the micro-batch that adds most to what was there before it
    plans: list[Plan] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)  # warnings of hiremate
    resident_bytes: int = 0  # of local weights and the optimizer's state
    evaluated: list[Tensor] = field(default_factory=list)  # what the model returned in evaluations
    planned_at: int | None = None  # the first step that began with a plan

    def close(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *plans: Plan | None) -> Left:
        """Note the weights, their bytes with those of an optimizer's state, and plans; return it all."""
        state = [
            v for s in (optimizer.state if optimizer else {}).values() for v in s.values() if isinstance(v, Tensor)
        ]
        self.weights = {name: local(p) for name, p in model.named_parameters()}
        self.resident_bytes = sum(local(t).nbytes for t in (*model.parameters(), *state))
        self.plans = [plan for plan in plans if plan is not None]
        return self


class Block(nn.Module):
    """A block as GPT has it, or with gates and root mean squares as Llama has it."""

    def __init__(self, width: int, gated: bool, dropout: float, wide: int) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=not gated) for _ in range(4))
        self.head_width = width // 4
        self.up, self.down = nn.Linear(width, wide * width), nn.Linear(wide * width, width)
        self.gate = nn.Linear(width, wide * width) if gated else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        query, key, value = (
            project(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(mixed))
        y = self.norm_2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.dropout(self.down(hidden))


class Broken(Block):
    """A block whose graph breaks inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Language(nn.Module):
    """A language model, whose blocks may run twice."""

    _tp_plan = {  # noqa: RUF012
        **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up", "gate")},
        **{f"blocks.*.{name}": "rowwise" for name in ("mix", "down")},
    }

    def __init__(
        self,
        blocks: int = 2,
        width: int = 32,
        gated: bool = False,
        tied: bool = False,
        dropout: float = 0.1,
        times: int = 1,
        kind: type[Block] = Block,
        words: int = 128,
        scores: bool = False,
    ) -> None:
        super().__init__()
        self.scores = scores  # whether it returns its loss, as models of transformers do
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(kind(width, gated, 0.0 if gated else dropout, 4) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.times = times
        self.split: DeviceMesh | None = None  # over which blocks get parts of each row
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        if self.split is not None:
            x = DTensor.from_local(x, self.split, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        if self.split is not None:
            x = DTensor.from_local(x, self.split, [Shard(1)]).full_tensor()
        logits = self.head(self.norm(x))
        return loss_of(logits, tokens) if self.scores else logits


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


gpt = partial(Language)
llama = partial(Language, gated=True)
wide = partial(Case, rows=2, length=16, budget="95%", bf16=True)
CASES = [
    Case("frozen embeddings, planned before it is sharded", gpt, when="before", trains="blocks"),
    Case("only norms trained, blocks named before it is sharded", gpt, blocks=True, when="before", trains="norm"),
    Case("Llama evaluated, gradients reduced once in two backwards", llama, evaluates=True, micro=2),
    Case("parameters whole for two backwards, in bfloat16", gpt, micro=2, keeps=True, bf16=True),
    Case("Llama in bfloat16, tied", partial(llama, tied=True), bf16=True),
    Case(
        "Llama that stays whole, norm and head as one unit", partial(llama, kind=Broken), reshard=False, group_head=True
    ),
    Case("blocks that run twice, on replicas, clipped", partial(gpt, times=2), blocks=True, mesh=(2, 1), clips=True),
    Case("parts of blocks, and of rows between them", llama, parts=True, blocks=True, gloo=True, sequence=True),
    wide(
        "weights that stay whole outweigh activations", partial(gpt, width=128, blocks=3), reshard=False, budget="98%"
    ),
]
SCORED = [
    Case("GPT", partial(gpt, scores=True)),
    wide("weights of a Llama outweigh activations", partial(llama, width=128, blocks=3, scores=True)),
    Case("Llama in parts", partial(llama, scores=True), parts=True),
    Case("one shard of parts of blocks", partial(llama, scores=True), parts=True, mesh=(1, 2)),
    Case("shards of blocks in one part", partial(gpt, scores=True), parts=True, mesh=(2, 1)),
]


def local(tensor: Tensor) -> Tensor:
    """Copy what this process has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def tokens(rank: int, index: int, case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + batch_of(case, rank))
    return torch.randint(128, (case.rows, case.length), generator=generator).to(DEVICE)


def batch_of(case: Case, rank: int) -> int:
    """Return the number of the batch that a rank gets: the same for all parts of a block."""
    return rank // case.mesh[-1] if case.parts else rank


def part(model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
    """Shard each block over the processes."""
    layout = Shard(1) if case.sequence else Replicate()
    plan = dict.fromkeys(("query", "key", "value", "up", "gate"), ColwiseParallel(input_layouts=layout))
    plan |= dict.fromkeys(("mix", "down"), RowwiseParallel(output_layouts=layout))
    if case.sequence:
        plan |= dict.fromkeys(("norm_1", "norm_2"), SequenceParallel())
        model.split = mesh
    for block in model.blocks:
        layers = {name: how for name, how in plan.items() if getattr(block, name) is not None}
        parallelize_module(block, mesh, layers, src_data_rank=None)  # weights are the same in all processes


def shard(model: nn.Module, case: Case, mesh: DeviceMesh, memory: SharedMemory) -> None:
    if case.parts:
        part(model, case, mesh["parts"])
        if len(case.mesh) == 1:
            return
        mesh = mesh["shards"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else MixedPrecisionPolicy()
    tied = model.head.weight is model.words.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    if case.group_head and not tied:
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    communicate_through(memory, model)


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.model().to(DEVICE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trains in name)
    return model


def train(case: Case, rank: int, memory: SharedMemory, planned: bool, steps: int = STEPS, **options: Any) -> Left:
    """Train a model, with or without a plan."""
    with nullcontext() if case.gloo else collectives_through(memory):
        return _train(case, rank, memory, planned, steps, options)


def _train(case: Case, rank: int, memory: SharedMemory, planned: bool, steps: int, options: dict[str, Any]) -> Left:
    left = Left()
    names = ("shards", "parts") if case.parts else ("replicas", "shards")
    mesh = init_device_mesh(DEVICE, case.mesh, mesh_dim_names=names[-len(case.mesh) :])
    model = make_model(case)
    target = [f"blocks.{i}" for i in range(len(model.blocks))] if case.blocks else None
    attach = partial(hiremate, model, case.budget, target=target, verbose=False, **options)
    with recorded() as left.warned:
        if planned and case.when == "before":
            attach()
        shard(model, case, mesh, memory)
        if planned and case.when == "after":
            attach()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
        for index in range(steps):
            step(model, optimizer, case, rank, index, left, is_last=index + 1 == steps)
            if planned and left.planned_at is None and session_of(model).plan is not None:
                left.planned_at = index
            if case.evaluates:
                evaluate(model, rank, case, left)
    return left.close(model, optimizer, *(session_of(model).plans.values() if planned else ()))


def step(model: nn.Module, optimizer: Any, case: Case, rank: int, index: int, left: Left, is_last: bool) -> None:
    for part in range(case.micro):
        number, is_end = index * case.micro + part, part + 1 == case.micro
        x = tokens(rank, number, case)
        torch.manual_seed(1000 + 10 * number + batch_of(case, rank))
        if case.micro > 1:
            model.set_requires_gradient_sync(is_end)
            model.set_reshard_after_backward(is_end or not case.keeps)

        def run(x: Tensor = x) -> None:
            result = model(x)
            loss = (loss_of(result, x) if result.dim() else result) / case.micro
            loss.backward()
            left.losses.append(loss.detach())

        if is_last:
            left.peak_bytes = max(left.peak_bytes, measure_peak(run, DEVICE))
        else:
            run()
    left.gradients.append({n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    if case.clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module, rank: int, case: Case, left: Left) -> None:
    """Call the model without gradients, and read its state."""
    model.eval()
    with torch.no_grad():
        left.evaluated.append(model(tokens(rank, 99, case)))
    model.train()
    left.evaluated += [local(value) for value in model.state_dict().values()]
