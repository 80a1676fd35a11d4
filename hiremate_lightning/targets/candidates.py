"""The modules of a model that may be planned: the named ones, or all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from ..errors import ConfigurationError, did_you_mean
from ..torch_private import sharding

Target = str | Sequence[str] | None


class Candidates:
    """The modules of one model that may be planned.

    Args:
        root: The model.
        target: Paths of the modules to plan; None for all.

    Raises:
        ConfigurationError: If there is no module at a path.
    """

    def __init__(self, root: nn.Module, target: Target) -> None:
        self._root, self._target = root, target
        self.by_path()

    @property
    def are_all(self) -> bool:
        """Whether all modules of the model may be planned."""
        return self._target is None

    def by_path(self) -> dict[str, nn.Module]:
        """Return the modules that may be planned by path, with those added to the model since."""
        return dict(self._root.named_modules()) if self._target is None else _named(self._root, self._target)

    def holders(self) -> dict[str, nn.Module]:
        """Return the modules around the named ones, if fully_shard() may have sharded them: their calls begin the step.

        A sharded unit gathers its parameters before the first module in it is called.
        """
        if self._target is None or not sharding.may_shard():
            return {}
        paths, modules = [f"{name}." for name in self.by_path()], dict(self._root.named_modules())
        outer = (name for name in modules if any(path.startswith(f"{name}." if name else "") for path in paths))
        return {name: modules[name] for name in outer if f"{name}." not in paths}

    def refuse_others(self, asked: nn.Module, target: Target) -> None:
        """Raise a ConfigurationError if a second request, for the root or a part of it, names other modules."""
        if target is not None and set(_named(asked, target).values()) != set(self.by_path().values()):
            raise ConfigurationError(
                f"A model that is planned keeps its targets: expected target={self._target!r} as at first, found "
                f"{target!r}. Call remove_hiremate(model) first."
            )

    def has_others_than(self, module: nn.Module) -> bool:
        """Whether other modules with weights, outside of this one, may still be called and planned."""
        other_modules = [m for m in self.by_path().values() if m is not module and m is not self._root]
        inner = set(map(id, module.modules()))
        return any(has_weights(m) and id(m) not in inner for m in other_modules)


def has_weights(module: nn.Module, besides: Collection[int] = ()) -> bool:
    """Whether a module trains any parameters whose `id` is not in `besides`."""
    return any(p.requires_grad and id(p) not in besides for p in module.parameters())


def parts_with_weights(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with weights below a module, by path; `name` is the path of the module."""
    return {n: m for n, m in module.named_modules(prefix=name) if m is not module and has_weights(m)}


def _named(root: nn.Module, target: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules at some paths; the error for an unknown path names the nearest ones."""
    modules = dict(root.named_modules())
    names = [target] if isinstance(target, str | nn.Module) or not isinstance(target, Iterable) else [*target]
    for name in names:
        if not isinstance(name, str):
            raise ConfigurationError(
                "target takes paths of submodules, such as 'encoder' or ['encoder', 'decoder'], "
                f"found {type(name).__name__}."
            )
        if name not in modules:
            hint = did_you_mean(name, [m for m in modules if m])
            raise ConfigurationError(f"{type(root).__name__} has no submodule {name!r} to plan (target=).{hint}")
    return {name: modules[name] for name in names}
