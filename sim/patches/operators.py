"""Operators that ranks define with `torch.library`: each rank calls its own functions.

torch has one operator of each name in a process, and one function of each operator and dispatch key. The functions of
ranks may well use what is the rank's own: its number, its groups, its buffers. So torch gets one function of ours for
all ranks, which calls that of the rank; and what a rank removes is removed when no other rank has it any more.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._library import custom_ops, simple_registry
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

from hyper_parallel.core.common.errors import InvalidState
from sim.kernel.context import current_context
from sim.patches.locks import exchange
from sim.patches.rank import Host

__all__ = ["OPERATOR_PATCHES"]

_c: Any = torch._C
_COMPOSITES = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class _RankKernel(NamedTuple):
    library: _RankLibrary
    function: Callable[..., Any]
    with_keyset: bool


class _Shared(NamedTuple):
    """A registration with torch, and the libraries of ranks that asked for it."""

    real: Any
    libraries: list[_RankLibrary]
    schema: str


class _RankLibrary:
    """What a `torch.library.Library` of a rank registers with, in place of torch's own.

    Args:
        operators: Of all ranks.
        context: The rank.
        namespace: Of the library.
    """

    def __init__(self, operators: _Operators, context: Any, namespace: str) -> None:
        self.operators, self.context, self.namespace = operators, context, namespace
        self.registered: list[tuple[str, ...]] = []

    def begin(self) -> None:
        """Be the library of a namespace that only one library of a rank may be."""
        self._share("DEF", "", lambda real: None, kind="DEF")

    def define(self, schema: str, alias_analysis: str, tags: Any) -> Any:
        """Define an operator; other ranks may define the same."""
        parsed = str(_c.parse_schema(schema))
        name = parsed.partition("(")[0].removeprefix(f"{self.namespace}::")
        self._share("define", name, lambda real: real.define(schema, alias_analysis, tags), schema=parsed)
        self.operators.defined.add(self._full(name))
        self.operators.kernels.setdefault(self._full(name), {}).setdefault(self.context, {})
        return name

    def impl(self, name: Any, key: str, function: Callable[..., Any], with_keyset: bool = False) -> None:
        """Add the rank's function for a dispatch key; the last one counts."""
        full = self._full(name)
        call = self.operators.calling(full, key)
        of_rank = self.operators.kernels.setdefault(full, {}).setdefault(self.context, {})
        if not self.operators.has("impl", self.namespace, full, key):
            self.operators.note_prior(full, key)
        if self not in (kernel.library for kernel in of_rank.get(key, ())):
            self._share("impl", full, lambda real: real.impl(full, key, call, True), key, again=True)
        of_rank.setdefault(key, []).append(_RankKernel(self, function, with_keyset))

    def register_ad_inplace_or_view_fallback(self, name: str) -> None:
        """Let torch follow what the operator changes and what views it makes."""
        self._share("views", name, lambda real: real.register_ad_inplace_or_view_fallback(name))

    def reset(self) -> None:
        """Remove all of it, as the end of the `Library` does."""
        while self.registered:
            what = self.registered.pop()
            if what[0] == "impl":
                of_rank = self.operators.kernels.get(what[2], {}).get(self.context, {})
                of_rank[what[3]] = [kernel for kernel in of_rank.get(what[3], ()) if kernel.library is not self]
            self.operators.release(what, self)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"rank {self.context.rank} called {name} of a library of {self.namespace!r}, which is for a whole process\n"
            "  seen: simulated ranks share torch's operators\n  try: define and impl, which each rank has of its own"
        )

    def _full(self, name: str) -> str:
        return name if "::" in name else f"{self.namespace}::{name}"

    def _share(
        self, what: str, name: str, make: Callable[[Any], Any], key: str = "", *,
        kind: str = "FRAGMENT", schema: str = "", again: bool = False,
    ) -> None:  # fmt: skip
        asked = (what, self.namespace, name, key)
        shared = self.operators.shared.get(asked)
        if shared is not None and schema != shared.schema:
            first, hint = shared.libraries[0].context.rank, "the same schema on all ranks, or another name"
            refused = f"rank {self.context.rank} cannot define {self.namespace}::{schema}"
            blame = f"rank {first} has defined it as {self.namespace}::{shared.schema}"
            raise InvalidState(refused, blame, "seen: simulated ranks share torch's operators", hint)
        has_it = shared is not None and any(library.context is self.context for library in shared.libraries)
        if shared is None or (has_it and not again):  # then torch says that it is there already
            real = self.operators.make(kind, self.namespace, "", __file__, 0)
            make(real)
            shared = self.operators.shared[asked] = _Shared(real, [], schema)
        shared.libraries.append(self)
        self.registered.append(asked)


class _Operators:
    """What the ranks of a world have registered.

    Args:
        make: torch's function that makes a library.

    Attributes:
        shared: By what it is, the namespace, the name and the dispatch key.
        kernels: Functions by operator, rank and dispatch key.
        defined: Operators that ranks have made, beside torch's for which they have functions.
        had: Operators and dispatch keys that had a function before any rank's.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.shared: dict[tuple[str, ...], _Shared] = {}
        self.kernels: dict[str, dict[Any, dict[str, list[_RankKernel]]]] = {}
        self.defined: set[str] = set()
        self.had: set[tuple[str, str]] = set()
        self._prior: dict[tuple[str, str], Any] = {}

    def library(self, kind: str, namespace: str, key: str, file: str, line: int) -> Any:
        """torch's own for what serves all ranks; else one of the rank."""
        context = current_context()
        if context is None or _is_of_all_ranks(context):
            return self.make(kind, namespace, key, file, line)
        library = _RankLibrary(self, context, namespace)
        if kind == "DEF":
            library.begin()
        return library

    def has(self, *what: str) -> bool:
        """Whether some rank has registered it."""
        return what in self.shared

    def note_prior(self, name: str, key: str) -> None:
        """Keep what torch calls for a device, for ranks without a function for it."""
        if _c._dispatch_has_kernel_for_dispatch_key(name, key):
            self.had.add((name, key))
        with suppress(RuntimeError):  # there is nothing, or it is no device's key
            if _c.DispatchKeySet(key).has(_c.DispatchKey.Dense):
                self._prior[name, key] = _c._dispatch_get_computed_kernel_for_dispatch_key(name, key)

    def release(self, what: tuple[str, ...], library: _RankLibrary) -> None:
        """Let a library not have it any more."""
        shared = self.shared.get(what)
        if shared is not None and library in shared.libraries:
            shared.libraries.remove(library)
            if not shared.libraries:
                del self.shared[what]
                _remove(what, shared)

    def end(self) -> None:
        """Remove everything."""
        for what, shared in reversed(list(self.shared.items())):
            _remove(what, shared)
        for each in (self.shared, self.kernels, self.defined, self.had, self._prior):
            each.clear()

    def calling(self, name: str, key: str) -> Callable[..., Any]:
        """The function that torch calls on all ranks."""

        @torch._disable_dynamo
        def call(keyset: Any, *args: Any, **options: Any) -> Any:
            runtime = keyset.highestPriorityTypeId()
            is_device = _c.DispatchKeySet(runtime).has(_c.DispatchKey.Dense)
            kernel = self._find(name, (key, *(_COMPOSITES if is_device else ())))
            if kernel is not None and kernel.function is not torch.library.fallthrough_kernel:
                return kernel.function(*((keyset,) if kernel.with_keyset else ()), *args, **options)
            if not is_device:
                after = _c._dispatch_keyset_full_after(runtime)
                return torch._library.utils.lookup_op(name).redispatch(keyset & after, *args, **options)
            if (name, key) in self._prior:
                return self._prior[name, key].call_boxed(keyset, *args, **options)
            raise NotImplementedError(f"Could not run '{name}' with arguments from the '{key}' backend on this rank.")

        return call

    def has_kernel(self, original: Callable[[str, str], bool], name: str, key: str) -> bool:
        """Whether there is a function for a dispatch key, but for those of other ranks."""
        ranks = self.kernels.get(name, {})
        if current_context() is None or not any(own.get(key) for own in ranks.values()):
            return original(name, key)
        return (name, key) in self.had or self._find(name, (key,)) is not None

    def of_rank(self, library: Any) -> set[str]:
        """What a rank and the process have, as `torch.library` notes it so that nobody overrides it by mistake."""
        found = set(torch.library._impls)
        for name, ranks in self.kernels.items():
            for key, registered in ranks.get(_owner(library), {}).items():
                kinds = (key, "") if key == "CompositeImplicitAutograd" else (key,)
                found.update(f"{library.ns}/{name.partition('::')[2]}/{kind}" for kind in kinds if registered)
        return found

    def _find(self, name: str, keys: tuple[str, ...]) -> _RankKernel | None:
        """What the calling rank has for these, or the first one if only others have defined the operator."""
        ranks = self.kernels[name]
        own = ranks.get(current_context(), next(iter(ranks.values())) if name in self.defined else {})
        return next((own[key][-1] for key in keys if own.get(key)), None)


def _remove(what: tuple[str, ...], shared: _Shared) -> None:
    """Take a registration back, and what torch remembers of an operator."""
    shared.real.reset()
    kind, namespace, name, _ = what
    if kind == "define":
        packet, _, overload = name.partition(".")
        _SCHEMA_TO_SIGNATURE_CACHE.pop((f"{namespace}::{packet}", overload), None)
        known = getattr(torch.ops, namespace)
        found = vars(known).pop(packet, None)
        if packet in known._dir:
            known._dir.remove(packet)
        if found is not None:  # whoever still has it would crash the process by calling it
            for each in (found, *vars(found).values()):
                if isinstance(each, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
                    each._op = functools.partial(_gone, f"{namespace}::{packet}")


def _gone(name: str, *args: Any, **options: Any) -> Any:
    raise RuntimeError(f"no rank has the operator {name} any more: it ended with its library, or with the world")


def _is_of_all_ranks(context: Any) -> bool:
    """Whether a library is made by code of which ranks have one copy: an installed package, or a module's own lines."""
    frame: FrameType | None = sys._getframe(2)
    is_callers = True
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        if top not in ("torch", "functools", "contextlib"):
            is_own = context.modules.main is not None if name == "__main__" else name in context.modules.names
            is_shared = top in ("sim", "hyper_parallel") or _INSTALLED & {*Path(frame.f_code.co_filename).parts}
            if (is_callers and (is_own or is_shared)) or frame.f_code.co_name == "<module>":
                return not is_own
            is_callers = False
        frame = frame.f_back
    return False


_INSTALLED = frozenset({"site-packages", "dist-packages"})


class _ByRank(MutableMapping[str, Any]):
    """A dictionary of torch's by the names of operators, with what is a rank's beside what is the process's."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.own: dict[tuple[Any, str], Any] = {}

    def __getitem__(self, name: str) -> Any:
        own = self.own.get((current_context(), name))
        return self.real[name] if own is None else own

    def __setitem__(self, name: str, value: Any) -> None:
        context = _owner(getattr(value, "_lib", value))
        if context is None:
            self.real[name] = value
        else:
            self.own[context, name] = value

    def __delitem__(self, name: str) -> None:
        if self.own.pop((current_context(), name), None) is None:
            del self.real[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.real)

    def __len__(self) -> int:
        return len(self.real)


def _owner(library: Any) -> Any:
    """The rank whose library it is; None: it is for all."""
    registers_with = getattr(library, "m", None)
    return registers_with.context if isinstance(registers_with, _RankLibrary) else None


def _copied(holder: Any) -> Any:
    """A holder of registrations, to which more can be added."""
    new = copy.copy(holder)
    vars(new).update({name: copy.copy(value) for name, value in vars(holder).items()})
    return new


_LIMITS = (("recompile_limit", 8), ("accumulated_recompile_limit", 256))


class _Compiled(NamedTuple):
    """Whose compiled code it is, in the place of a setting by which torch.compile tells compilers apart."""

    dynamic: Any
    world: int
    rank: int


def _compilers(host: Host, operators: _Operators) -> tuple[list[tuple[Any, str, Any]], Callable[[], None]]:
    """Code that is compiled has a rank's backward in it: no other rank may run it. Also returns what to undo."""
    raised: dict[str, int] = {}

    def of_rank(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            context, config = current_context(), torch._dynamo.config
            if context is None or not operators.kernels:
                return
            self.dynamic = _Compiled(self.dynamic, host.number, context.rank)
            for name, limit in _LIMITS:  # of a process; each thread may have its own
                raised[name] = max(getattr(config, name), limit * host.network.world_size)
                setattr(config, name, raised[name])

        return init

    def undo() -> None:
        for name, limit in _LIMITS:
            if name in raised and getattr(torch._dynamo.config, name) == raised[name]:
                setattr(torch._dynamo.config, name, limit)

    kinds = (torch._TorchCompileWrapper, torch._TorchCompileInductorWrapper)
    return [(kind, "__init__", of_rank(kind.__init__)) for kind in kinds], undo


def _custom_operators(host: Host) -> Callable[[], None]:
    """Ranks that register the same operators do not get into each other's way, and each one's functions are its own."""
    library: Any = torch.library.Library
    operators = _Operators(_c._dispatch_library)
    entries = _ByRank(simple_registry.singleton._data)
    compilers, restore_limits = _compilers(host, operators)

    def with_own_entry(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(self: Any, name: str, *args: Any, **options: Any) -> Any:
            context, full = _owner(self), name if "::" in name else f"{self.ns}::{name}"
            if context is not None and (context, full) not in entries.own:
                there = entries.real.get(full) or simple_registry.SimpleOperatorEntry(full)
                new = entries.own[context, full] = copy.copy(there)
                kinds = {key: holder for key, holder in vars(new).items() if hasattr(holder, "register")}
                vars(new).update({key: _copied(holder) for key, holder in kinds.items()})
            if "_stacklevel" in options:
                options["_stacklevel"] += 1
            return original(self, name, *args, **options)

        return register

    def impl(self: Any, *args: Any, **options: Any) -> None:
        if _owner(self) is None:
            library_impl(self, *args, **options)
            return
        process, torch.library._impls = torch.library._impls, operators.of_rank(self)
        try:
            library_impl(self, *args, **options)
        finally:
            torch.library._impls = process

    library_impl, has_kernel = library.impl, _c._dispatch_has_kernel_for_dispatch_key
    names = ("_register_fake", "_register_torch_dispatch_rule", "_register_effectful_op")
    restore = exchange(
        [
            (_c, "_dispatch_library", operators.library),
            (_c, "_dispatch_has_kernel_for_dispatch_key", functools.partial(operators.has_kernel, has_kernel)),
            (library, "impl", impl),
            (simple_registry.singleton, "_data", entries),
            (custom_ops, "OPDEFS", _ByRank(custom_ops.OPDEFS)),
            (custom_ops, "OPDEF_TO_LIB", _ByRank(custom_ops.OPDEF_TO_LIB)),
            *((library, name, with_own_entry(getattr(library, name))) for name in names if hasattr(library, name)),
            *compilers,
        ]
    )

    def undo() -> None:
        operators.end()
        restore()
        restore_limits()
        kept = torch.library._keep_alive
        kept[:] = [each for each in kept if _owner(each) is None]

    return undo


OPERATOR_PATCHES = (_custom_operators,)
"""What lets ranks define operators."""
