"""What the tests ask of a piece of SGLang's source; names are looked up by ``compat/source.py``."""

from __future__ import annotations

import ast

from sglang_verify_graphs.compat.source import Definition, Function, Missing, Source, parameters

__all__ = [
    "Definition", "Function", "Missing", "Source", "calls", "dotted", "parameters", "reads",
    "stores",
]  # fmt: skip


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of ``name`` or of an attribute of that name, in the order of the text."""
    found = [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and dotted(call.func).split(".")[-1] == name
    ]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; calls and subscripts in between are dropped."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    return "?"


def reads(node: ast.AST) -> set[str]:
    """Every attribute that a piece of code reads or calls."""
    return {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    }


def stores(node: ast.AST) -> set[str]:
    """Attribute chains that a piece of code assigns."""
    return {
        dotted(n)
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
