"""Models without transformers' layers whose sizes vary from step to step: pictures cut at random, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 64, 6
LARGEST_SIDE, LARGEST_GRAPH = 128, 900


class Loss:
    """What a model of transformers returns, as far as training needs it."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class _Checkpointing(nn.Module):
    """A model whose blocks may be called in torch.utils.checkpoint."""

    calls_twice = False

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Call each block in torch.utils.checkpoint from now on."""
        self.calls_twice, self._options = True, options

    def _call(self, block: Callable[..., Tensor], *values: Tensor) -> Tensor:
        return checkpoint(block, *values, **self._options) if self.calls_twice else block(*values)


def _convolutions(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Unet(_Checkpointing):
    """A UNet of three levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(_convolutions, (3, width, 2 * width), (width, 2 * width, 4 * width)))
        self.up = nn.ModuleList(map(_convolutions, (6 * width, 3 * width), (2 * width, width)))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Loss:
        """Compute a loss of pictures, shape (N, 3, H, W)."""
        first = self._call(self.down[0], pictures)
        second = self._call(self.down[1], F.max_pool2d(first, 2))
        x = self._call(self.down[2], F.max_pool2d(second, 2))
        for block, beside in zip(self.up, (second, first), strict=True):
            x = self._call(block, torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), beside], 1))
        return Loss(self.head(x).square().mean())


class _Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = self.message(torch.cat([x[edges[0]], x[edges[1]]], 1))
        got = torch.zeros_like(x).index_add(0, edges[1], sent)
        return self.norm(x + self.update(torch.cat([x, got], 1)))


class GraphNetwork(_Checkpointing):
    """A network of message passing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(_Messages() for _ in range(LAYERS))

    def forward(self, nodes: Tensor, edges: Tensor) -> Loss:
        """Compute a loss of a graph: nodes of shape (N, 8), edges of shape (2, E)."""
        x = self.embed(nodes)
        for layer in self.layers:
            x = self._call(layer, x, edges)
        return Loss(self.head(x).square().mean())


MODELS: dict[str, Callable[[], nn.Module]] = {"unet": Unet, "graph": GraphNetwork}


def batch_of(name: str, step: int | None) -> dict[str, Tensor]:
    """Make the batch of a step; the largest one that may come for None."""
    generator = torch.Generator().manual_seed(0 if step is None else step + 1)

    def draw(low: int, high: int) -> int:
        return high if step is None else int(torch.randint(low, high + 1, (1,), generator=generator))

    if name == "unet":
        height, width = (16 * draw(3, LARGEST_SIDE // 16) for _ in range(2))
        return {"pictures": torch.randn(4, 3, height, width, generator=generator)}
    count = draw(200, LARGEST_GRAPH)
    edges = torch.randint(0, count, (2, 4 * count + draw(0, count)), generator=generator)
    return {"nodes": torch.randn(count, 8, generator=generator), "edges": edges}
