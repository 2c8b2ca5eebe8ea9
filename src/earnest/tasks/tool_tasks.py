"""Built-in environments with tools that ``nano`` learns in minutes: ``calculator``, ``lookup`` and ``fix``.

None can be solved in one turn: an answer without a successful call is wrong in ``calculator``, and in ``lookup`` and
``fix`` the answer is only in what the tool returns. ``oracle`` is a policy that solves each, for demonstrations.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from earnest.tasks.base import Grade, Prompt, Split
from earnest.tasks.environment import Message
from earnest.tasks.split import draw_distinct, stable_rng
from earnest.tasks.tool_environment import Conversation, ToolEnvironment
from earnest.tasks.tools import Observation, Tools

Data = dict[str, Any]
_ITEMS = ("lamp", "basket", "book", "bread", "chair", "clock", "boat", "coat", "letter", "apple", "stone", "window")
"""The things whose names ``nano`` knows in a tool call."""
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_CHECKED = (0, 1, 2, 5, 7)
"""The inputs on which a fixed function is compared with the right one; the first is shown."""


def calculate(expression: str) -> int:
    """Compute with integers.

    Args:
        expression: Numbers with +, - and * between them, such as 12*34.
    """

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("write numbers with +, - and * between them")

    return value(ast.parse(expression, mode="eval").body)


def price(item: str, _prices: dict[str, str]) -> str:
    """The price of an item, or the item that costs the same.

    Args:
        item: The name of the item.
    """
    if item not in _prices:
        raise ValueError(f"there is no item {item}")
    return _prices[item]


def check(code: str) -> str:
    """Test the function f of a piece of Python code.

    Args:
        code: The code that defines f.
    """
    raise NotImplementedError("the environment tests the code")


def outputs(code: str, inputs: list[int]) -> list[Any]:
    """f(x) of the code for each input."""
    space: dict[str, Any] = {}
    exec(compile(code, "<code>", "exec"), space)
    return [space["f"](x) for x in inputs]


@dataclass(frozen=True)
class ToolTask:
    """Questions with one right answer, made from a seed; an answer is right if it contains that. The prompt's data are
    for the tools and the grader. The split is by ``content``, what the policy sees of a question."""

    name: str
    description: str
    make: Callable[[random.Random], Data]

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        rng = stable_rng(self.name, split, seed)
        made = draw_distinct(
            self.make, lambda d: f"{self.name}|{d['content']}", lambda d: (d["content"], d["answer"]), split, count, rng
        )
        return [
            Prompt(f"{self.name}:{d['content']} {d['answer']}", ({"role": "user", "content": d["question"]},), d)
            for d in made
        ]

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        answer, given = str(prompt.data["answer"]), completion.strip()
        correct = re.search(rf"(?<![\w.-]){re.escape(answer)}(?!\w)", given) is not None
        return Grade(float(correct), "" if correct else f"{given[:40]!r} is wrong.", correct)


def _calculation(rng: random.Random) -> Data:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return {"question": f"Compute {a}+{b}.", "content": f"{a}+{b}", "answer": str(a + b)}


def _lookup(rng: random.Random) -> Data:
    item, other = rng.sample(_ITEMS, 2)
    answer = f"{rng.randint(1, 99)} coins"
    prices = {item: answer} if rng.random() < 0.5 else {item: f"as the {other}", other: answer}
    question = f"What does the {item} cost?"
    return {"question": question, "content": item, "item": item, "prices": prices, "answer": answer}


def _broken(rng: random.Random) -> Data:
    wrong, right = rng.sample(range(10, 200), 2)
    code, answer = f"def f(x): return x+{wrong}", f"def f(x): return x+{right}"
    return {"question": f"Fix {code}", "content": f"+{wrong}", "code": code, "add": right, "answer": answer}


class Fix(ToolEnvironment):
    """A function that fails its test. The code of a test and the code that is graded run in the sandbox; what they
    return is compared outside, because the code can change everything in its own process."""

    async def call(self, state: Conversation, name: str, arguments: Mapping[str, Any]) -> Observation:
        seen = self.toolbox.by_name.get(name)
        if seen is None:
            return await super().call(state, name, arguments)
        try:
            code = str(seen.check(arguments)["code"])
        except ValueError as error:
            return Observation(f"Error: {error}.", failed=True)
        return await asyncio.to_thread(self._test, state.prompt, code)

    def _test(self, prompt: Prompt, code: str) -> Observation:
        outcome = self.toolbox.sandbox.call(outputs, {"code": code, "inputs": list(_CHECKED)})
        if outcome.error:
            return Observation(f"Error: {outcome.error}.", failed=True)
        wanted = [x + int(prompt.data["add"]) for x in _CHECKED]
        if outcome.value == wanted:
            return Observation("passed")
        first = outcome.value[0] if isinstance(outcome.value, list) and outcome.value else outcome.value
        return Observation(f"f(0) is {first}, must be {wanted[0]}")


@dataclass(frozen=True)
class FixTask(ToolTask):
    """Graded by running the answer, not by its text."""

    toolbox: Tools | None = None

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        assert self.toolbox is not None
        outcome = self.toolbox.sandbox.call(outputs, {"code": completion.strip(), "inputs": list(_CHECKED)})
        correct = outcome.value == [x + int(prompt.data["add"]) for x in _CHECKED]
        return Grade(float(correct), "" if correct else "The function still fails its test.", correct)


def oracle(prompt: Prompt, history: tuple[Message, ...]) -> Message:
    """The next message of a policy that solves every built-in environment; ``history`` are the messages so far."""
    asked, data = any(m["role"] == "tool" for m in history), prompt.data
    item, code = data.get("item"), data.get("code")
    if asked:
        last = str(history[-1]["content"])
        if last.startswith("as the "):
            return _call("price", item=last.removeprefix("as the "))
        if code is not None:
            return {"role": "assistant", "content": f"def f(x): return x{int(last.rpartition(' ')[2]):+d}"}
        return {"role": "assistant", "content": last if item is None else f"The {item} costs {last}."}
    if item is None and code is None:
        return _call("calculate", expression=data["content"])
    return _call("price", item=item) if code is None else _call("check", code=code)


def _call(tool: str, **arguments: Any) -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CALCULATOR = ToolEnvironment(
    ToolTask("calculator", "sums of two numbers, with a calculator", _calculation),
    [calculate],
    needs_call=True,
    oracle=oracle,
)
LOOKUP = ToolEnvironment(ToolTask("lookup", "prices that only a tool knows", _lookup), [price], oracle=oracle)
_CHECK = Tools([check])
_FIXING = FixTask("fix", "repair a Python function after a look at its failing test", _broken, _CHECK)
FIX = Fix(_FIXING, [], tools=_CHECK, oracle=oracle)
ENVIRONMENTS: tuple[ToolEnvironment, ...] = (CALCULATOR, LOOKUP, FIX)
