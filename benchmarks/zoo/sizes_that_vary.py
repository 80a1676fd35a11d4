"""Training whose sizes vary from step to step in more than one way.

Pictures cut at random; graphs; an encoder that a step calls with three columns of texts, each padded to its own length,
as sentence-transformers' losses do; the same from inside of a backward, in parts (GradCache); and texts with pictures
of any size (Qwen2-VL).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 64, 6
LARGEST_SIDE, LARGEST_GRAPH = 128, 900
WORDS, COLUMNS, PART = 1000, 3, 4  # a vocabulary; columns of texts; texts that are embedded at a time
PATCH, IMAGE = 4, 5  # pixels on a side of a patch; the word that stands for a patch


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


class _Encoder(nn.Module):
    """A BERT that gives each text one vector of length 1."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": WORDS}
        self.bert = BertModel(BertConfig(**sizes, num_hidden_layers=LAYERS), add_pooling_layer=False)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Embed words with their mask, each of shape (N, L)."""
        found = self.bert(input_ids=words, attention_mask=mask).last_hidden_state
        return F.normalize((found * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Columns(nn.Module):
    """An encoder that a loss calls once for each column: questions, their answers, and wrong ones.

    Args:
        is_cached: Whether the loss calls it in parts, from inside of the backward.
    """

    def __init__(self, is_cached: bool = False) -> None:
        super().__init__()
        self.encoder, self.is_cached = _Encoder(), is_cached

    def forward(self, **columns: Tensor) -> Loss:
        """Compute the loss of all pairs, from `words_0`, `mask_0` and so on."""
        given = [(columns[f"words_{i}"], columns[f"mask_{i}"]) for i in range(COLUMNS)]
        if not self.is_cached:
            return Loss(_of_all_pairs([self.encoder(*column) for column in given]))
        parts = [pair for words, mask in given for pair in zip(words.split(PART), mask.split(PART), strict=True)]
        start: Tensor = torch.zeros((), requires_grad=True)
        return Loss(_Cached.apply(self.encoder, parts, start))  # type: ignore[no-untyped-call]


def _of_all_pairs(columns: list[Tensor]) -> Tensor:
    questions, answers = columns[0], torch.cat(columns[1:])
    return F.cross_entropy(20 * questions @ answers.T, torch.arange(len(questions)))


class _Cached(torch.autograd.Function):
    """The loss of embeddings without gradients; its backward embeds part after part again, with gradients."""

    @staticmethod
    def forward(ctx: Any, encoder: nn.Module, parts: list[tuple[Tensor, Tensor]], start: Tensor) -> Tensor:
        found = [encoder(*part).requires_grad_() for part in parts]
        count = len(found) // COLUMNS
        with torch.enable_grad():
            loss = _of_all_pairs([torch.cat(found[i : i + count]) for i in range(0, len(found), count)])
            ctx.gradients = torch.autograd.grad(loss, found)
        ctx.encoder, ctx.parts = encoder, parts
        return loss.detach() + start

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for part, own in zip(ctx.parts, ctx.gradients, strict=True):
            with torch.enable_grad():
                found = ctx.encoder(*part)
            torch.autograd.backward(found, own * gradient)
        return None, None, torch.zeros(())


def _qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    text = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "rope_parameters": rope, **heads}
    vision = {"depth": 4, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH}
    config = Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_start_token_id=3)
    return Qwen2VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": Unet,
    "graph": GraphNetwork,
    "columns": Columns,
    "gradcache": lambda: Columns(is_cached=True),
    "qwen2_vl": _qwen2_vl,
}


def planned_part(model: nn.Module) -> nn.Module:
    """Return what is planned of a model: the encoder alone, where a loss calls it."""
    return model.encoder if isinstance(model, Columns) else model


def batch_of(name: str, step: int | None) -> dict[str, Tensor]:
    """Make the batch of a step; the largest one that may come for None."""
    generator = torch.Generator().manual_seed(0 if step is None else step + 1)

    def draw(low: int, high: int) -> int:
        return high if step is None else int(torch.randint(low, high + 1, (1,), generator=generator))

    if name == "unet":
        height, width = (16 * draw(3, LARGEST_SIDE // 16) for _ in range(2))
        return {"pictures": torch.randn(4, 3, height, width, generator=generator)}
    if name in ("columns", "gradcache"):
        return _columns(draw, 4 if name == "columns" else 16, generator)
    if name == "qwen2_vl":
        return _texts_with_pictures(draw, generator)
    count = draw(200, LARGEST_GRAPH)
    edges = torch.randint(0, count, (2, 4 * count + draw(0, count)), generator=generator)
    return {"nodes": torch.randn(count, 8, generator=generator), "edges": edges}


def _columns(draw: Callable[[int, int], int], rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    batch = {}
    for column, longest in enumerate((64, 200, 200)):
        lengths = torch.tensor([draw(longest // 8, longest) for _ in range(rows)])
        words = torch.randint(1, WORDS, (rows, int(lengths.max())), generator=generator)
        mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
        batch |= {f"words_{column}": words * mask, f"mask_{column}": mask}
    return batch


def _texts_with_pictures(draw: Callable[[int, int], int], generator: torch.Generator) -> dict[str, Tensor]:
    """Make two texts of a picture and some words each; a picture has 6 to 16 patches on each side."""
    grids = [[1, 2 * draw(3, 8), 2 * draw(3, 8)] for _ in range(2)]
    said = [torch.randint(10, WORDS, (draw(10, 40),), generator=generator).tolist() for _ in grids]
    texts = [[3, *[IMAGE] * (grid[1] * grid[2] // 4), 4, *words] for grid, words in zip(grids, said, strict=True)]
    length = max(map(len, texts))
    words = torch.tensor([[*text, *[7] * (length - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    patches = sum(height * width for _, height, width in grids)
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
        "pixel_values": torch.randn(patches, 3 * 2 * PATCH**2, generator=generator),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (words == IMAGE).int(),
    }
