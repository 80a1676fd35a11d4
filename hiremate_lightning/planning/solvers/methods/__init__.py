"""The methods of the papers, one file per paper: each proposes policies, and `search` replays and repairs them."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # importing a method registers it
