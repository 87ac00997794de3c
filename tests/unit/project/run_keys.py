"""The files that read or set a key of a run, found by the types of expressions and not by words.

`dp_shard` is also an axis of a mesh, and `schedule` a word of English: a name counts if it is taken from a section of a
run, or given to one. Types come from annotations of parameters, fields and results. They are followed through
assignments, loops, containers and calls, so that no other name for a section hides a key.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from hyper_parallel.trainer.config import Config

SECTIONS: dict[str, Any] = {each.name: each.default_factory for each in fields(Config)}
KEYS = {name: {key.name for key in fields(kind)} for name, kind in SECTIONS.items()}
CLASSES = {kind.__name__: name for name, kind in SECTIONS.items()}
# Models are made of these without a run: there only what is taken from a run counts, as `run.model.hidden_size`.
SHAPES = {"LlamaConfig": "model", "ExpertsConfig": "experts", "LoraConfig": "lora"}
BY_NAME = KEYS.keys() - SHAPES.values()  # what is called so and has no annotation is a section
CHANGED = ("parallel", "precision", "optimizer", "lora", "train")  # by `Recipe.having`: the first that has the key
CONTAINERS = ("list", "set", "dict", "Sequence", "Iterable", "Iterator", "Mapping", "Collection", "Generator", "tuple")
SAME = ("replace", "sorted", "list", "tuple", "set", "frozenset", "dict", "reversed", "iter", "copy", "deepcopy")
ALIKE = {"list": "tuple", "set": "tuple", "setcomp": "listcomp", "generatorexp": "listcomp", "dictcomp": "listcomp"}
ALIKE |= {"asyncfunctiondef": "functiondef", "ifexp": "boolop", "binop": "boolop", "await": "starred"}

Type = tuple[str, Any]
"""("a", class), ("section", name), ("class", name), ("call", result), ("many", of what), ("tuple", types), ("texts",
words), ("keys of", section), ("**", its name), or ("no", None) for all else."""
NO: Type = ("no", None)


@dataclass
class Program:
    """What all files define, and the uses of keys that were found in them."""

    bases: dict[str, list[str]] = field(default_factory=dict)
    known: dict[tuple[str, str], Type] = field(default_factory=dict)  # by class or module, and name
    setters: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)  # functions that hand on keys
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def member(self, owner: str, name: str) -> Type:
        if (owner, name) in self.known:
            return self.known[owner, name]
        return _first(self.member(base, name) for base in self.bases.get(owner, ()))

    def is_run(self, name: str) -> bool:
        return name == "Config" or any(map(self.is_run, self.bases.get(name, ())))


def files_of_keys(files: Iterable[tuple[str, str, ast.Module]]) -> dict[str, set[str]]:
    """Return the paths of the files that use each key, as "parallel.tp", given (path, module, tree) of all files."""
    program, files = Program(), list(files)
    for _, _, tree in files:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        program.bases |= {each.name: [ast.unparse(base).split(".")[-1] for base in each.bases] for each in classes}
    for _ in range(2):  # what a file assigns is known in the files before it the second time
        program.uses.clear()
        for path, module, tree in files:
            _Reader(program, path, module).read(tree)
    return program.uses


class _Reader:
    """Follows the types of one file."""

    def __init__(self, program: Program, path: str, module: str) -> None:
        self.program, self.path, self.module = program, path, module
        self.scopes: list[dict[str, Type]] = [{}]
        self.owner, self.function = "", ("", "")  # the class and the function around
        self.origin: dict[str, str] = {}  # modules of imported names
        self.words: set[str] = set()  # keys of dicts
        self.open: set[tuple[str, ...]] = set()  # sections that are given dicts which are not followed

    def read(self, tree: ast.Module) -> None:
        self.of(tree)
        for sections in self.open:
            self.use(sections, self.words)

    def use(self, sections: Iterable[str], names: Iterable[str]) -> None:
        homes = {key: section for section in reversed([*sections]) for key in KEYS.get(section, ())}
        for name in homes.keys() & {*names}:
            self.program.uses[f"{homes[name]}.{name}"].add(self.path)

    def of(self, node: ast.AST | None) -> Type:
        """Return the type of an expression, and note the keys that are used in it, or in a statement."""
        kind = type(node).__name__.lower()
        handler = getattr(self, f"of_{ALIKE.get(kind, kind)}", None)
        if handler is not None:
            found: Type = handler(node)
            return found
        for child in () if node is None else ast.iter_child_nodes(node):
            self.of(child)
        return NO

    # Expressions

    def of_constant(self, node: ast.Constant) -> Type:
        if not isinstance(node.value, str):
            return NO
        section, _, key = node.value.partition(".")
        self.use([section], [key])
        return "texts", frozenset([node.value])

    def of_name(self, node: ast.Name) -> Type:
        found = next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), NO)
        if found == NO:
            found = self.program.known.get((self.module, node.id), NO)
        if found == NO and node.id in self.program.bases:
            return "class", node.id
        return ("section", node.id) if found == NO and node.id in BY_NAME else found

    def of_boolop(self, node: ast.AST) -> Type:
        return _joined([self.of(child) for child in ast.iter_child_nodes(node)])

    def of_starred(self, node: ast.Starred | ast.Await) -> Type:
        return self.of(node.value)

    def of_namedexpr(self, node: ast.NamedExpr) -> Type:
        return self.bind(node.target, self.of(node.value))

    def of_attribute(self, node: ast.Attribute) -> Type:
        return self.taken(self.of(node.value), node.attr)

    def taken(self, base: Type, name: str) -> Type:
        kind, of = base
        if kind == "section":
            self.use([of], [name])
            return self.program.member(SECTIONS[of].__name__, name)
        if kind in ("a", "class"):
            return ("section", name) if name in KEYS and self.program.is_run(of) else self.program.member(of, name)
        if kind in ("many", "tuple", "texts") and name in ("values", "items", "get", "pop", "keys", "setdefault"):
            element = base if kind == "texts" and name != "values" else _element(base)
            return "call", ("many", ("tuple", [element, element])) if name == "items" else element
        if kind == "no" and name in self.program.bases:
            return "class", name  # of a module
        return ("section", name) if kind == "no" and name in BY_NAME else NO

    def of_subscript(self, node: ast.Subscript) -> Type:
        base, index = self.of(node.value), self.of(node.slice)
        if base[0] == "keys of" and index[0] == "texts":
            self.use([base[1]], index[1])
        if base[0] == "tuple" and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            return next(iter(base[1][node.slice.value :]), NO)
        return base if isinstance(node.slice, ast.Slice) else _element(base)

    def of_tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Type:
        types = [self.of(each) for each in node.elts]
        return _joined(types) if types and all(each[0] == "texts" for each in types) else ("tuple", types)

    def of_dict(self, node: ast.Dict) -> Type:
        values = [self.of(each) for each in node.values]
        words = [value if key is None else self.of(key) for key, value in zip(node.keys, values, strict=True)]
        if any(each[0] != "texts" for each in words):
            return "many", _joined(values)
        return self.noted(frozenset().union(*(each[1] for each in words)))

    def noted(self, words: frozenset[str]) -> Type:
        self.words |= words
        return "texts", words

    def of_lambda(self, node: ast.Lambda) -> Type:
        self.scopes.append({})
        found = self.of(node.body)
        self.scopes.pop()
        return "call", found

    def of_listcomp(self, node: Any) -> Type:
        self.scopes.append({})
        for each in node.generators:
            self.bind(each.target, _element(self.of(each.iter)))
            for test in each.ifs:
                self.of(test)
        of_dict = isinstance(node, ast.DictComp)
        key, value = self.of(node.key if of_dict else None), self.of(node.value if of_dict else node.elt)
        self.scopes.pop()
        return key if key[0] == "texts" else ("many", value)

    def of_call(self, node: ast.Call) -> Type:
        called = self.of(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [*map(self.of, node.args), NO, NO][: max(len(node.args), 2)]
        named = {each.arg: self.of(each.value) for each in node.keywords}
        first, second = given[:2]
        words = frozenset(each for each in named if each)
        if (rest := named.get(None, NO))[0] == "texts":
            words |= rest[1]
        self.use_given(node, called, name, first, words, is_open=None in named and rest[0] != "texts")
        if name == "with_changes" and first[0] == second[0] == "texts":
            self.use(first[1], second[1])
        if name == "getattr" and second[0] == "texts":
            return _joined([self.taken(first, each) for each in sorted(second[1])])
        if name in ("asdict", "vars", "_some") and first[0] == "section":
            self.use([first[1]], [word for each in given[1:] if each[0] == "texts" for word in each[1]])
            return "keys of", first[1]
        if called[0] == "class":
            return self.instance(called[1])
        if called[0] == "call":
            return called[1] if isinstance(called[1], tuple) else NO
        if name == "cast":
            return _first([self.annotated(node.args[0]), second])
        if name == "dict" and words:
            return self.noted(words)
        if name in ("zip", "enumerate"):
            return "many", ("tuple", [NO] * (name == "enumerate") + [_element(each) for each in given])
        return _element(first) if name in ("next", "min", "max") else first if name in SAME else NO

    def use_given(
        self, node: ast.Call, called: Type, name: str, first: Type, words: Iterable[str], is_open: bool
    ) -> None:
        """Note the keys that a call sets by its arguments."""
        sections = self.program.setters.get((self.origin.get(name, self.module), name), ())
        if name in ("having", "bare"):
            sections = CHANGED
        if called[0] == "class" and called[1] in CLASSES.keys() - SHAPES.keys():
            sections = (CLASSES[called[1]],)
        if name in ("replace", "__replace__") and first[0] == "section":
            sections = (first[1],)
        self.use(sections, words)
        if sections and is_open:  # keys that callers give, or that are made elsewhere
            if any(each.arg is None and self.of(each.value)[0] == "**" for each in node.keywords):
                self.program.setters[self.module, self.function[1]] = sections
            else:
                self.open.add(sections)

    def instance(self, name: str) -> Type:
        return ("section", CLASSES[name]) if name in CLASSES.keys() - SHAPES.keys() else ("a", name)

    def annotated(self, node: ast.AST | None) -> Type:
        """Return the type that an annotation means."""
        if isinstance(node, ast.BinOp):
            return _first(map(self.annotated, (node.left, node.right)))
        if isinstance(node, ast.Subscript) and (name := ast.unparse(node.value).split(".")[-1]) != "Literal":
            inner = [self.annotated(each) for each in getattr(node.slice, "elts", [node.slice])]
            if name == "type":
                return ("class", inner[0][1]) if inner[0][0] == "a" else NO
            if name == "Callable":
                return "call", inner[-1]
            if name == "tuple" and not (len(inner) == 2 and inner[1] == NO):
                return "tuple", inner
            return ("many", _first(reversed(inner))) if name in CONTAINERS else _first(inner)
        if isinstance(node, ast.Name) and node.id == "Self":
            return self.instance(self.owner)
        found = self.of(node) if isinstance(node, (ast.Name, ast.Attribute)) else NO
        return self.instance(found[1]) if found[0] == "class" else NO

    # Statements

    def bind(self, target: ast.AST, found: Type) -> Type:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = found
            if len(self.scopes) == 1:
                self.program.known[self.module, target.id] = found
        elif isinstance(target, (ast.Tuple, ast.List)):
            is_alike = found[0] == "tuple" and len(found[1]) == len(target.elts)
            for place, each in enumerate(target.elts):
                self.bind(each, found[1][place] if is_alike else _element(found))
        elif isinstance(target, ast.Subscript):
            index = self.of(target.slice)
            self.words |= index[1] if index[0] == "texts" else set()
            if isinstance(target.value, ast.Name):
                self.bind(target.value, _joined([self.of(target.value), index]))
        elif isinstance(target, ast.Attribute):
            if self.of(target.value) == ("a", self.owner) and self.of(target) == NO:
                self.program.known[self.owner, target.attr] = found
            self.of(target)
        return found

    def of_importfrom(self, node: ast.ImportFrom) -> Type:
        for alias in node.names:
            self.origin[alias.asname or alias.name] = node.module or ""
            otherwise = ("class", alias.name) if alias.name in self.program.bases else ("module", None)
            known = self.program.known.get((node.module or "", alias.name), otherwise)
            # A list of keys is declared where they are; who goes through all of them names none.
            is_list = known[0] == "texts" and len(known[1]) > 1
            self.scopes[-1][alias.asname or alias.name] = ("module", None) if is_list else known
        return NO

    def of_assign(self, node: ast.Assign) -> Type:
        found = self.of(node.value)
        for target in node.targets:
            self.bind(target, found)
        return NO

    def of_annassign(self, node: ast.AnnAssign) -> Type:
        found, declared = self.of(node.value), self.annotated(node.annotation)
        if self.owner and not self.function[1] and isinstance(node.target, ast.Name):
            self.program.known[self.owner, node.target.id] = declared
            self.use([CLASSES.get(self.owner, "")], [node.target.id])
            return NO
        return self.bind(node.target, found if found[0] == "texts" else _joined([declared, found]))

    def of_for(self, node: ast.For) -> Type:
        self.bind(node.target, _element(self.of(node.iter)))
        return self.of_all([*node.body, *node.orelse])

    def of_all(self, nodes: Iterable[ast.AST]) -> Type:
        for each in nodes:
            self.of(each)
        return NO

    def of_withitem(self, node: ast.withitem) -> Type:
        found = self.of(node.context_expr)
        return found if node.optional_vars is None else self.bind(node.optional_vars, found)

    def of_matchclass(self, node: ast.MatchClass) -> Type:
        self.use([CLASSES.get(self.of(node.cls)[1], "")], node.kwd_attrs)
        return self.of_all(node.kwd_patterns)

    def of_return(self, node: ast.Return) -> Type:
        found, declared = self.of(node.value), self.program.known.get(self.function, NO)
        if found != NO and declared[0] == "call" and _joined([declared[1]]) in (NO, found):
            self.program.known[self.function] = "call", found
        if found != NO and _joined([declared]) == NO:  # of a property
            self.program.known[self.function] = found
        return NO

    def of_classdef(self, node: ast.ClassDef) -> Type:
        before = self.owner, self.function
        self.owner, self.function = node.name, ("", "")
        self.of_all(node.body)
        self.owner, self.function = before
        return NO

    def of_functiondef(self, node: ast.FunctionDef) -> Type:
        result, decorators = self.annotated(node.returns), " ".join(map(ast.unparse, node.decorator_list))
        result = _element(result) if "contextmanager" in decorators else result
        is_method = bool(self.owner) and not self.function[1]
        home = (self.owner if is_method else self.module), node.name
        if result != NO or self.program.known.get(home, NO)[0] != "call":
            self.program.known[home] = result if "property" in decorators else ("call", result)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        # An annotation that means none of these types means another thing; a section's name alone means the section.
        inner = {each.arg: self.annotated(each.annotation) for each in arguments}
        is_known = {
            each.arg: ast.unparse(each.annotation or ast.Name("Any")) not in ("Any", "object") for each in arguments
        }
        inner |= {name: ("other", None) for name, found in inner.items() if found == NO and is_known[name]}
        if is_method and arguments and "staticmethod" not in decorators:
            is_class = "classmethod" in decorators
            inner[arguments[0].arg] = ("class", self.owner) if is_class else self.instance(self.owner)
        if node.args.kwarg is not None:
            inner[node.args.kwarg.arg] = "**", node.args.kwarg.arg
        before, self.function = self.function, home
        self.scopes.append(inner)
        self.of_all([*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])
        self.scopes.pop()
        self.function = before
        return NO


def _element(of: Type) -> Type:
    """Return the type of what a container holds."""
    inner: Type = of[1] if of[0] == "many" else _joined(of[1]) if of[0] == "tuple" else NO
    return of if of[0] == "texts" else inner


def _first(types: Iterable[Type]) -> Type:
    return next((each for each in types if each != NO), NO)


def _joined(types: Iterable[Type]) -> Type:
    """Return the first type that is known of alternatives, and the words of all if they are texts."""
    known = [each for each in types if each not in (NO, ("other", None), ("many", NO))]
    if known and all(each[0] == "texts" for each in known):
        return "texts", frozenset().union(*(each[1] for each in known))
    return _first(each for each in known if each[0] != "texts")
