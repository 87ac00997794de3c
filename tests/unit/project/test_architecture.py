"""Rules of the design: arrows between parts, vendors, shared state, and the shape of folders, names and docstrings.

Every check reads syntax trees, and has a test in which a small offending source makes it fail. `house_debts.json` lists
by name what still breaks a rule of the house; it only gets shorter: what is mended must be taken off.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from run_keys import files_of_keys

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, its text, and what that parses to."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text, filename=path))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Import(NamedTuple):
    """A module that an import statement names; `inside` tells whether it stands in a function."""

    module: str
    line: int
    inside: bool


@cache
def sources(package: str) -> tuple[Source, ...]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no Python files under {package}/"
    return tuple(Source.of(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files)


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Return every import of a file, relative ones as absolute names, `from a import b` as both `a` and `a.b`."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield Import(base, node.lineno, inside)
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return (*walk(source.tree, inside=False), *_imported_by_name(source))


def _imported_by_name(source: Source) -> Iterator[Import]:
    """Yield what `importlib.import_module("...")` and `__import__("...")` name."""
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and _dotted(node.func).split(".")[-1] in ("import_module", "__import__")
        ):
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                yield Import(named.value, node.lineno, True)


def _dotted(node: ast.AST) -> str:
    """Return "a.b.c" for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def _is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def faults_of(check: str, sources_: Iterable[Source]) -> list[str]:
    return [fault for source in sources_ for fault in CHECKS[check](source)]


# 1. The library does not know its simulator


# The composition root: the commands. What they share (exit codes, consoles, options) is in the same folder, and needs
# no `sim`.
COMMAND_LINE = "hyper_parallel.cli"
WITHOUT_SIM = ("hyper_parallel.cli.kit", "hyper_parallel.cli.options")


def sim_imports(source: Source) -> Iterator[str]:
    for found in imports(source):
        if not _is_under(found.module, "sim"):
            continue
        if not _is_under(source.module, COMMAND_LINE) or source.module in WITHOUT_SIM:
            yield f"{source.path}:{found.line}: imports {found.module}; only commands in {COMMAND_LINE} may"
        elif not found.inside:
            yield f"{source.path}:{found.line}: imports {found.module} at import time; move it into the function"


# 2. Only hyper_parallel/platform/ knows vendors


def vendor_names(source: Source) -> Iterator[str]:
    if source.path.startswith("hyper_parallel/platform/"):
        return
    for found in imports(source):
        if any(_is_under(found.module, vendor) for vendor in ("torch.cuda", "torch.npu", "torch_npu")):
            yield f"{source.path}:{found.line}: imports {found.module}; ask hyper_parallel.platform"
    for node in ast.walk(source.tree):
        # The inner `torch.cuda` of `torch.cuda.Stream` is a node of its own, so equality finds every use once.
        if isinstance(node, ast.Attribute) and _dotted(node) in ("torch.cuda", "torch.npu"):
            yield f"{source.path}:{node.lineno}: uses {_dotted(node)}; ask hyper_parallel.platform"
        if isinstance(node, ast.Name) and node.id == "torch_npu":
            yield f"{source.path}:{node.lineno}: uses torch_npu; ask hyper_parallel.platform"


# 3. Arrows point one way

# What each part may import of the others, beyond itself and the leaves. `trainer -> shard, fully_shard, hsdp ->
# redistribute -> dtensor` means: anything to the right is fine, anything to the left is not.
_DTENSOR = ["core.dtensor"]
_REDISTRIBUTE = ["core.redistribute", *_DTENSOR]
_SHARDING = ["core.init", "core.shard", "core.fully_shard", *_REDISTRIBUTE]
_PARALLELISMS = ["core.context_parallel", "core.expert_parallel", "core.pipeline", "core.checkpoint", "core.optim"]
_PARALLELISMS += ["core.activations"]
LEAVES = ("platform", "core.common", "core.machine", "core.mesh")
MAY_IMPORT = {
    "core.common": [],
    "core.machine": [],
    "core.mesh": [],
    "platform": [],
    "core.dtensor": [],
    "core.redistribute": _DTENSOR,
    "core.init": _DTENSOR,
    "core.activations": [],
    "core.activation_checkpoint": [],
    "core.distributed_checkpoint": [],
    "core.utils": ["core.fully_shard"],
    "core.shard": ["core.init", *_REDISTRIBUTE],
    "core.fully_shard": _REDISTRIBUTE,
    "core.hsdp": ["core.fully_shard", *_REDISTRIBUTE],
    "core.optim": _REDISTRIBUTE,
    "core.context_parallel": _SHARDING,
    "core.expert_parallel": _SHARDING,
    "core.pipeline": _SHARDING,
    "core.checkpoint": ["core.hsdp", *_SHARDING],
    "models": ["core.hsdp", *_SHARDING, *_PARALLELISMS],
    "trainer": ["core.hsdp", *_SHARDING, *_PARALLELISMS, "models"],
}
# Tables of contents, and the composition root.
ROOT_MODULES = ("hyper_parallel", "hyper_parallel.core", "hyper_parallel.__main__", "hyper_parallel.pytest_plugin")


def part_of(module: str) -> str | None:
    """Return the part of the library that a module belongs to, None for what is outside or above all parts."""
    return next((part for part in MAY_IMPORT if _is_under(module, f"hyper_parallel.{part}")), None)


def arrows(source: Source) -> Iterator[str]:
    part = part_of(source.module)
    if part is None:
        is_root = source.module in ROOT_MODULES or _is_under(source.module, COMMAND_LINE)
        if source.path.startswith("hyper_parallel/") and not is_root:
            yield f"{source.path}: is in no part that the design knows; add it to MAY_IMPORT with its arrows"
        return
    for found in imports(source):
        target = part_of(found.module)
        if target is not None and target != part and target not in (*LEAVES, *MAY_IMPORT[part]):
            yield f"{source.path}:{found.line}: {part} imports {found.module}, against the arrows"
        if target is None and _is_under(found.module, "hyper_parallel") and not _is_harmless(found.module):
            yield f"{source.path}:{found.line}: {part} imports {found.module}, which stands above all parts"


def _is_harmless(module: str) -> bool:
    # `from hyper_parallel import platform` names `hyper_parallel` on its way; `__version__` is a constant.
    return module in ("hyper_parallel", "hyper_parallel.core") or module.endswith("__")


# 4. hypothesis is for tests


def hypothesis_imports(source: Source) -> Iterator[str]:
    if source.path == "sim/strategies.py":
        return
    for found in imports(source):
        if _is_under(found.module, "hypothesis"):
            yield f"{source.path}:{found.line}: imports {found.module}; only sim/strategies.py may"


# 5. Two ranks of one process share no mutable state

# fmt: off
_MUTABLE_CALLS = frozenset({
    "list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "ContextVar", "Stream",
    "Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "Condition", "Event", "Semaphore", "BoundedSemaphore",
    "Barrier",
})
# fmt: on
_MUTABLE_DOTTED = frozenset({"itertools.count", "itertools.cycle", "count", "cycle"})  # as methods these are harmless
_MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
# The registry of platforms is configuration of the process, guarded by a lock; the comment above it says why.
_EXEMPT = {
    ("hyper_parallel/platform/registry.py", "_REGISTRY"),
    ("hyper_parallel/core/mesh/device_mesh.py", "_AXES"),
    ("hyper_parallel/core/mesh/device_mesh.py", "_LOCK"),
    ("hyper_parallel/core/mesh/spmd_mesh.py", "_WORLD_MESHES"),
    ("hyper_parallel/core/mesh/spmd_mesh.py", "_LOCK"),
    ("hyper_parallel/core/fully_shard/schedule.py", "_SCHEDULES"),
    ("hyper_parallel/core/fully_shard/schedule.py", "_LOGS"),
    ("hyper_parallel/core/fully_shard/schedule.py", "_LOCK"),
    ("hyper_parallel/core/common/groups.py", "_GROUPS"),
    ("hyper_parallel/core/common/groups.py", "_LOCK"),
}


def mutable_state(source: Source) -> Iterator[str]:
    """Find lists, dicts, queues, locks and the like that a module or a class holds, and `global` statements."""
    own_classes = {node.name for node in source.tree.body if isinstance(node, ast.ClassDef) and _has_state(node)}
    for name, value, line, scope in _assignments(source.tree.body, "module"):
        if name != "__all__" and (source.path, name) not in _EXEMPT and (what := _mutable(value, own_classes)):
            yield f"{source.path}:{line}: {scope} state {name!r} is a {what}, shared by all ranks of a process"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: 'global {', '.join(node.names)}' is state shared by all ranks"


def _assignments(body: Sequence[ast.stmt], scope: str) -> Iterator[tuple[str, ast.expr, int, str]]:
    """Yield name and value of every assignment at module or class scope, under `if` and `try` as well."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield ast.unparse(target), node.value, node.lineno, scope
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            yield ast.unparse(node.target), node.value, node.lineno, scope
        elif isinstance(node, ast.ClassDef):
            yield from _assignments(node.body, f"class {node.name}")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _assignments(getattr(node, block, []), scope)
            for handler in getattr(node, "handlers", []):
                yield from _assignments(handler.body, scope)


def _mutable(value: ast.expr, own_classes: set[str]) -> str | None:
    """Say what is mutable in a value: itself, an entry of a tuple, a branch; None if nothing is."""
    if isinstance(value, _MUTABLE_LITERALS):
        return type(value).__name__.lower()
    if isinstance(value, ast.Tuple):
        return next((what for entry in value.elts if (what := _mutable(entry, own_classes))), None)
    if isinstance(value, ast.IfExp):
        return _mutable(value.body, own_classes) or _mutable(value.orelse, own_classes)
    if isinstance(value, ast.Call):
        called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        dotted = _dotted(called)
        name = dotted.split(".")[-1]
        # MappingProxyType({...}), frozenset([...]) and tuple([...]) seal what they are given; field(...) is per object.
        mutable = name in _MUTABLE_CALLS or dotted in _MUTABLE_DOTTED or name in own_classes
        return f"{name}()" if mutable else None
    return None


def _has_state(node: ast.ClassDef) -> bool:
    """Tell whether objects of a class can change: it fills them in `__init__`, or is a dataclass and not frozen."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if _dotted(call.func if call else decorator).split(".")[-1] == "dataclass":
            return not any(keyword.arg == "frozen" for keyword in (call.keywords if call else ()))
    return any(isinstance(child, ast.FunctionDef) and child.name == "__init__" for child in node.body)


# 6. Nothing is unpickled that a file or another process may have changed, nor is code of a folder run

_UNPICKLING = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
_MAY_PICKLE = {
    "sim/testing/processes.py": "arguments of living ranks",
    "hyper_parallel/platform/cpu.py": "flight recorder dumps; they are only written",
    "sim/late/module.py": "memory snapshots, which torch's viewer wants so; they are only written",
    "sim/timeline/export.py": "flight recorder dumps, which torch's analyser wants so; they are only written",
}


def pickles(source: Source) -> Iterator[str]:
    names = _UNPICKLING if source.path not in _MAY_PICKLE else ()
    for found in imports(source):
        if any(_is_under(found.module, name) for name in names):
            yield f"{source.path}:{found.line}: imports {found.module}; write JSON or safetensors"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        if called.endswith(("pickle.load", "pickle.loads", "pickle.Unpickler")):
            yield f"{source.path}:{node.lineno}: calls {called}"
        options = {option.arg: option.value for option in node.keywords}
        safe = options.get("weights_only")
        if called == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
            yield f"{source.path}:{node.lineno}: calls torch.load without weights_only=True"
        asks = options.get("trust_remote_code")
        never_asks = isinstance(asks, ast.Constant) and asks.value is False
        if isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained" and not never_asks:
            yield f"{source.path}:{node.lineno}: calls from_pretrained without trust_remote_code=False"
        if "allow_pickle" in options and ast.dump(options["allow_pickle"]) != ast.dump(ast.Constant(False)):
            yield f"{source.path}:{node.lineno}: calls {called} with allow_pickle"


# 7. The house. Each rule sees all files of the library and the simulator, and yields what breaks it, by a name that
# stays the same when lines move.

MOST_ROOMS = 12
MOST_LINES_OF_A_CLASS = 400
# Where the map draws more: a parameter's way from its wrapping to the optimizer is followed file by file there, and
# fifteen files with the public ones are what the map lists.
MOST_ROOMS_OF = {"hyper_parallel/core/fully_shard": 13}
QUESTIONS = ("What", "Which", "How", "Where", "Who", "Whose", "Whether", "When", "Why")
# Of each there is one: a sign by which each file that has one is known.
ONE_OF_EACH = {
    "Perfetto writer": re.compile(r"[\"']traceEvents[\"']: "),
    "drawer": re.compile(r"^\s*(?:from|import) matplotlib", re.MULTILINE),
    "training step": re.compile(r"^ +(?:self\.)?optimizer\.step\(\)$", re.MULTILINE),
    "memory estimate of a rank": re.compile(r"^class \w*MemoryEstimate\b", re.MULTILINE),
    "timeline": re.compile(r"^class \w*Timeline\b", re.MULTILINE),
}
FRAMEWORKS = re.compile(r"megatron|deepspeed|vtrain|maxtext|\bnemo\b|nemotron|torchtitan", re.IGNORECASE)
KERNEL, COMMUNICATION = "sim.kernel", "sim.comm"
# Leaves that both may import: the classes of errors, and how to find the lines of user code.
EXPLAINED = ("sim.explain.errors", "sim.explain.lines")
LEAF_FOLDERS = ("hyper_parallel.core.common", "hyper_parallel.core.mesh", "hyper_parallel.platform")
# What everybody asks of layouts: who holds what, and the path under which torch's DTensor is known.
LAYOUT_LEAVES = ("hyper_parallel/core/dtensor/ownership.py", "hyper_parallel/core/dtensor/dtensor.py")
LEAF_FROM = 4  # parts that import a module which itself imports nothing of the library


def full_rooms(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 1: a folder has at most twelve rooms beside its front door and re-exports, and a docstring with arrows."""
    folders: dict[str, list[Source]] = defaultdict(list)
    for source in all_sources:
        folders[source.path.rpartition("/")[0]].append(source)
    for folder, files in sorted(folders.items()):
        rooms = [file for file in files if not file.path.endswith(("/__init__.py", "/api.py")) and _defines(file)]
        if len(rooms) > MOST_ROOMS_OF.get(folder, MOST_ROOMS):
            yield f"{folder}: {len(rooms)} rooms"
        door = next((file for file in files if file.path.endswith("/__init__.py")), None)
        if len(rooms) > 2 and "->" not in ((door and ast.get_docstring(door.tree)) or ""):
            yield f"{folder}: no arrows in the docstring of its __init__.py"


def _defines(source: Source) -> bool:
    """Tell whether a file is more than a re-export: whether anything is defined in it."""
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in source.tree.body)


def circles(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 2: no circle of modules through any import; yields each module that is in one."""
    known = {source.module: source for source in all_sources}
    goes_to = {
        # A table of contents names everything, which is no arrow.
        name: set()
        if source.path.endswith("/__init__.py")
        else {i.module for i in imports(source)} & known.keys() - {name}
        for name, source in known.items()
    }
    for name in sorted(goes_to):
        seen, todo = set(), list(goes_to[name])
        while todo and name not in seen:
            step = todo.pop()
            if step not in seen:
                seen.add(step)
                todo.extend(goes_to[step])
        if name in seen:
            yield name


def private_imports(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 3, first half: a private name is not imported across files."""
    for source in all_sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.level or _is_ours(node.module or "")):
                for alias in node.names:
                    if alias.name.startswith("_") and not alias.name.startswith("__"):
                        yield f"{source.path}: {alias.name}"


def class_names(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 3, second half: a class name is used once per package."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source in all_sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                found[source.path.partition("/")[0], node.name].append(source.path)
    yield from (f"{name}: {' '.join(paths)}" for (_, name), paths in sorted(found.items()) if len(paths) > 1)


def one_of_each(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 4: of these things there is one."""
    for what, sign in ONE_OF_EACH.items():
        paths = [source.path for source in all_sources if _code_has(source, sign)]
        if len(paths) > 1:
            yield f"{what}: {' '.join(paths)}"


def _code_has(source: Source, sign: re.Pattern[str]) -> bool:
    """Tell whether a pattern is found outside comments and docstrings; writing all files anew would take seconds."""
    return bool(sign.search(source.text) and sign.search(_without_prose(source.text)))


@cache
def _without_prose(text: str) -> str:
    """Return a file as the parser writes it, without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def layers_of_sim(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 5: the kernel knows nothing of torch.distributed, communication knows the kernel only, neither the world."""
    for source in all_sources:
        kernel = _is_under(source.module, KERNEL)
        if not kernel and not _is_under(source.module, COMMUNICATION):
            continue
        below = (*EXPLAINED, KERNEL) if kernel else (*EXPLAINED, KERNEL, COMMUNICATION)
        named = {found.module for found in imports(source)}
        for module in sorted(named):
            inside = any(_is_under(module, part) for part in below) or module == "sim"
            name_of_another = module.rpartition(".")[0] in named
            above = _is_under(module, "sim") and not inside and not name_of_another
            if above or (kernel and module == "torch.distributed"):
                yield f"{source.path}: imports {module}"


def others_frameworks(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 6: what imitates other people's frameworks is no part of the wheel."""
    yield from (source.path for source in all_sources if _code_has(source, FRAMEWORKS))


def leaves_elsewhere(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 7: a module that many parts import, and which imports none of them, lies at the bottom."""
    users: dict[str, set[str]] = defaultdict(set)
    for source in all_sources:
        for found in imports(source):
            users[found.module].add(part_of(source.module) or source.module.split(".")[0])
    for source in all_sources:
        is_low = source.path in LAYOUT_LEAVES or any(_is_under(source.module, folder) for folder in LEAF_FOLDERS)
        if source.path.endswith("/__init__.py") or is_low:
            continue
        is_leaf = not any(_is_ours(found.module) for found in imports(source))
        if is_leaf and len(users[source.module]) >= LEAF_FROM:
            yield source.path


def docstrings_that_ask(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 8: a module's docstring is a noun phrase that names a thing."""
    for source in all_sources:
        first = (ast.get_docstring(source.tree) or "What").split()[0]
        if re.sub(r"\W.*", "", first) in QUESTIONS:
            yield source.path


def circles_of_folders(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 9: no circle of folders; yields each arrow between two folders that reach each other."""
    known = {source.module: source for source in all_sources}
    arrows_from: dict[str, set[str]] = defaultdict(set)
    for source in all_sources:
        if not source.path.endswith("/__init__.py"):
            for module in {found.module for found in imports(source)} & known.keys():
                if not known[module].path.endswith("/__init__.py"):
                    arrows_from[_folder(source)].add(_folder(known[module]))
    for start in sorted(arrows_from):
        for end in sorted(arrows_from[start] - {start}):
            if start in _reached(arrows_from, end):
                yield f"{start} -> {end}"


def _folder(source: Source) -> str:
    """Return `sim/x`, `hyper_parallel/x` or `hyper_parallel/core/x`, or the file itself where it is in none."""
    parts = source.path.split("/")
    return "/".join(parts[:3] if parts[1] == "core" and len(parts) > 3 else parts[:2])


def _reached(arrows_from: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        step = todo.pop()
        if step not in seen:
            seen.add(step)
            todo.extend(arrows_from.get(step, ()))
    return seen


def large_classes(all_sources: Sequence[Source]) -> Iterator[str]:
    """Rule 10: a class has at most 400 lines."""
    for source in all_sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_CLASS:
                yield f"{source.path}: {node.name}"


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("hyper_parallel", "sim")


HOUSE: dict[str, Callable[[Sequence[Source]], Iterator[str]]] = {
    "rooms": full_rooms,
    "circles": circles,
    "private imports": private_imports,
    "class names": class_names,
    "one of each": one_of_each,
    "layers of sim": layers_of_sim,
    "others' frameworks": others_frameworks,
    "leaves": leaves_elsewhere,
    "docstrings": docstrings_that_ask,
    "circles of folders": circles_of_folders,
    "large classes": large_classes,
}


# 8. Sizes and prose: figures with a bound each, in `house_debts.json` where they are above it today.

# Lines of Python below a folder, or of a file.
MOST_LINES = {
    "hyper_parallel": 40_000,
    "hyper_parallel/core/fully_shard": 6_300,
    "hyper_parallel/core/redistribute": 5_000,
    "hyper_parallel/core/shard": 3_400,
    "hyper_parallel/core/checkpoint": 3_000,
    "hyper_parallel/core/common": 1_000,
    "hyper_parallel/trainer": 4_700,
    "hyper_parallel/models": 3_500,
    "hyper_parallel/cli": 2_300,
    "sim": 38_000,
    "sim/prove": 7_000,
    "sim/mesh": 12_500,
    "sim/late": 3_000,
    "sim/script": 3_000,
    "benchmarks": 10_500,
    "tests": 76_000,
    "CHANGELOG.md": 200,
}
MOST_FILES_OF_A_KEY = 5
# Occurrences in 10,000 words of docstrings and comments: at most as many, twice what the field has.
MOST_WORDS = {
    "what": (r"\b[Ww]hat\b", 20),
    "told, tells, says, said": (r"\b([Tt]old|[Tt]ells?|[Ss]ays?|[Ss]aid)\b", 12),
    "goes, comes": (r"\b(goes|go|comes|come)\b", 15),
    "those that, that of, that which": (r"\b(that which|those that|those of|that of)\b", 3),
    "of which, of its own": (r"\b(of which|of (its|their) own)\b", 3),
    "nobody, somebody, whoever": (r"\b([Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever)\b", 1),
}


def figures() -> dict[str, tuple[int, int]]:
    """Return {name: (figure, bound)} of sizes, prose and files that name a key."""
    found = {name: (lines_of(ROOT / name), bound) for name, bound in MOST_LINES.items()}
    named = files_by_key(each for package in ("hyper_parallel", "sim", "benchmarks") for each in sources(package))
    found |= {name: (count, MOST_FILES_OF_A_KEY) for name, count in named.items()}
    for package in ("hyper_parallel", "sim"):
        prose = "\n".join(text for source in sources(package) for text in prose_of(source))
        found |= {f"{package}: {name}": (rate, MOST_WORDS[name][1]) for name, rate in rates_of(prose).items()}
    return found


def files_by_key(all_sources: Iterable[Source]) -> dict[str, int]:
    """Count the files that read or set each key of a run."""
    used = files_of_keys((source.path, source.module, source.tree) for source in all_sources)
    return {f"files that use {key}": len(paths) for key, paths in sorted(used.items())}


def lines_of(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(file.read_text().count("\n") for file in files)


def prose_of(source: Source) -> Iterator[str]:
    """Yield the docstrings and comments of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def rates_of(prose: str) -> dict[str, int]:
    """Return how often each of `MOST_WORDS` is found in 10,000 words."""
    words = max(len(re.findall(r"[A-Za-z']+", prose)), 1)
    return {name: round(10_000 * len(re.findall(pattern, prose)) / words) for name, (pattern, _) in MOST_WORDS.items()}


def owed(before: Mapping[str, int]) -> dict[str, int]:
    """Return the figures above their bounds, lines to the next ten; none is more than it was before."""
    now = {name: figure for name, (figure, bound) in figures().items() if figure > bound}
    rounded = {name: -(-figure // 10) * 10 if name in MOST_LINES else figure for name, figure in now.items()}
    return {name: min(figure, before.get(name, figure)) for name, figure in rounded.items()}


DEBTS = Path(__file__).with_name("house_debts.json")


CHECKS = {
    "pickles": pickles,
    "sim imports": sim_imports,
    "vendor names": vendor_names,
    "arrows": arrows,
    "hypothesis imports": hypothesis_imports,
    "mutable state": mutable_state,
}


# The library as it is


@pytest.mark.tier("test")
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_the_library_keeps(check: str) -> None:
    assert faults_of(check, sources("hyper_parallel")) == []


@pytest.mark.tier("full")
def test_the_simulator_keeps_hypothesis_in_one_file() -> None:
    assert faults_of("hypothesis imports", sources("sim")) == []


@pytest.mark.tier("test")
@pytest.mark.parametrize("package", ["hyper_parallel", "sim", "benchmarks", "examples"])
def test_nothing_is_unpickled(package: str) -> None:
    assert faults_of("pickles", sources(package)) == []


def test_who_may_pickle_does() -> None:
    for path in _MAY_PICKLE:
        assert "import pickle" in (ROOT / path).read_text(), f"{path} needs no exemption any more"


def test_the_exemption_is_real_and_says_why() -> None:
    for path, name in _EXEMPT:
        before, found, _ = (ROOT / path).read_text().partition(f"\n{name} = ")
        assert found, f"{name} is no longer in {path}: take it off the list of exemptions"
        comment = re.search(r"(?:^# .*\n?)+\Z", before, re.MULTILINE)
        assert comment, f"{name} in {path} needs a comment directly above it"
        assert "no\n# state of a rank" in comment[0] or "no state of a rank" in comment[0]
        assert "lock" in comment[0]


@pytest.mark.tier("test")
@pytest.mark.parametrize("rule", sorted(HOUSE))
def test_the_house_keeps(rule: str) -> None:
    """To see what is left, or take off what is mended: python tests/unit/project/test_architecture.py"""
    assert list(HOUSE[rule]([*sources("hyper_parallel"), *sources("sim")])) == json.loads(DEBTS.read_text()).get(
        rule, []
    )


@pytest.mark.tier("test")
def test_figures_stay_within_their_bounds_or_debts() -> None:
    """A figure above its bound only gets smaller. To lower the debts: python tests/unit/project/test_architecture.py"""
    debts = json.loads(DEBTS.read_text())["figures"]
    found = figures()
    assert all(row[0] for name, row in found.items() if name in MOST_LINES), "a folder with a bound is not there"
    over = {name: row for name, row in found.items() if row[0] > debts.get(name, row[1])}
    assert not over, "figure and bound; something has to go before something is added"
    assert not [name for name in debts if name not in found or debts[name] <= found[name][1]], (
        "take these off the debts"
    )


SECTION = "class ParallelConfig:\n    tp_chunks: int = 1\n    def halves(self): ..."
RUN = "class Config:\n    parallel: ParallelConfig\nclass Recipe(Config):\n    def having(self, **keys) -> Self: ..."


@pytest.mark.parametrize("text", [
    "def f(run: Config):\n    return run.parallel.tp_chunks",
    "def f(run):\n    return run.parallel.tp_chunks",
    "def f(parallel):\n    return parallel.tp_chunks",
    "def f(one: ParallelConfig | None):\n    return one.tp_chunks",
    "def f(runs: list[Recipe]):\n    return [(lambda: one.parallel)().tp_chunks for one in runs]",
    "class A:\n    def __init__(b, run: Config):\n        b.a = run.parallel\n    def f(b):\n        b.a.tp_chunks",
    "def f(run: Config):\n    x, y = run, run.parallel\n    with g(x), y as z:\n        return z.tp_chunks",
    "def f(run: Config):\n    return getattr(run.parallel, 'tp_chunks')",
    "def f(run: Config):\n    for key in ('tp_chunks',):\n        print(vars(run.parallel)[key])",
    "from operator import attrgetter\nf = attrgetter('parallel.tp_chunks')",
    "from a import ParallelConfig as P\nP(tp_chunks=2)",
    "def f(run: Recipe):\n    return run.having(tp_chunks=2)",
    "def f(run: Recipe, **keys):\n    return run.having(**keys)\nf(run, tp_chunks=2)",
    "def f(run: Recipe, keys: dict[str, int]):\n    return run.having(**keys)\nf(run, {'tp_chunks': 2})",
    "def f(run: Recipe, keys: dict[str, int]):\n    keys['tp_chunks'] = 2\n    return run.having(**keys)",
    "def f(run: Config):\n    return run.with_changes('parallel', {'tp_chunks': 2})",
    "import dataclasses\ndef f(run: Config):\n    return dataclasses.replace(run.parallel, tp_chunks=2)",
    "def f(run: Any):\n    return cast(Any, run.parallel).tp_chunks",
    "def g(run: Config) -> Any:\n    return run.parallel\ndef f(run: Config):\n    return g(run).tp_chunks",
    "def f(one: object):\n    match one:\n        case ParallelConfig(tp_chunks=2): ...",
])  # fmt: skip
def test_a_file_that_uses_a_key_is_counted(text: str) -> None:
    files = [Source.of(f"{name}.py", body) for name, body in (("a", f"{SECTION}\n{RUN}"), ("b", text))]
    assert files_by_key(files)["files that use parallel.tp_chunks"] == 2


@pytest.mark.parametrize("text", [
    "def f(plan: Plan):\n    return plan.tp_chunks",
    "def f(parallel: Mesh):\n    return parallel.tp_chunks",
    "def f(tp_chunks: int):\n    return g(tp_chunks=tp_chunks)",
    "def f(run: Config):\n    return run.parallel.halves(), 'tp_chunks'",
    "class Mesh:\n    tp_chunks: int\ndef f(dims: Mesh):\n    return dims.tp_chunks, Mesh(tp_chunks=2)",
    "def f(run: Config):\n    return g(run.parallel)",
])  # fmt: skip
def test_a_file_that_only_has_the_word_is_not_counted(text: str) -> None:
    files = [Source.of(f"{name}.py", body) for name, body in (("a", f"{SECTION}\n{RUN}"), ("b", text))]
    assert files_by_key(files)["files that use parallel.tp_chunks"] == 1


def test_a_key_above_its_bound_is_found() -> None:
    files = [Source.of(f"{name}.py", "run.parallel.tp_chunks") for name in "abcdef"]
    assert files_by_key(files)["files that use parallel.tp_chunks"] == 6 > MOST_FILES_OF_A_KEY


def test_figures_count_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_text("z = 3\n")
    assert (lines_of(tmp_path), lines_of(tmp_path / "a.py")) == (3, 2)
    source = Source.of("sim/a.py", '"""What it is."""\n\n\ndef f():\n    return "what"  # nobody\n')
    rates = rates_of("\n".join(prose_of(source)))
    assert (rates["what"], rates["nobody, somebody, whoever"], rates["goes, comes"]) == (2500, 2500, 0)


# Each check fails where it must, and only there


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        ("rooms", {f"sim/a/m{i}.py": "def f(): ..." for i in range(13)} | {"sim/a/__init__.py": '"""m0 -> m1."""'}),
        ("rooms", {f"sim/a/m{i}.py": "def f(): ..." for i in range(3)} | {"sim/a/__init__.py": '"""Rooms."""'}),
        (
            "circles",
            {"sim/a.py": "def f():\n    import sim.b", "sim/b.py": "if TYPE_CHECKING:\n    from sim.a import f"},
        ),
        ("private imports", {"sim/a.py": "from sim.b import _f"}),
        ("class names", {"sim/a.py": "class A: ...", "sim/b/c.py": "class A: ..."}),
        ("one of each", {"sim/a.py": "import matplotlib", "sim/b.py": "def f():\n    from matplotlib import figure"}),
        (
            "one of each",
            {
                "sim/a.py": "def f(self):\n    self.optimizer.step()",
                "hyper_parallel/b.py": "def g(optimizer):\n    optimizer.step()",
            },
        ),
        (
            "one of each",
            {"sim/a.py": "class MemoryEstimate: ...", "hyper_parallel/b.py": "class RankMemoryEstimate: ..."},
        ),
        ("one of each", {f"sim/{name}.py": 'def f():\n    return {"traceEvents": []}' for name in "ab"}),
        ("one of each", {f"{package}/a.py": "class MyTimeline: ..." for package in ("sim", "hyper_parallel")}),
        ("layers of sim", {"sim/kernel/scheduler.py": "def f():\n    import torch.distributed"}),
        ("layers of sim", {"sim/kernel/clock.py": "from sim.comm.group import Group"}),
        ("layers of sim", {"sim/comm/store.py": "if TYPE_CHECKING:\n    from sim.world import World"}),
        ("others' frameworks", {"sim/a.py": "def as_megatron(): ..."}),
        (
            "leaves",
            {"sim/a.py": "", **{f"hyper_parallel/{p}/a.py": "import sim.a" for p in ("models", "trainer", "platform")}}
            | {"hyper_parallel/core/shard/a.py": "import sim.a"},
        ),
        ("docstrings", {"sim/a.py": '"""What a thing is."""'}),
        ("docstrings", {"sim/a.py": ""}),
        ("circles of folders", {"sim/a/x.py": "import sim.b.y", "sim/b/y.py": "", "sim/b/z.py": "import sim.a.x"}),
        ("large classes", {"sim/a.py": "class A:\n" + "    x = 1\n" * 400}),
    ],
)
def test_a_break_of_the_house_is_found(rule: str, files: dict[str, str]) -> None:
    assert list(HOUSE[rule]([Source.of(path, text) for path, text in files.items()]))


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (
            "rooms",
            {f"sim/a/m{i}.py": "from b import c" for i in range(13)} | {"sim/a/api.py": "", "sim/a/__init__.py": ""},
        ),
        ("circles", {"sim/a.py": "import sim.b", "sim/b.py": "import torch"}),
        ("private imports", {"sim/a.py": "from sim.b import f\nfrom sim import __version__\nfrom torch import _C"}),
        (
            "class names",
            {"sim/a.py": "class A: ...", "hyper_parallel/c.py": "class A: ...", "sim/b.py": "class B: ..."},
        ),
        ("one of each", {"sim/a.py": "import matplotlib", "sim/b.py": "# import matplotlib\n'import matplotlib'"}),
        (
            "one of each",
            {
                "sim/a.py": "def f(optimizer):\n    '''Example:\n\n    optimizer.step()\n    '''",
                "sim/b.py": "def g(optimizer):\n    optimizer.step()",
            },
        ),
        ("others' frameworks", {"sim/a.py": "# Source: the paper on Megatron"}),
        (
            "layers of sim",
            {"sim/comm/group.py": "import torch.distributed\nfrom sim.kernel.scheduler import Scheduler"},
        ),
        ("leaves", {"sim/a.py": "", "hyper_parallel/models/a.py": "import sim.a", "sim/b.py": "import sim.a"}),
        ("docstrings", {"sim/a.py": '"""A thing; what it does."""'}),
        ("circles of folders", {"sim/a/x.py": "import sim.b.y", "sim/b/y.py": "", "sim/a/z.py": "import sim.b.y"}),
        ("large classes", {"sim/a.py": "class A:\n" + "    x = 1\n" * 399}),
    ],
)
def test_what_the_house_allows_is_not_found(rule: str, files: dict[str, str]) -> None:
    assert not list(HOUSE[rule]([Source.of(path, text) for path, text in files.items()]))


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        ("pickles", "sim/a.py", "import pickle"),
        ("pickles", "sim/a.py", "def f():\n    from pickle import loads"),
        ("pickles", "benchmarks/a.py", "import importlib\nimportlib.import_module('cloudpickle')"),
        ("pickles", "sim/timeline/export.py", "import pickle\npickle.load(file)"),
        ("pickles", "hyper_parallel/a.py", "import torch\ntorch.load(path)"),
        ("pickles", "hyper_parallel/a.py", "import torch\ntorch.load(path, weights_only=False)"),
        ("pickles", "hyper_parallel/a.py", "import numpy as np\nnp.load(path, allow_pickle=True)"),
        ("pickles", "hyper_parallel/a.py", "AutoTokenizer.from_pretrained(folder)  # asks on stdin"),
        ("pickles", "hyper_parallel/a.py", "kinds[0].from_pretrained(folder, trust_remote_code=given)"),
        ("sim imports", "hyper_parallel/trainer/a.py", "import sim"),
        ("sim imports", "hyper_parallel/trainer/a.py", "def f():\n    from sim.world import run"),
        ("sim imports", "hyper_parallel/trainer/a.py", "import importlib\nimportlib.import_module('sim.world')"),
        ("sim imports", "hyper_parallel/cli/train.py", "from sim import run"),
        ("sim imports", "hyper_parallel/cli/__init__.py", "if True:\n    import sim.mesh.search as s"),
        ("sim imports", "hyper_parallel/cli/estimate.py", "from sim import mesh"),
        ("sim imports", "hyper_parallel/cli/kit.py", "def f():\n    from sim import mesh"),
        ("vendor names", "hyper_parallel/core/a.py", "import torch\ntorch.cuda.synchronize()"),
        ("vendor names", "hyper_parallel/core/a.py", "import torch\ndef f(): return torch.npu.Stream()"),
        ("vendor names", "hyper_parallel/core/a.py", "from torch import cuda"),
        ("vendor names", "hyper_parallel/core/a.py", "from torch.cuda import Stream"),
        ("vendor names", "hyper_parallel/core/a.py", "import torch_npu"),
        ("vendor names", "hyper_parallel/core/a.py", "def f():\n    import torch_npu.npu as n"),
        ("vendor names", "hyper_parallel/core/a.py", "__import__('torch_npu')"),
        ("arrows", "hyper_parallel/core/dtensor/a.py", "import hyper_parallel.core.redistribute.plan"),
        ("arrows", "hyper_parallel/core/dtensor/a.py", "from hyper_parallel.core import shard"),
        ("arrows", "hyper_parallel/core/dtensor/a.py", "from ..redistribute import plan"),
        ("arrows", "hyper_parallel/core/dtensor/__init__.py", "from .. import fully_shard"),
        ("arrows", "hyper_parallel/core/redistribute/a.py", "def f():\n    from hyper_parallel.core.shard import api"),
        ("arrows", "hyper_parallel/core/shard/a.py", "from hyper_parallel.core.fully_shard import api"),
        ("arrows", "hyper_parallel/core/fully_shard/a.py", "from hyper_parallel.core.hsdp.api import hsdp"),
        ("arrows", "hyper_parallel/core/hsdp/a.py", "import hyper_parallel.trainer.config"),
        ("arrows", "hyper_parallel/platform/a.py", "import hyper_parallel.core.dtensor.layout"),
        ("arrows", "hyper_parallel/models/a.py", "import hyper_parallel.trainer.parallel_dims"),
        ("arrows", "hyper_parallel/trainer/a.py", "import hyper_parallel.cli"),
        ("arrows", "hyper_parallel/core/shard/a.py", "from hyper_parallel import Layout"),
        ("arrows", "hyper_parallel/elsewhere.py", ""),
        ("hypothesis imports", "hyper_parallel/core/a.py", "from hypothesis import given"),
        ("hypothesis imports", "sim/prove.py", "def f():\n    import hypothesis.strategies as st"),
        ("mutable state", "hyper_parallel/a.py", "CACHE = {}"),
        ("mutable state", "hyper_parallel/a.py", "CACHE: dict[str, int] = {}"),
        ("mutable state", "hyper_parallel/a.py", "names = ['a']"),
        ("mutable state", "hyper_parallel/a.py", "a, b = [], 1"),
        ("mutable state", "hyper_parallel/a.py", "SEEN = {1, 2}"),
        ("mutable state", "hyper_parallel/a.py", "SQUARES = {n: n * n for n in range(3)}"),
        ("mutable state", "hyper_parallel/a.py", "import collections\n_QUEUE = collections.deque()"),
        ("mutable state", "hyper_parallel/a.py", "_QUEUES = defaultdict[str, list](list)"),
        ("mutable state", "hyper_parallel/a.py", "import threading\n_LOCAL = threading.local()"),
        ("mutable state", "hyper_parallel/a.py", "import weakref\n_HANDLES = weakref.WeakKeyDictionary()"),
        ("mutable state", "hyper_parallel/a.py", "try:\n    X = dict(a=1)\nexcept E:\n    X = None"),
        ("mutable state", "hyper_parallel/a.py", "try:\n    X = None\nexcept E:\n    X = list()"),
        ("mutable state", "hyper_parallel/a.py", "if A:\n    pass\nelse:\n    X = [] if B else ()"),
        ("mutable state", "hyper_parallel/a.py", "class Engine:\n    buckets = []"),
        ("mutable state", "hyper_parallel/a.py", "class Engine:\n    class Inner:\n        seen: set[int] = set()"),
        ("mutable state", "hyper_parallel/a.py", "class A:\n    def __init__(self): ...\n_A = A()"),
        ("mutable state", "hyper_parallel/a.py", "import itertools\n_IDS = itertools.count()"),
        ("mutable state", "hyper_parallel/a.py", "@dataclass\nclass State:\n    n: int = 0\n_STATE = State()"),
        ("mutable state", "hyper_parallel/a.py", "_COUNT = 0\ndef f():\n    global _COUNT\n    _COUNT += 1"),
        ("mutable state", "hyper_parallel/core/a.py", "_REGISTRY = dict()"),
    ],
)
def test_offence_is_found(check: str, path: str, text: str) -> None:
    faults = faults_of(check, [Source.of(path, text)])
    assert faults
    assert all(fault.startswith(path) for fault in faults)


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        ("sim imports", "hyper_parallel/cli/train.py", "def train():\n    from sim import run"),
        ("sim imports", "hyper_parallel/cli/estimate.py", "def estimate():\n    from sim import mesh"),
        ("pickles", "sim/timeline/export.py", "import pickle\npickle.dumps(dump)"),
        ("pickles", "hyper_parallel/a.py", "import pickletools\nimport torch\ntorch.load(path, weights_only=True)"),
        ("pickles", "hyper_parallel/a.py", "dist.all_gather_object(values, value)  # between living ranks"),
        ("pickles", "hyper_parallel/a.py", "AutoConfig.from_pretrained(folder, trust_remote_code=False)"),
        ("sim imports", "hyper_parallel/a.py", "import simplejson\nfrom similar import x\n# import sim"),
        ("sim imports", "hyper_parallel/core/a.py", "from .sim import x"),
        ("vendor names", "hyper_parallel/platform/cuda.py", "import torch\ntorch.cuda.empty_cache()\nimport torch_npu"),
        ("vendor names", "hyper_parallel/core/a.py", "kind = 'torch.cuda'\nself.torch.cuda\ntorch.cudnn"),
        ("arrows", "hyper_parallel/core/dtensor/a.py", "import hyper_parallel.platform.platform\nfrom . import layout"),
        ("arrows", "hyper_parallel/core/redistribute/a.py", "from hyper_parallel.core.dtensor.layout import Layout"),
        ("arrows", "hyper_parallel/core/hsdp/a.py", "from ..fully_shard.param import P"),
        (
            "arrows",
            "hyper_parallel/trainer/a.py",
            "import hyper_parallel.models.llama\nimport hyper_parallel.core.shard",
        ),
        (
            "arrows",
            "hyper_parallel/cli/train.py",
            "import hyper_parallel.trainer.trainer\nimport hyper_parallel.models",
        ),
        ("arrows", "hyper_parallel/__init__.py", "from hyper_parallel.core.shard.api import shard_module"),
        ("arrows", "sim/world.py", "import hyper_parallel.trainer.trainer"),
        ("hypothesis imports", "sim/strategies.py", "from hypothesis import strategies"),
        ("mutable state", "hyper_parallel/a.py", "__all__ = ['a']\nNAMES = ('a', 'b')\nSIZES = frozenset({1, 2})"),
        ("mutable state", "hyper_parallel/a.py", "TABLE = MappingProxyType({'a': 1})\nORDER = tuple([1, 2])"),
        (
            "mutable state",
            "hyper_parallel/a.py",
            "@dataclass\nclass A:\n    a: list[str] = field(default_factory=list)",
        ),
        ("mutable state", "hyper_parallel/a.py", "def f():\n    cache = {}\n    return cache"),
        ("mutable state", "hyper_parallel/a.py", "class A:\n    def __init__(self):\n        self.queue = deque()"),
        ("mutable state", "hyper_parallel/a.py", "@dataclass(frozen=True)\nclass Unit:\n    n: int\nONE = Unit(1)"),
        ("mutable state", "hyper_parallel/a.py", "class Missing: ...\nMISSING = Missing()\nN = NAMES.count('x')"),
        ("mutable state", "hyper_parallel/platform/registry.py", "class R:\n def __init__(self): ...\n_REGISTRY = R()"),
    ],
)
def test_what_is_allowed_is_not_found(check: str, path: str, text: str) -> None:
    assert faults_of(check, [Source.of(path, text)]) == []


if __name__ == "__main__":
    everything = [*sources("hyper_parallel"), *sources("sim")]
    left: dict[str, object] = {rule: faults for rule, check in HOUSE.items() if (faults := list(check(everything)))}
    left["figures"] = owed(json.loads(DEBTS.read_text()).get("figures", {}))
    DEBTS.write_text(json.dumps(left, indent=1) + "\n")
    print(*(f"{rule}: {faults}" for rule, faults in left.items()), sep="\n")
