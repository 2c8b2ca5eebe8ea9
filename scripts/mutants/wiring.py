"""Mutation operators for code around the maths: defaults, arguments, guards of state, cleanup, locks and thresholds.

``operators.py`` has those for formulas.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from earnest.mutation.operators import Rewrite

_BOUNDS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_CLEANUP = ("cancel", "cleanup", "clear", "close", "detach", "flush", "join", "kill", "pop", "release", "rmtree",
            "shutdown", "stop", "terminate", "unlink")  # fmt: skip
_LOCKS = ("lock", "mutex", "semaphore", "condition")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def default(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The default of a parameter or of a field: True → False, 1 → 2, 0.5 → 1.0."""
    if isinstance(node, ast.arguments):
        for names, values in ((_positional(node), node.defaults), (node.kwonlyargs, node.kw_defaults)):
            for place, (name, value) in enumerate(zip(names[len(names) - len(values) :], values, strict=True)):
                if (other := _other(value)) is not None:
                    changed = [*values[:place], other, *values[place + 1 :]]
                    field = "defaults" if values is node.defaults else "kw_defaults"
                    new = ast.arguments(**{f: getattr(node, f) for f in node._fields} | {field: changed})
                    yield f"the default of {name.arg} becomes {ast.unparse(other)}", new
    elif isinstance(node, ast.AnnAssign) and (other := _other(node.value)) is not None:
        new_field = ast.AnnAssign(node.target, node.annotation, other, node.simple)
        yield f"the default of {ast.unparse(node.target)} becomes {ast.unparse(other)}", new_field


def argument_dropped(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """f(a, key=b) → f(a): a value is not passed on."""
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                rest = [*node.keywords[:place], *node.keywords[place + 1 :]]
                yield f"{keyword.arg}= of {ast.unparse(node.func)} is dropped", ast.Call(node.func, node.args, rest)


def guard_removed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """if state: raise, return or continue → nothing."""
    if (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue)
    ):
        yield f"the guard `if {_short(node.test)}` is removed", ast.Pass()


def condition(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """a and b → a, a or b → a, not a → a."""
    if isinstance(node, ast.BoolOp):
        yield f"`{_short(node.values[-1])}` is left out of a condition", _without_last(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"`not {_short(node.operand)}` loses its not", node.operand


def cleanup_removed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """x.close() → nothing; finally: … → finally: nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = ast.unparse(node.value.func).rsplit(".", 1)[-1]
        if name in _CLEANUP:
            yield f"`{_short(node)}` is removed", ast.Pass()
    elif isinstance(node, ast.Try) and node.finalbody:
        new = ast.Try(node.body, node.handlers, node.orelse, [ast.Pass()])
        yield "what stands after finally is removed", new


def lock_removed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """with lock: … → the same without the lock."""
    if isinstance(node, ast.With | ast.AsyncWith) and len(node.items) == 1:
        text = ast.unparse(node.items[0].context_expr)
        if any(word in text.lower() for word in _LOCKS) and node.items[0].optional_vars is None:
            yield f"`with {text}` holds no lock", ast.If(ast.Constant(True), node.body, [])


def threshold(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """a < b → a <= b."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _BOUNDS:
        other = _BOUNDS[type(node.ops[0])]()
        new = ast.Compare(node.left, [other, *node.ops[1:]], node.comparators)
        yield f"`{_short(node)}` becomes `{_short(new)}`", new


def off_by_one(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """x + 1 → x, x[1:] → x[0:], range(n) → range(n - 1)."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_one(node.right):
        yield f"`{_short(node)}` becomes `{_short(node.left)}`", node.left
    elif isinstance(node, ast.Slice) and node.lower is not None and _is_one(node.lower):
        yield "a slice begins one earlier", ast.Slice(ast.Constant(0), node.upper, node.step)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) == 1:
        yield "a range is one shorter", ast.Call(node.func, [ast.BinOp(node.args[0], ast.Sub(), ast.Constant(1))], [])


def state_lost(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """self.x = value, self.x += value and table[key] = value outside of __init__ → nothing."""
    if not isinstance(node, _FUNCTIONS) or node.name in ("__init__", "__post_init__"):
        return
    for place, line in enumerate(node.body):
        target = (
            line.targets[0]
            if isinstance(line, ast.Assign)
            else line.target
            if isinstance(line, ast.AugAssign)
            else None
        )
        if isinstance(target, ast.Attribute | ast.Subscript):
            new = type(node)(**{f: getattr(node, f) for f in node._fields} | {"body": _passed(node.body, place)})
            yield f"`{_short(line)}` is removed", ast.copy_location(new, line)


def keywords_swapped(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """f(a=x, b=y) → f(a=y, b=x)."""
    if isinstance(node, ast.Call) and len(node.keywords) >= 2:
        one, two = node.keywords[:2]
        if one.arg and two.arg and ast.unparse(one.value) != ast.unparse(two.value):
            swapped = [ast.keyword(one.arg, two.value), ast.keyword(two.arg, one.value), *node.keywords[2:]]
            yield (
                f"{one.arg}= and {two.arg}= of {ast.unparse(node.func)} are swapped",
                ast.Call(node.func, node.args, swapped),
            )


WIRING: tuple[Rewrite, ...] = (
    default, argument_dropped, guard_removed, condition, cleanup_removed, lock_removed, threshold, off_by_one,
    state_lost, keywords_swapped,
)  # fmt: skip


def _positional(node: ast.arguments) -> list[ast.arg]:
    return [*node.posonlyargs, *node.args]


def _other(value: ast.expr | None) -> ast.expr | None:
    """Another constant of the same kind. Texts and None have none."""
    if not isinstance(value, ast.Constant) or not isinstance(value.value, bool | int | float):
        return None
    known = value.value
    return ast.Constant(
        not known if isinstance(known, bool) else known + 1 if isinstance(known, int) else known * 2 or 1.0
    )


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _without_last(node: ast.BoolOp) -> ast.expr:
    return node.values[0] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[:-1])


def _passed(body: list[ast.stmt], place: int) -> list[ast.stmt]:
    return [*body[:place], ast.Pass(), *body[place + 1 :]]


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
