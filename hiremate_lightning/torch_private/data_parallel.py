"""What DistributedDataParallel has to do with captured code: graphs end where buckets do, which keep their order.

Captured graphs end where buckets of gradients do, so that these are sent while the backward goes on. `DDPOptimizer`,
which Dynamo calls for that, refuses buckets that are smaller than the first one may be, which DistributedDataParallel
itself takes.

Buckets are filled anew after the first backward, in the order in which that made the gradients. Three processes or more
add up a gradient in an order that depends on its place in its bucket, and so does what PowerSGD makes of it. A captured
graph hands all of its gradients to autograd at once, which then takes them in an order of its own: so they are given
the order of eager PyTorch as long as buckets are to be filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.backends import distributed
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from .replacing import replaced

_FIRST = 2**64 - 1  # what autograd runs first has the highest number: what adds to `.grad` has this one


def smallest_buckets() -> AbstractContextManager[None]:
    """Split graphs by buckets of 1 MiB at least: DDPOptimizer fails on smaller ones (`bucket_cap_mb`)."""
    found = distributed.DDPOptimizer

    def split(bucket_bytes_cap: int, **options: Any) -> distributed.DDPOptimizer:
        return found(bucket_bytes_cap=max(bucket_bytes_cap, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES), **options)

    return replaced((distributed, "DDPOptimizer", split))


def fills_buckets() -> bool:
    """Whether a forward under DistributedDataParallel is under way whose backward may decide what buckets hold."""
    module: Any = DistributedDataParallel._active_ddp_module
    return module is not None and not getattr(module, "_has_rebuilt_buckets", True)


def put_in_order(leaves: Sequence[torch.Tensor]) -> None:
    """Make autograd add gradients to leaves in this order, before anything else, when it gets all of them at once."""
    for place, leaf in enumerate(leaves):
        node: Any = get_gradient_edge(leaf).node
        if hasattr(node, "_set_sequence_nr"):
            node._set_sequence_nr(_FIRST - place)
