"""Look for a GPU: `python -m gpu_parts.look` prints "cuda fork", "cuda spawn", or "cpu fork".

Whether a forked process can use the GPU shows only in one: where PyTorch had to start CUDA to find out that there is a
device, it can't, and each measurement has to import PyTorch for itself.
"""

from __future__ import annotations

import os
import sys

from . import preload  # noqa: F401  what the server imports, too

USABLE, NONE = 0, 3


def use_device() -> int:
    """Allocate on the device, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return NONE
    torch.ones(1, device="cuda").add_(1).item()
    return USABLE


def in_fork() -> int:
    """Use the device in a forked process; return how that ended."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(use_device())
        except BaseException:  # whatever CUDA says to a fork
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Look in a forked process first, since this one must not have used the device then."""
    found = in_fork()
    if found not in (USABLE, NONE):
        found = use_device()
        sys.stdout.write("cuda spawn" if found == USABLE else "cpu fork")
    else:
        sys.stdout.write("cuda fork" if found == USABLE else "cpu fork")


if __name__ == "__main__":
    main()
