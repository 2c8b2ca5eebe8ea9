"""What is done to training code beyond the slips of ``mutation_ops``: whole methods that stop doing their work."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from earnest.audit import mutation_ops


def state_dict_emptied(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def state_dict(self): return {} (a checkpoint without content)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("state_dict", "get_state"):
        yield f"{node.name} is emptied", _with_body(node, [ast.Return(ast.Dict([], []))])


def forward_bypassed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def forward(self, x, …): return x (an adapter that is attached and does nothing)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__") and len(node.args.args) >= 2:
        through = ast.Return(ast.Name(node.args.args[1].arg, ast.Load()))
        yield f"{node.name} is bypassed", _with_body(node, [through])


def load_ignored(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def load_state_dict(self, …): pass (a resume that starts afresh)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("load_state_dict", "set_state"):
        yield f"{node.name} does nothing", _with_body(node, [ast.Return(None)])


OPERATORS: tuple[mutation_ops.Rewrite, ...] = (
    *mutation_ops.OPERATORS, state_dict_emptied, forward_bypassed, load_ignored,
)  # fmt: skip


def _with_body(node: ast.FunctionDef, body: list[ast.stmt]) -> ast.FunctionDef:
    new = copy.copy(node)
    new.body = body
    return new
