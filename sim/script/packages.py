"""Installed packages of which each rank has a copy, because they keep the state of a process in classes or modules.

A rank imports them for itself. Modules that all ranks share (those of transformers, or the file of a function given to
`sim.run`) may refer to what they have imported of such a package: while a world is alive, a `Forwarder` stands
there, which finds the calling rank's copy.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from hyper_parallel.core.common.errors import InvalidValue
from sim.kernel.context import current_context

# What each keeps for its process: FLAGS; PartialState; GlobalHydra; resolvers; rank_zero_only.rank; wandb.run.
PER_RANK = (
    *("absl", "accelerate", "hydra", "omegaconf", "lightning", "lightning_fabric", "lightning_utilities"),
    *("pytorch_lightning", "torchmetrics", "wandb"),
)
NEVER_PER_RANK = ("torch", "numpy", "hyper_parallel", "sim")  # compiled, or what runs the ranks
_WITHOUT_REFERENCES = {*NEVER_PER_RANK, *sys.stdlib_module_names} - {"__main__"}


def check_own(own: Sequence[str], argument: str = "own") -> tuple[str, ...]:
    """All packages of which each rank gets a copy: the built-in ones and these; ValueError if there can be no copy."""
    names = [own] if isinstance(own, str) else list(own)
    better = "--own accelerate,hydra" if argument.startswith("-") else "own=['accelerate']"
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in (*NEVER_PER_RANK, *sys.stdlib_module_names):
            blame = f"{argument} takes names of packages as they are imported, but not {', '.join(NEVER_PER_RANK)}"
            raise InvalidValue(f"cannot give each rank a copy of {name!r}", blame, f"{argument}: {names!r}", better)
    return tuple(dict.fromkeys((*PER_RANK, *names)))


class Forwarder:
    """Stands for something of a package: on a rank for what the rank's copy has, elsewhere for the original.

    Args:
        module: The module of the package that has it.
        name: Its name there; empty for the module itself.
        original: What it was before the ranks began; None if a rank has imported the package first.
    """

    __slots__ = ("_forwarded",)

    def __init__(self, module: str, name: str, original: Any = None) -> None:
        object.__setattr__(self, "_forwarded", (module, name, original))

    def __getattr__(self, name: str) -> Any:
        return getattr(_target(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_target(self), name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call what it stands for."""
        return _target(self)(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle, and copy, what it stands for: by its name in the package, like the original."""
        module, name, _ = object.__getattribute__(self, "_forwarded")
        return (operator.getitem, ((_target(self),), 0)) if name else (importlib.import_module, (module,))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _target(self))

    def __subclasscheck__(self, kind: Any) -> bool:
        return issubclass(kind, _target(self))

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (_target(self),)

    def __enter__(self) -> Any:
        return _target(self).__enter__()

    def __exit__(self, *error: Any) -> Any:
        return _target(self).__exit__(*error)


def _target(forwarder: Forwarder) -> Any:
    module, name, original = object.__getattribute__(forwarder, "_forwarded")
    if current_context() is None and original is not None:
        return original
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _forward(method: str) -> Callable[..., Any]:
    if hasattr(operator, method):
        return lambda self, *args: getattr(operator, method)(_target(self), *args)
    return lambda self, *args: getattr(_target(self), method)(*args)


for _method in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__eq__", "__ne__", "__or__"),
    *("__iter__", "__len__", "__bool__", "__hash__", "__repr__", "__str__", "__dir__", "__ror__"),
):
    setattr(Forwarder, _method, _forward(_method))


class SharedReferences:
    """What modules that ranks share refer to in packages of which each rank has a copy.

    Attributes:
        packages: The names of these packages.
    """

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)
        self.taken_out: dict[str, ModuleType] = {}
        self._replaced: list[Callable[[], None]] = []
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Take the packages out of `sys.modules`, and put forwarders where others refer to them."""
        # Thousands of modules are loaded, and hardly ever one of these packages. Parents come before their children.
        loaded = tuple(name for name in self.packages if name in sys.modules)
        near = [name for name in list(sys.modules) if name.startswith(loaded)] if loaded else []
        self.taken_out = {name: sys.modules[name] for name in near if self.covers(name)}
        for name in self.taken_out:
            del sys.modules[name]
        self.forward(self.taken_out, originals=True)

    def end(self) -> None:
        """Put everything back."""
        sys.modules.update(self.taken_out)
        while self._replaced:
            self._replaced.pop()()

    def covers(self, name: str) -> bool:
        """Whether a module is one of these packages'."""
        return name.partition(".")[0] in self.packages

    def forward(self, own: Mapping[str, ModuleType], *, originals: bool = False) -> None:
        """Let modules that came since the last call, and that all share, refer to no single rank's copies.

        Args:
            own: The modules of the packages that they may have imported, by name.
            originals: Whether these are the process's own, as they were before the ranks began.
        """
        new = [name for name in list(sys.modules) if name not in self._seen] if own else []
        sources = self._by_identity(own) if new else {}
        for name in new:
            module = sys.modules.get(name)
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue  # it is not through yet
            self._seen.add(name)
            if isinstance(module, ModuleType) and name.partition(".")[0] not in _WITHOUT_REFERENCES:
                # Every world looks at all that modules hold, tens of thousands of values: first without a Python loop.
                if sources.keys().isdisjoint(map(id, list(vars(module).values()))):
                    continue
                for key, value in list(vars(module).items()):
                    if id(value) in sources:
                        self._exchange(vars(module).__setitem__, key, value, sources, originals)

    def forward_closure(self, fn: Callable[..., Any]) -> None:
        """The same for what a function has from the function around it."""
        for cell in getattr(fn, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if self.taken_out and self._is_of_a_package(value):
                set_cell = partial(setattr, cell)
                self._exchange(set_cell, "cell_contents", value, self._by_identity(self.taken_out), True)

    def _exchange(
        self, put: Callable[[str, Any], None], key: str, value: Any, sources: dict[int, tuple[str, str]], original: bool
    ) -> None:
        if id(value) in sources:
            self._replaced.append(partial(put, key, value))
            put(key, Forwarder(*sources[id(value)], original=value if original else None))

    def _is_of_a_package(self, value: Any) -> bool:
        if issubclass(type(value), type) and issubclass(value, BaseException):
            return False  # Python accepts nothing else in an except clause
        try:
            home = vars(value).get("__name__") if isinstance(value, ModuleType) else value.__module__
        except Exception:  # numbers and texts have none
            return False
        return isinstance(home, str) and self.covers(home)

    def _by_identity(self, modules: Mapping[str, ModuleType]) -> dict[int, tuple[str, str]]:
        """Where everything of the packages is found, by its `id`: in which module, and under which name."""
        found: dict[int, tuple[str, str]] = {}
        for name, module in modules.items():
            for key, value in vars(module).items():
                if not self._is_of_a_package(value):
                    continue
                if getattr(value, "__module__", None) == name:
                    found[id(value)] = (name, key)  # where it is defined, rather than where it is imported
                else:
                    found.setdefault(id(value), (name, key))
        found.update({id(module): (name, "") for name, module in modules.items() if self._is_of_a_package(module)})
        return found
