"""What exists before a step, and whose optimizers change it."""

from __future__ import annotations

import torch
from torch import nn

from hiremate_lightning.measuring.resident import ResidentMemory


def test_an_optimizer_of_the_model_is_told_from_others():
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    memory = ResidentMemory(own)
    for _ in range(2):
        assert memory.stepped(torch.optim.SGD(own.parameters(), lr=0.1))
        assert not memory.stepped(torch.optim.SGD(other.parameters(), lr=0.1))


def test_an_optimizer_that_gets_parameters_of_the_model_later_is_seen():
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    memory, optimizer = ResidentMemory(own), torch.optim.SGD(other.parameters(), lr=0.1)
    assert not memory.stepped(optimizer)
    optimizer.add_param_group({"params": list(own.parameters())})
    assert memory.stepped(optimizer)
