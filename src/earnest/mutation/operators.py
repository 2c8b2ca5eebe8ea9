"""Mutation operators: small changes to the source of training code, like typing errors or bad merges.

Each operator takes one syntax node and yields replacements for it. Operators do not depend on laws or tests.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Rewrite = Callable[[ast.AST], Iterator[tuple[str, ast.AST]]]

_SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_COMPARES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
SETTINGS = ("alpha", "beta", "gamma", "tau", "clip", "clip_low", "clip_high", "dual_clip", "epsilon", "epsilon_low",
            "epsilon_high", "eps", "cap", "floor", "max_ratio", "temperature", "strength", "growth", "threshold",
            "smoothing", "label_smoothing", "coefficient", "kl_coef", "entropy_coef")  # fmt: skip
_METHODS = {"sum": "mean", "mean": "sum", "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min",
            "exp": "log1p", "logsigmoid": "sigmoid", "log_softmax": "softmax", "softmax": "log_softmax"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where, what, and the whole mutated source."""

    line: int
    what: str
    source: str


def arithmetic(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """a + b → a - b, a * b → a / b, and each side alone (a term dropped; of a quotient, its divisor)."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        other = _SWAPS[type(node.op)]
        yield f"{_name(node.op)} becomes {_name(other())}", ast.BinOp(node.left, other(), node.right)
        yield f"the right side of {_name(node.op)} is dropped", node.left
        if not isinstance(node.op, ast.Div):
            rest = ast.UnaryOp(ast.USub(), node.right) if isinstance(node.op, ast.Sub) else node.right
            yield f"the left side of {_name(node.op)} is dropped", rest


def sign(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """-a → a."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "a minus sign is lost", node.operand


def comparison(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """a < b → a > b."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARES:
        yield "a comparison is reversed", ast.Compare(node.left, [_COMPARES[type(node.ops[0])]()], node.comparators)


def detached(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """x = f(…) → x = f(…).detach()."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Call):
        cut = ast.Call(ast.Attribute(copy.deepcopy(node.value), "detach", ast.Load()), [], [])
        yield f"{ast.unparse(node.targets[0])} is detached", ast.Assign(node.targets, cut)


def reduction(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """sum → mean, minimum → maximum, log_softmax → softmax."""
    if isinstance(node, ast.Attribute) and node.attr in _METHODS:
        yield f"{node.attr} becomes {_METHODS[node.attr]}", ast.Attribute(node.value, _METHODS[node.attr], node.ctx)


def arguments(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """f(a, b) → f(b, a)."""
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        if ast.unparse(swapped[0]) != ast.unparse(swapped[1]):
            yield f"two arguments of {ast.unparse(node.func)} are swapped", ast.Call(node.func, swapped, node.keywords)


def shifted(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """x[:, 1:] → x[:, :-1] and back: a mask or a target shifted by one."""
    if not isinstance(node, ast.Slice):
        return
    text = ast.unparse(node)
    turned = {
        "1:": ast.Slice(None, ast.UnaryOp(ast.USub(), ast.Constant(1)), None),
        ":-1": ast.Slice(ast.Constant(1), None, None),
    }
    if text in turned:
        yield f"[{text}] is shifted by one", turned[text]


def key(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """batch["mask"] → torch.ones_like(batch["mask"]): an input is ignored."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return
    if isinstance(node.slice.value, str) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "batch":
        for neutral in ("ones_like", "zeros_like"):
            call = ast.Call(
                ast.Attribute(ast.Name("torch", ast.Load()), neutral, ast.Load()), [copy.deepcopy(node)], []
            )
            yield f"{ast.unparse(node)} is replaced by {neutral}", call


def setting(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A setting, by its bare name or as self.name → the constant 0.5: a setting is ignored."""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "args"):
        name = node.attr
    else:
        return
    if name in SETTINGS and isinstance(node.ctx, ast.Load):
        yield f"{ast.unparse(node)} is ignored", ast.Constant(0.5)


def constant(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """1 → 2, 0.5 → 1.5: an off-by-one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield f"{node.value} becomes {node.value + 1}", ast.Constant(node.value + 1)


def state_dict_emptied(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def state_dict(self): return {} (an empty checkpoint)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("state_dict", "get_state"):
        yield f"{node.name} is emptied", _with_body(node, [ast.Return(ast.Dict([], []))])


def forward_bypassed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def forward(self, x, …): return x (an adapter that is attached and does nothing)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__") and len(node.args.args) >= 2:
        through = ast.Return(ast.Name(node.args.args[1].arg, ast.Load()))
        yield f"{node.name} is bypassed", _with_body(node, [through])


def load_ignored(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """def load_state_dict(self, …): pass (a resume that starts from scratch)."""
    if isinstance(node, ast.FunctionDef) and node.name in ("load_state_dict", "set_state"):
        yield f"{node.name} does nothing", _with_body(node, [ast.Return(None)])


OPERATORS: tuple[Rewrite, ...] = (
    arithmetic, sign, comparison, detached, reduction, arguments, shifted, key, setting, constant,
    state_dict_emptied, forward_bypassed, load_ignored,
)  # fmt: skip


def mutants(source: str, operators: tuple[Rewrite, ...] = OPERATORS) -> Iterator[Mutant]:
    """Every single change of every node, in the order of the source."""
    tree = ast.parse(source)
    for change in changes(tree, operators):
        yield change.applied(tree)


@dataclass(frozen=True)
class Edit:
    """A mutant that is not written yet: ``new`` takes the place of node number ``place`` of ``ast.walk``."""

    place: int
    line: int
    what: str
    operator: str
    new: ast.AST

    def applied(self, tree: ast.Module) -> Mutant:
        changed = copy.deepcopy(tree)
        spot = next(n for i, n in enumerate(ast.walk(changed)) if i == self.place)
        text = ast.unparse(ast.fix_missing_locations(_Replace(spot, self.new).visit(changed)))
        return Mutant(self.line, self.what, text)


def changes(tree: ast.Module, operators: tuple[Rewrite, ...] = OPERATORS) -> Iterator[Edit]:
    """Every change, in the order of the source."""
    for place, node in enumerate(ast.walk(tree)):
        for operator in operators:
            for what, new in operator(node):
                yield Edit(place, _line(node, new), what, operator.__name__, new)


def _line(node: ast.AST, new: ast.AST) -> int:
    """Where a reader finds the change: an operator that rewrites a whole function places it on the changed line."""
    placed = new if type(new) is type(node) else node
    lines = (getattr(n, "lineno", 0) for n in (placed, node, *ast.walk(node)))
    return next((line for line in lines if line), 0)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else super().generic_visit(node)


def _with_body(node: ast.FunctionDef, body: list[ast.stmt]) -> ast.FunctionDef:
    new = copy.copy(node)
    new.body = body
    return new


def _name(op: ast.operator) -> str:
    return {"Add": "+", "Sub": "-", "Mult": "*", "Div": "/"}[type(op).__name__]
