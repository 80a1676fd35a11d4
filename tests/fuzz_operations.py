"""The operations that fuzzed networks are made of.

Each entry of `OPERATIONS` looks at example values (rows x tokens x width, floating point) and at a setting, and gives a
module, or None where it does not apply. A module reads two values and token ids, and returns a tuple of values. Some
change what they read in place, return views, draw random numbers, update buffers, or break the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.exact import network

WORDS = 20  # vocabulary of the token ids

Builder = Callable[[Tensor, Tensor, int, list[nn.Module]], nn.Module | None]
OPERATIONS: dict[str, Builder] = {}


@network(lambda name, function, **members: {"name": name, "function": function, **members})
def applied(self, a: Tensor, b: Tensor, words: Tensor) -> tuple[Tensor, ...]:
    """Applies a function of two values, token ids, and modules."""
    result = self.function(self, a, b, words)
    return result if isinstance(result, tuple) else (result,)


def operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that gives None, or a function of (operation, a, b, words) and its members."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        def build(a: Tensor, b: Tensor, setting: int, earlier: list[nn.Module]) -> nn.Module | None:
            made = make(a, b, setting, earlier)
            if made is None:
                return None
            function, members = made if isinstance(made, tuple) else (made, {})
            return applied(name, function, **members)

        OPERATIONS[name] = build
        return make

    return register


def one_of(values: tuple[Any, ...], setting: int) -> Any:
    return values[setting % len(values)]


def same_shape(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape


def layer(
    name: str, make: Callable[[int, int], nn.Module], apply: Callable[[Any, Tensor], Any] = lambda layer, a: layer(a)
) -> None:
    """Register a layer, made for a width and from a setting, and how it is applied to a value."""

    @operation(name)
    def _(a, b, setting, earlier):
        return lambda self, a, b, words: apply(self.layer, a), {"layer": make(a.shape[-1], setting)}


def chosen(
    name: str,
    *functions: Callable[[Tensor, Tensor, Tensor], Any],
    where: Callable[[Tensor, Tensor], bool] = lambda a, b: True,
) -> None:
    """Register functions of two values and token ids, of which a setting chooses one, where they apply."""

    @operation(name)
    def _(a, b, setting, earlier):
        function = one_of(functions, setting)
        return (lambda self, a, b, words: function(a, b, words)) if where(a, b) else None


def of_one(*functions: Callable[..., Any], **options: Any) -> list[Callable[[Tensor, Tensor, Tensor], Any]]:
    """Let functions of one value take two, and token ids."""
    return [lambda a, b, words, function=function: function(a, **options) for function in functions]


def of_two(*functions: Callable[[Tensor, Tensor], Any]) -> list[Callable[[Tensor, Tensor, Tensor], Any]]:
    """Let functions of two values take token ids, too."""
    return [lambda a, b, words, function=function: function(a, b) for function in functions]


# ---------------------------------------------------------------- layers


def over_tokens(layer: Any, a: Tensor) -> Tensor:
    """Apply a layer to the tokens of each feature."""
    return layer(a.transpose(1, 2)).transpose(1, 2)


layer("linear", lambda width, setting: nn.Linear(width, one_of((width, 8, 16, 12), setting), bias=setting < 4))


@operation("same layer again")
def _(a, b, setting, earlier):
    fitting = [e for e in earlier if e.name == "linear" and e.layer.in_features == a.shape[-1]]
    if not fitting:
        return None
    return lambda self, a, b, words: self.layer(a), {"layer": one_of(tuple(fitting), setting).layer}


@operation("tied weight")
def _(a, b, setting, earlier):
    fitting = [e for e in earlier if e.name == "linear" and e.layer.out_features == a.shape[-1]]
    if not fitting:
        return None
    return lambda self, a, b, words: F.linear(a, self.weight.t()), {"weight": fitting[0].layer.weight}


@operation("layer in a loop")
def _(a, b, setting, earlier):
    times = 2 + setting % 2

    def run(self, a, b, words):
        for _ in range(times):
            a = self.norm(torch.relu(self.layer(a)) + a)
        return a

    return run, {"layer": nn.Linear(a.shape[-1], a.shape[-1]), "norm": nn.LayerNorm(a.shape[-1])}


@operation("parameter used twice")
def _(a, b, setting, earlier):
    scale = nn.Parameter(torch.rand(a.shape[-1]))
    return lambda self, a, b, words: a * self.scale + self.scale.sigmoid(), {"scale": scale}


layer(
    "convolution over tokens",
    lambda width, setting: nn.Conv1d(width, width, 3, padding=1, groups=one_of((1, 2), setting)),
    over_tokens,
)


def convolutions(width: int, setting: int) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 1))
    return layers.to(memory_format=torch.channels_last) if setting % 2 else layers


layer("convolution of pictures", convolutions, lambda layer, a: layer(a.unsqueeze(1)).squeeze(1))
STATISTICS = {}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}
layer("batch norm", lambda width, setting: nn.BatchNorm1d(width, **one_of(STATISTICS, setting)), over_tokens)
layer(
    "frozen batch norm",
    lambda width, setting: nn.BatchNorm1d(width),
    lambda layer, a: F.batch_norm(
        a.transpose(1, 2), layer.running_mean, layer.running_var, layer.weight, training=False
    ).transpose(1, 2),
)
NORMS = nn.LayerNorm, nn.RMSNorm, lambda width: nn.LayerNorm(width, elementwise_affine=False)
layer("norm", lambda width, setting: one_of(NORMS, setting)(width))
layer("group norm", lambda width, setting: nn.GroupNorm(2, width), over_tokens)


@operation("embedding")
def _(a, b, setting, earlier):
    layer = nn.Embedding(WORDS, a.shape[-1], padding_idx=one_of((None, 0), setting))

    def run(self, a, b, words):
        wanted = self.layer(words)
        return a + (wanted if wanted.shape == a.shape else wanted[:, :1])

    return run, {"layer": layer}


@operation("attention")
def _(a, b, setting, earlier):
    width = a.shape[-1]
    probability, causal = one_of((0.0, 0.2), setting), setting >= 4

    def run(self, a, b, words):
        query, key, value = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.layer(a).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=causal)
        return mixed.transpose(1, 2).flatten(2)

    return None if width % 2 else (run, {"layer": nn.Linear(width, 3 * width)})


@operation("attention of the library")
def _(a, b, setting, earlier):
    layer = nn.MultiheadAttention(a.shape[-1], 2, dropout=one_of((0.0, 0.3), setting), batch_first=True)
    if setting >= 4:
        return lambda self, a, b, words: self.layer(a, a, a, need_weights=False)[0], {"layer": layer}
    return lambda self, a, b, words: self.layer(a, a, a)[0], {"layer": layer}


layer(
    "encoder layer of the library",
    lambda width, setting: nn.TransformerEncoderLayer(
        width, 2, 16, dropout=0.2, batch_first=True, norm_first=setting % 2 == 0
    ),
)


def attend_by_hand(layer: nn.Module, a: Tensor) -> Tensor:
    scores = torch.einsum("bic,bjc->bij", a, layer(a)) / a.shape[-1] ** 0.5
    mask = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool).tril()
    return F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), 0.1, layer.training) @ a


layer("attention by hand", lambda width, setting: nn.Linear(width, width), attend_by_hand)
WRAPPED = parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal
layer("normed weight", lambda width, setting: one_of(WRAPPED, setting)(nn.Linear(width, width)))
layer(
    "recurrent",
    lambda width, setting: one_of((nn.GRU, nn.LSTM), setting)(width, width, batch_first=True),
    lambda layer, a: layer(a)[0],
)

# ---------------------------------------------------------------- activations

chosen(
    "activation",
    *of_one(F.gelu, F.relu, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.hardswish, F.softplus),
)
chosen("activation in place", *of_one(F.relu, F.silu, F.leaky_relu, F.elu, F.hardtanh, F.relu6, inplace=True))
chosen("gated activation", *of_one(F.glu, dim=-1), where=lambda a, b: a.shape[-1] % 2 == 0)


@operation("softmax")
def _(a, b, setting, earlier):
    dim = one_of((-1, 1, 0), setting)
    function = one_of((torch.softmax, torch.log_softmax), setting // 4)
    return lambda self, a, b, words: function(a, dim)


# ---------------------------------------------------------------- arithmetic of two values

chosen("skip", *of_two(torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2), where=same_shape)
chosen("where", *of_two(lambda a, b: torch.where(a > b, a, b * 0.5)), where=same_shape)
chosen(
    "concatenation",
    *of_two(lambda a, b: torch.cat([a, b], dim=-1)),
    where=lambda a, b: a.shape[1] == b.shape[1] and a.shape[-1] + b.shape[-1] <= 48,
)
chosen(
    "products of tokens",
    *of_two(lambda a, b: torch.bmm(a, b.transpose(1, 2)) @ b),
    where=lambda a, b: a.shape[-1] == b.shape[-1],
)

# ---------------------------------------------------------------- changes in place

chosen(
    "sum in place",
    *of_two(lambda a, b: a.add_(b, alpha=0.5), lambda a, b: (a * 1.5).add_(b)),
    where=same_shape,
)


def double_the_first(a: Tensor) -> Tensor:
    a[:, 0].mul_(2.0)
    return a


chosen(
    "scale in place",
    *of_one(
        lambda a: a.mul_(0.5),
        lambda a: a.clamp_(-1, 1),
        double_the_first,
        lambda a: (a * 2).div_(3).tanh_(),
    ),
)


@operation("write to a slice")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        made = a.clone() if setting % 2 else torch.zeros_like(a)
        made[:, ::2] = a[:, ::2] * 2
        made[..., 0] += 1.0
        return made

    return run


chosen("masked in place", *of_one(lambda a: (a + 1).masked_fill_(a > 0.5, 0.0)))

# ---------------------------------------------------------------- views and rearrangements

chosen("transpose", *of_one(lambda a: a.transpose(1, 2)))
chosen(
    "slice",
    *of_one(
        lambda a: a[..., : a.shape[-1] // 2],
        lambda a: a[..., ::2],
        lambda a: a.narrow(2, 1, a.shape[-1] // 2),
        lambda a: a[:, 1:],
    ),
    where=lambda a, b: a.shape[-1] > 3 and a.shape[-1] // 2 % 2 == 0 and a.shape[1] > 2,
)
chosen(
    "chunk",
    *of_one(
        lambda a: tuple(a.split([a.shape[-1] // 2] * 2, dim=-1)),
        lambda a: tuple(a.chunk(2, dim=-1)),
    ),
    where=lambda a, b: a.shape[-1] % 4 == 0,
)
chosen("unbind and stack", *of_one(lambda a: torch.stack([t.sigmoid() for t in a.unbind(1)], dim=1)))
chosen(
    "fold tokens",
    *of_one(lambda a: a.reshape(a.shape[0], a.shape[1] // 2, a.shape[2] * 2)),
    where=lambda a, b: a.shape[1] % 2 == 0,
)
chosen(
    "copy",
    *of_one(
        lambda a: a.contiguous(),
        lambda a: a.clone(),
        lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
        lambda a: a.detach(),
        lambda a: a,
        lambda a: a.double().float(),
        lambda a: a.view_as(a),
    ),
)
chosen(
    "rearrange",
    *of_one(
        lambda a: a.flip(1),
        lambda a: a.roll(1, dims=2),
        lambda a: F.pad(a, (1, 1))[..., 1:-1],
        lambda a: a.cumsum(1),
        lambda a: a.index_select(1, torch.arange(a.shape[1] - 1, -1, -1)),
        lambda a: a.sort(dim=-1).values,
        lambda a: a.mean(1, keepdim=True).expand_as(a),
    ),
    lambda a, b, words: a.gather(1, (words[:, :1, None] % a.shape[1]).expand_as(a[:, :1])) + a,
)
chosen("pooling", *of_one(F.max_pool1d, F.avg_pool1d, kernel_size=3, stride=1, padding=1))
chosen(
    "reduction",
    *of_one(
        lambda a: a - a.mean(dim=(0, 1)),
        lambda a: a / (a.norm() + 1.0),
        lambda a: a - a.logsumexp(-1, keepdim=True),
        lambda a: a * a.amax(1, keepdim=True),
        lambda a: a / (a.var(0, keepdim=True) + 1.0),
        lambda a: a - torch.topk(a, 2, dim=-1).values.sum(-1, keepdim=True),
    ),
)

# ---------------------------------------------------------------- random numbers

DROPOUTS = (
    *(nn.Dropout(0.1), nn.Dropout(0.5), nn.Dropout(0.3, inplace=True), nn.Dropout1d(0.3)),
    *(nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Dropout(0.0), nn.Dropout(1.0)),
)
layer("dropout", lambda width, setting: copy.deepcopy(one_of(DROPOUTS, setting)))
chosen(
    "noise",
    *of_one(
        lambda a: a + 0.1 * torch.randn_like(a),
        lambda a: a * torch.bernoulli(torch.full((a.shape[0], 1, 1), 0.8)) / 0.8,
        lambda a: F.gumbel_softmax(a, tau=0.5, dim=-1),
        lambda a: F.gumbel_softmax(a, hard=True, dim=-1) + a,
        lambda a: F.rrelu(a, training=True),
        lambda a: a * (torch.rand(a.shape[1:]) > 0.2),
        lambda a: a[:, torch.randperm(a.shape[1])],
        lambda a: a + torch.normal(0.0, 0.1, a.shape) * torch.empty_like(a).uniform_(),
    ),
)

# ---------------------------------------------------------------- state


@operation("moving average")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        with torch.no_grad():
            self.average.mul_(0.9).add_(a.mean(dim=(0, 1)), alpha=0.1)
            self.count += 1
        return a - (self.average if setting % 2 else self.average.clone())

    return run, {"average": torch.zeros(a.shape[-1]), "count": torch.zeros((), dtype=torch.long)}


@operation("buffer replaced")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        self.last = a.detach().mean(0)
        return a + self.last

    return run, {"last": torch.zeros(a.shape[1:])}


# ---------------------------------------------------------------- Python and autograd


class Squash(torch.autograd.Function):
    """A function with its own backward, which saves its output, and scales gradients by more than calculus says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.scale, None


class Round(torch.autograd.Function):
    """A quantiser: gradients pass through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


chosen("autograd function", *of_one(lambda a: Squash.apply(a, 1.25), Round.apply))


@torch.compiler.disable
def outside(a: Tensor) -> Tensor:
    """Code that can't be captured."""
    return a.sin() * 1.1


def scaled_without_gradient(a: Tensor) -> Tensor:
    with torch.no_grad():
        scale = a.abs().amax(-1, keepdim=True)
    return a / (scale + 1)


chosen("code between graphs", *of_one(outside))
chosen("branch on data", *of_one(lambda a: a * 2 if a.sum() > 0 else a.cos()))
chosen("without gradient", *of_one(scaled_without_gradient))


@operation("half precision inside")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = F.dropout(F.gelu(self.layer(a)), 0.2 * (setting % 2), self.training)
        return made.float()

    return run, {"layer": nn.Linear(a.shape[-1], a.shape[-1])}
