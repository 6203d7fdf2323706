"""Looks names up in the source of one SGLang release, without importing any of it.

``doctor`` and the contract tests read releases through it: importing SGLang takes ten seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A definition, and the module that it was found in after imports were followed."""

    module: str
    node: Any


class Missing(LookupError):
    """The release has no such name."""


class Source:
    """One release; ``root`` holds the ``sglang`` package of its wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module:
        """The parsed module."""
        if module not in self._trees:
            path = self._path(module)
            if path is None:
                raise Missing(f"module {module}")
            self._trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[module]

    def text(self, module: str) -> str:
        """The module as it is written; empty where there is none."""
        path = self._path(module)
        return "" if path is None else path.read_text(encoding="utf-8")

    def find(self, module: str, qualname: str) -> Definition:
        """The definition of ``qualname``, through imports and base classes."""
        first, *rest = qualname.split(".")
        found = self._top(module, first)
        for name in rest:
            found = self._member(found, name)
        return found

    def function(self, module: str, qualname: str) -> Function:
        """As ``find``, for a function or method."""
        node = self.find(module, qualname).node
        if not isinstance(node, Function):
            raise Missing(f"{module}:{qualname} is no function")
        return node

    def attributes(self, module: str, classname: str) -> set[str]:
        """Every name that instances of a class have: its fields, methods, slots and self.NAME = ...

        Bases included.
        """
        names: set[str] = set()
        for owner in self._lineage(self.find(module, classname)):
            for item in owner.node.body:
                names |= _class_names(item)
            for node in ast.walk(owner.node):
                if _is_self_attribute(node) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
        return names

    def _path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def _top(self, module: str, name: str) -> Definition:
        # Definitions first: a module may import a name of its own back, for type checkers.
        statements = list(_statements(self.tree(module)))
        for node in statements:
            if isinstance(node, Function | ast.ClassDef) and node.name == name:
                return Definition(module, node)
            if name in _assigned(node):
                return Definition(module, node)
        for node in statements:
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = self._absolute(module, node)
                    if self._path(origin) is not None:
                        return self._top(origin, alias.name)
        raise Missing(f"{module}:{name}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        parts = module.split(".")
        if path is None or path.name != "__init__.py":
            parts.pop()
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _member(self, owner: Definition, name: str) -> Definition:
        for base in self._lineage(owner):
            for item in base.node.body:
                if isinstance(item, Function | ast.ClassDef) and item.name == name:
                    return Definition(base.module, item)
                if name in _assigned(item):
                    return Definition(base.module, item)
        raise Missing(f"{owner.module}:{getattr(owner.node, 'name', '?')}.{name}")

    def _lineage(self, start: Definition) -> Iterator[Definition]:
        """The class and, as far as they are SGLang's, its bases."""
        if not isinstance(start.node, ast.ClassDef):
            raise Missing(f"{start.module}: not a class")
        yield start
        for base in start.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                try:
                    found = self._top(start.module, base.id)
                except Missing:
                    continue
                if isinstance(found.node, ast.ClassDef):
                    yield from self._lineage(found)


def installed() -> Path | None:
    """Folder that holds the installed ``sglang`` package; nothing is imported for it."""
    spec = find_spec("sglang")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).parent if places else None


def parameters(function: Function) -> list[str]:
    """Names by which a function takes arguments."""
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def required(function: Function) -> list[str]:
    """Those of its parameters that have no default."""
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    optional = {a.arg for a in by_position[len(by_position) - len(arguments.defaults) :]}
    optional |= {
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    return [name for name in parameters(function) if name not in optional]


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Top-level statements, those inside ``if`` and ``try`` included."""
    pending = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            blocks = [node.body, node.orelse, *(h.body for h in getattr(node, "handlers", []))]
            pending = [statement for block in blocks for statement in block] + pending


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _class_names(item: ast.stmt) -> set[str]:
    names = _assigned(item)
    if isinstance(item, Function | ast.ClassDef):
        names.add(item.name)
    if "__slots__" in names and isinstance(item, ast.Assign):
        names |= {str(c.value) for c in ast.walk(item.value) if isinstance(c, ast.Constant)}
    return names


def _is_self_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
