"""The methods of the papers, one file a paper: each proposes policies, and `search` carries them out."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # a method registers itself
