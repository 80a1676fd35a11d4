"""The operations that fuzzed networks are made of.

Each entry of `OPERATIONS` looks at example values (rows x tokens x width, floating point) and at a setting, and gives a
module, or None where it does not apply. A module reads two values and token ids, and returns a tuple of values. Some
change what they read in place, return views, draw random numbers, update buffers, or break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WORDS = 20  # vocabulary of the token ids

Builder = Callable[[Tensor, Tensor, int, list["Operation"]], "Operation | None"]
OPERATIONS: dict[str, Builder] = {}


class Operation(nn.Module):
    """An operation made of a function of two values, token ids, and modules.

    Attributes:
        name: Its name in OPERATIONS.
    """

    def __init__(self, name: str, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.name = name
        self.function = function
        for key, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(key, member)
            else:
                setattr(self, key, member)

    def forward(self, a: Tensor, b: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        result = self.function(self, a, b, words)
        return result if isinstance(result, tuple) else (result,)


def operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that gives None, or a function of (operation, a, b, words) and its members."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        def build(a: Tensor, b: Tensor, setting: int, earlier: list[Operation]) -> Operation | None:
            made = make(a, b, setting, earlier)
            if made is None:
                return None
            function, members = made if isinstance(made, tuple) else (made, {})
            return Operation(name, function, **members)

        OPERATIONS[name] = build
        return make

    return register


def one_of(values: tuple[Any, ...], setting: int) -> Any:
    return values[setting % len(values)]


def same_shape(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape


# ---------------------------------------------------------------- layers


@operation("linear")
def _(a, b, setting, earlier):
    width = one_of((a.shape[-1], 8, 16, 12), setting)
    layer = nn.Linear(a.shape[-1], width, bias=setting < 4)
    return lambda self, a, b, words: self.layer(a), {"layer": layer}


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


@operation("convolution over tokens")
def _(a, b, setting, earlier):
    width = a.shape[-1]
    layer = nn.Conv1d(width, width, 3, padding=1, groups=one_of((1, 2), setting))
    return lambda self, a, b, words: self.layer(a.transpose(1, 2)).transpose(1, 2), {"layer": layer}


@operation("convolution of pictures")
def _(a, b, setting, earlier):
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 1))
    if setting % 2:
        layers = layers.to(memory_format=torch.channels_last)
    return lambda self, a, b, words: self.layers(a.unsqueeze(1)).squeeze(1), {"layers": layers}


@operation("batch norm")
def _(a, b, setting, earlier):
    width = a.shape[-1]
    layer = one_of(
        (
            lambda: nn.BatchNorm1d(width),
            lambda: nn.BatchNorm1d(width, momentum=None),
            lambda: nn.BatchNorm1d(width, track_running_stats=False),
            lambda: nn.BatchNorm1d(width, affine=False),
        ),
        setting,
    )()
    return lambda self, a, b, words: self.layer(a.transpose(1, 2)).transpose(1, 2), {"layer": layer}


@operation("frozen batch norm")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        return F.batch_norm(
            a.transpose(1, 2), self.layer.running_mean, self.layer.running_var, self.layer.weight, training=False
        ).transpose(1, 2)

    return run, {"layer": nn.BatchNorm1d(a.shape[-1])}


@operation("norm")
def _(a, b, setting, earlier):
    width = a.shape[-1]
    layer = one_of((nn.LayerNorm, nn.RMSNorm, lambda w: nn.LayerNorm(w, elementwise_affine=False)), setting)(width)
    return lambda self, a, b, words: self.layer(a), {"layer": layer}


@operation("group norm")
def _(a, b, setting, earlier):
    layer = nn.GroupNorm(2, a.shape[-1])
    return lambda self, a, b, words: self.layer(a.transpose(1, 2)).transpose(1, 2), {"layer": layer}


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


@operation("encoder layer of the library")
def _(a, b, setting, earlier):
    layer = nn.TransformerEncoderLayer(a.shape[-1], 2, 16, dropout=0.2, batch_first=True, norm_first=setting % 2 == 0)
    return lambda self, a, b, words: self.layer(a), {"layer": layer}


@operation("attention by hand")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        scores = torch.einsum("bic,bjc->bij", a, self.layer(a)) / a.shape[-1] ** 0.5
        mask = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool).tril()
        weights = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), 0.1, self.training)
        return weights @ a

    return run, {"layer": nn.Linear(a.shape[-1], a.shape[-1])}


@operation("normed weight")
def _(a, b, setting, earlier):
    wrap = one_of((parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal), setting)
    layer = wrap(nn.Linear(a.shape[-1], a.shape[-1]))
    return lambda self, a, b, words: self.layer(a), {"layer": layer}


@operation("recurrent")
def _(a, b, setting, earlier):
    layer = one_of((nn.GRU, nn.LSTM), setting)(a.shape[-1], a.shape[-1], batch_first=True)
    return lambda self, a, b, words: self.layer(a)[0], {"layer": layer}


# ---------------------------------------------------------------- activations


@operation("activation")
def _(a, b, setting, earlier):
    kinds = (F.gelu, F.relu, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.hardswish, F.softplus)
    function = one_of(kinds, setting)
    return lambda self, a, b, words: function(a)


@operation("activation in place")
def _(a, b, setting, earlier):
    function = one_of((F.relu, F.silu, F.leaky_relu, F.elu, F.hardtanh, F.relu6), setting)
    return lambda self, a, b, words: function(a, inplace=True)


@operation("gated activation")
def _(a, b, setting, earlier):
    return None if a.shape[-1] % 2 else lambda self, a, b, words: F.glu(a, dim=-1)


@operation("softmax")
def _(a, b, setting, earlier):
    dim = one_of((-1, 1, 0), setting)
    function = one_of((torch.softmax, torch.log_softmax), setting // 4)
    return lambda self, a, b, words: function(a, dim)


# ---------------------------------------------------------------- arithmetic of two values


@operation("skip")
def _(a, b, setting, earlier):
    function = one_of((torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2), setting)
    return (lambda self, a, b, words: function(a, b)) if same_shape(a, b) else None


@operation("where")
def _(a, b, setting, earlier):
    return (lambda self, a, b, words: torch.where(a > b, a, b * 0.5)) if same_shape(a, b) else None


@operation("concatenation")
def _(a, b, setting, earlier):
    if a.shape[1] != b.shape[1] or a.shape[-1] + b.shape[-1] > 48:
        return None
    return lambda self, a, b, words: torch.cat([a, b], dim=-1)


@operation("products of tokens")
def _(a, b, setting, earlier):
    return (lambda self, a, b, words: torch.bmm(a, b.transpose(1, 2)) @ b) if a.shape[-1] == b.shape[-1] else None


# ---------------------------------------------------------------- changes in place


@operation("sum in place")
def _(a, b, setting, earlier):
    if not same_shape(a, b):
        return None
    if setting % 2:
        return lambda self, a, b, words: (a * 1.5).add_(b)
    return lambda self, a, b, words: a.add_(b, alpha=0.5)


@operation("scale in place")
def _(a, b, setting, earlier):
    functions = (
        lambda self, a, b, words: a.mul_(0.5),
        lambda self, a, b, words: a.clamp_(-1, 1),
        lambda self, a, b, words: a[:, 0].mul_(2.0),
        lambda self, a, b, words: (a * 2).div_(3).tanh_(),
    )
    function = one_of(functions, setting)

    def run(self, a, b, words):
        function(self, a, b, words)
        return a

    return run if setting % 4 != 3 else function


@operation("write to a slice")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        made = a.clone() if setting % 2 else torch.zeros_like(a)
        made[:, ::2] = a[:, ::2] * 2
        made[..., 0] += 1.0
        return made

    return run


@operation("masked in place")
def _(a, b, setting, earlier):
    return lambda self, a, b, words: (a + 1).masked_fill_(a > 0.5, 0.0)


# ---------------------------------------------------------------- views and rearrangements


@operation("transpose")
def _(a, b, setting, earlier):
    return lambda self, a, b, words: a.transpose(1, 2)


@operation("slice")
def _(a, b, setting, earlier):
    half = a.shape[-1] // 2
    functions = (
        lambda self, a, b, words: a[..., :half],
        lambda self, a, b, words: a[..., ::2],
        lambda self, a, b, words: a.narrow(2, 1, half),
        lambda self, a, b, words: a[:, 1:],
    )
    return one_of(functions, setting) if half > 1 and half % 2 == 0 and a.shape[1] > 2 else None


@operation("chunk")
def _(a, b, setting, earlier):
    if a.shape[-1] % 4:
        return None
    if setting % 2:
        return lambda self, a, b, words: tuple(a.chunk(2, dim=-1))
    return lambda self, a, b, words: tuple(a.split([a.shape[-1] // 2] * 2, dim=-1))


@operation("unbind and stack")
def _(a, b, setting, earlier):
    return lambda self, a, b, words: torch.stack([t.sigmoid() for t in a.unbind(1)], dim=1)


@operation("fold tokens")
def _(a, b, setting, earlier):
    if a.shape[1] % 2:
        return None
    return lambda self, a, b, words: a.reshape(a.shape[0], a.shape[1] // 2, a.shape[2] * 2)


@operation("copy")
def _(a, b, setting, earlier):
    functions = (
        lambda self, a, b, words: a.contiguous(),
        lambda self, a, b, words: a.clone(),
        lambda self, a, b, words: a.transpose(1, 2).contiguous().transpose(1, 2),
        lambda self, a, b, words: a.detach(),
        lambda self, a, b, words: a,
        lambda self, a, b, words: a.double().float(),
        lambda self, a, b, words: a.view_as(a),
    )
    return one_of(functions, setting)


@operation("rearrange")
def _(a, b, setting, earlier):
    functions = (
        lambda self, a, b, words: a.flip(1),
        lambda self, a, b, words: a.roll(1, dims=2),
        lambda self, a, b, words: F.pad(a, (1, 1))[..., 1:-1],
        lambda self, a, b, words: a.cumsum(1),
        lambda self, a, b, words: a.index_select(1, torch.arange(a.shape[1] - 1, -1, -1)),
        lambda self, a, b, words: a.sort(dim=-1).values,
        lambda self, a, b, words: a.mean(1, keepdim=True).expand_as(a),
        lambda self, a, b, words: a.gather(1, (words[:, :1, None] % a.shape[1]).expand_as(a[:, :1])) + a,
    )
    return one_of(functions, setting)


@operation("pooling")
def _(a, b, setting, earlier):
    function = one_of((F.max_pool1d, F.avg_pool1d), setting)
    return lambda self, a, b, words: function(a, 3, stride=1, padding=1)


@operation("reduction")
def _(a, b, setting, earlier):
    functions = (
        lambda self, a, b, words: a - a.mean(dim=(0, 1)),
        lambda self, a, b, words: a / (a.norm() + 1.0),
        lambda self, a, b, words: a - a.logsumexp(-1, keepdim=True),
        lambda self, a, b, words: a * a.amax(1, keepdim=True),
        lambda self, a, b, words: a / (a.var(0, keepdim=True) + 1.0),
        lambda self, a, b, words: a - torch.topk(a, 2, dim=-1).values.sum(-1, keepdim=True),
    )
    return one_of(functions, setting)


# ---------------------------------------------------------------- random numbers


@operation("dropout")
def _(a, b, setting, earlier):
    kinds = (
        nn.Dropout(0.1),
        nn.Dropout(0.5),
        nn.Dropout(0.3, inplace=True),
        nn.Dropout1d(0.3),
        nn.AlphaDropout(0.2),
        nn.FeatureAlphaDropout(0.2),
        nn.Dropout(0.0),
        nn.Dropout(1.0),
    )
    return lambda self, a, b, words: self.layer(a), {"layer": one_of(kinds, setting)}


@operation("noise")
def _(a, b, setting, earlier):
    functions = (
        lambda self, a, b, words: a + 0.1 * torch.randn_like(a),
        lambda self, a, b, words: a * torch.bernoulli(torch.full((a.shape[0], 1, 1), 0.8)) / 0.8,
        lambda self, a, b, words: F.gumbel_softmax(a, tau=0.5, dim=-1),
        lambda self, a, b, words: F.gumbel_softmax(a, hard=True, dim=-1) + a,
        lambda self, a, b, words: F.rrelu(a, training=True),
        lambda self, a, b, words: a * (torch.rand(a.shape[1:]) > 0.2),
        lambda self, a, b, words: a[:, torch.randperm(a.shape[1])],
        lambda self, a, b, words: a + torch.normal(0.0, 0.1, a.shape) * torch.empty_like(a).uniform_(),
    )
    return one_of(functions, setting)


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


@operation("autograd function")
def _(a, b, setting, earlier):
    functions = (lambda self, a, b, words: Squash.apply(a, 1.25), lambda self, a, b, words: Round.apply(a))
    return one_of(functions, setting)


@torch.compiler.disable
def outside(a: Tensor) -> Tensor:
    """Code that can't be captured."""
    return a.sin() * 1.1


@operation("code between graphs")
def _(a, b, setting, earlier):
    return lambda self, a, b, words: outside(a)


@operation("branch on data")
def _(a, b, setting, earlier):
    return lambda self, a, b, words: a * 2 if a.sum() > 0 else a.cos()


@operation("without gradient")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        with torch.no_grad():
            scale = a.abs().amax(-1, keepdim=True)
        return a / (scale + 1)

    return run


@operation("half precision inside")
def _(a, b, setting, earlier):
    def run(self, a, b, words):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = F.dropout(F.gelu(self.layer(a)), 0.2 * (setting % 2), self.training)
        return made.float()

    return run, {"layer": nn.Linear(a.shape[-1], a.shape[-1])}
