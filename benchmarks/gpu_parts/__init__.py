"""The parts of `gpu_check.py`: each measures one thing on a GPU, in a process of its own.

No torch here: the command must answer at once, and watch the parts while torch is busy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: What `--parts` calls it.
        seconds: What it may take where time is short; its share of more.
        about: What it measures, in a sentence.
        module: Where its function `run` is.
    """

    name: str
    seconds: float
    about: str
    module: str


PARTS = (
    Part("environment", 20, "device, driver, versions, doctor; bandwidths and a matrix product's rate", "environment"),
    Part(
        "headline",
        150,
        "a Llama of 8B's shapes: ours beside checkpointing, selective checkpointing, Inductor",
        "headline",
    ),
    Part("three", 90, "GPT-2 medium, a diffusion UNet, ViT-L: ours beside checkpointing", "others"),
    Part("offload", 60, "copies beside what is computed; plans with values on the host, and without", "offload"),
    Part("truth", 80, "tests marked gpu; gradients of eight models bit for bit, autocast and float32", "truth"),
    Part("others", 60, "ResNet-50, BERT-large, T5-large: ours beside checkpointing", "others"),
    Part("budget", 60, "training inside a real memory limit at the budget, where plain training runs out", "limits"),
    Part("batch", 60, "the largest batch inside a real memory limit: plain search beside ours", "batches"),
    Part("host", 20, "small models, where the host's time counts: planned beside eager", "host"),
    Part(
        "allocator", 20, "predicted and measured peaks of ten graphs; cuDNN's algorithms and batch norms", "allocator"
    ),
)
