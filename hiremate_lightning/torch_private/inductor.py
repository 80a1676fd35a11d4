"""Every private Inductor API that the project uses, and nothing else: a small graph in, one compiled function out.

Checked on the torch versions in `CHECKED_VERSIONS`; `test_fusion.py` fails loudly when one moves.
Inductor is loaded when it is first used: that takes a second, and warns of what PyTorch itself has deprecated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Compiled = Callable[[list[Any]], Sequence[torch.Tensor]]
_OPTIONS = {"fallback_random": True, "triton.cudagraphs": False, "freezing": False}


def compile_graph(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compile a graph of ATen operators that changes none of its inputs.

    Args:
        module: Takes tensors, returns a list of tensors.
        inputs: Tensors like those that it will be given: shapes, strides, types and devices count.

    Returns:
        A function that takes the inputs in a list.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        with config.patch(_OPTIONS), FakeTensorMode():
            fakes = [torch.empty_strided(i.shape, i.stride(), dtype=i.dtype, device=i.device) for i in inputs]
            traced = make_fx(module, select_decomp_table())(*fakes)
        returned = traced.graph.output_node()
        results: Any = returned.args[0]
        returned.meta["user_visible_output_idxs"] = list(range(len(results)))  # keeps the strides as traced
        with config.patch(_OPTIONS):
            compiled: Compiled = compile_fx_inner(traced, fakes, is_inference=True)
    return compiled
