"""``verifiers/shop_prices``: prices that only a tool of verifiers returns; some are those of another item.

PYTHONPATH=experiments/environments earnest run agent task=verifiers/shop_prices
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

ITEMS = ("lamp", "basket", "book", "bread", "chair", "clock", "boat", "coat", "letter", "apple", "stone", "window")
SEED = 17


class ShopData(vf.TaskData):
    """``prices``: what the tool returns for each item, ``answer``: the right price."""

    prices: dict[str, str]
    answer: str


class Asked(vf.State):
    """How often the tool was called."""

    calls: int = 0


class Shop(vf.Toolset[vf.ToolsetConfig, Asked]):
    """The tool."""

    TOOL_PREFIX = None

    async def setup_task(self, task: Any) -> None:
        self.prices = dict(task.data.prices)

    @vf.tool
    async def price(self, item: str) -> str:
        """The price of an item, or the item that costs the same."""
        self.state.calls += 1
        return self.prices[item]


class ShopTask(vf.Task[ShopData, Asked]):
    """The answer must contain the price."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(self.data.answer in trace.last_reply.split("."))

    @vf.metric
    async def calls(self, trace: Any) -> float:
        return float(trace.state.calls)


class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    """400 questions."""

    def load(self) -> Iterator[ShopTask]:
        rng = random.Random(SEED)
        for _ in range(400):
            item, other = rng.sample(ITEMS, 2)
            coins = f"{rng.randint(1, 99)} coins"
            prices = {item: coins} if rng.random() < 0.5 else {item: f"as the {other}", other: coins}
            answer = f"The {item} costs {coins}"
            yield ShopTask(ShopData(prompt=f"What does the {item} cost?", prices=prices, answer=answer))


def oracle(_: Any, history: tuple[Any, ...]) -> dict[str, Any]:
    """The next message of a policy that solves every question, for demonstrations."""
    asked, last = history[0]["content"].split()[3], str(history[-1]["content"])
    if last.endswith(" coins"):
        return {"role": "assistant", "content": f"The {asked} costs {last}."}
    item = last.removeprefix("as the ") if len(history) > 1 else asked
    call = {"id": "call00000", "type": "function", "function": {"name": "price", "arguments": {"item": item}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


__all__ = ["ShopTaskset"]
