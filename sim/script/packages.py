"""Per-rank copies of installed packages that keep process state in classes or modules, e.g. accelerate.

Each rank imports its own copy. Modules that all ranks share may hold references to such a package, e.g. those of
transformers, or the file of a function given to `sim.run`. While a world is alive, a `Forwarder` replaces each
reference and resolves to the calling rank's copy.
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

# Their process state: FLAGS; PartialState; GlobalHydra; resolvers; rank_zero_only.rank; wandb.run.
PER_RANK = (
    *("absl", "accelerate", "hydra", "omegaconf", "lightning", "lightning_fabric", "lightning_utilities"),
    *("pytorch_lightning", "torchmetrics", "wandb"),
)
NEVER_PER_RANK = ("torch", "numpy", "hyper_parallel", "sim")  # compiled, or part of the simulator
_WITHOUT_REFERENCES = {*NEVER_PER_RANK, *sys.stdlib_module_names} - {"__main__"}


def check_own(own: Sequence[str], argument: str = "own") -> tuple[str, ...]:
    """Return the built-in per-rank packages and `own`; ValueError if a package of `own` cannot be copied."""
    names = [own] if isinstance(own, str) else list(own)
    better = "--own accelerate,hydra" if argument.startswith("-") else "own=['accelerate']"
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in (*NEVER_PER_RANK, *sys.stdlib_module_names):
            blame = f"{argument} takes names of packages as they are imported, but not {', '.join(NEVER_PER_RANK)}"
            raise InvalidValue(f"cannot give each rank a copy of {name!r}", blame, f"{argument}: {names!r}", better)
    return tuple(dict.fromkeys((*PER_RANK, *names)))


class Forwarder:
    """Proxy of an object of a package: the rank's copy on a rank, the original elsewhere.

    Args:
        module: Module of the package that defines it.
        name: Its name there; empty for the module itself.
        original: The object before the ranks began; None if a rank has imported the package first.
    """

    __slots__ = ("_forwarded",)

    def __init__(self, module: str, name: str, original: Any = None) -> None:
        object.__setattr__(self, "_forwarded", (module, name, original))

    def __getattr__(self, name: str) -> Any:
        return getattr(_target(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_target(self), name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the object behind the proxy."""
        return _target(self)(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle or copy the object behind the proxy by its name in the package, like the original."""
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
    """References of shared modules to objects of per-rank packages.

    Attributes:
        packages: Names of these packages.
    """

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)
        self.taken_out: dict[str, ModuleType] = {}
        self._replaced: list[Callable[[], None]] = []
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Take the packages out of `sys.modules`, and replace references to them by forwarders."""
        # `startswith` first, because thousands of modules are loaded. Parents come before their children.
        loaded = tuple(name for name in self.packages if name in sys.modules)
        near = [name for name in list(sys.modules) if name.startswith(loaded)] if loaded else []
        self.taken_out = {name: sys.modules[name] for name in near if self.covers(name)}
        for name in self.taken_out:
            del sys.modules[name]
        self.forward(self.taken_out, originals=True)

    def end(self) -> None:
        """Restore `sys.modules` and all references."""
        sys.modules.update(self.taken_out)
        while self._replaced:
            self._replaced.pop()()

    def covers(self, name: str) -> bool:
        """Return True if the module belongs to one of these packages."""
        return name.partition(".")[0] in self.packages

    def forward(self, own: Mapping[str, ModuleType], *, originals: bool = False) -> None:
        """Replace references to single ranks' copies in shared modules that were loaded since the last call.

        Args:
            own: Modules of the packages that the new modules may have imported, by name.
            originals: True if `own` are the process's modules from before the ranks began.
        """
        new = [name for name in list(sys.modules) if name not in self._seen] if own else []
        sources = self._by_identity(own) if new else {}
        for name in new:
            module = sys.modules.get(name)
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue  # it is still being imported
            self._seen.add(name)
            if isinstance(module, ModuleType) and name.partition(".")[0] not in _WITHOUT_REFERENCES:
                # Avoid a Python loop: each world checks all values of all modules, tens of thousands.
                if sources.keys().isdisjoint(map(id, list(vars(module).values()))):
                    continue
                for key, value in list(vars(module).items()):
                    if id(value) in sources:
                        self._exchange(vars(module).__setitem__, key, value, sources, originals)

    def forward_closure(self, fn: Callable[..., Any]) -> None:
        """Replace references in the closure of a function, as `forward` does in modules."""
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
            return False  # an except clause accepts no forwarder
        try:
            home = vars(value).get("__name__") if isinstance(value, ModuleType) else value.__module__
        except Exception:  # numbers and strings have no `__module__`
            return False
        return isinstance(home, str) and self.covers(home)

    def _by_identity(self, modules: Mapping[str, ModuleType]) -> dict[int, tuple[str, str]]:
        """Map the `id` of each object of the packages to its module and its name there."""
        found: dict[int, tuple[str, str]] = {}
        for name, module in modules.items():
            for key, value in vars(module).items():
                if not self._is_of_a_package(value):
                    continue
                if getattr(value, "__module__", None) == name:
                    found[id(value)] = (name, key)  # prefer the defining module to one that imports it
                else:
                    found.setdefault(id(value), (name, key))
        found.update({id(module): (name, "") for name, module in modules.items() if self._is_of_a_package(module)})
        return found
