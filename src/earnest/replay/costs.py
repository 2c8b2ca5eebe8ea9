"""What the teachers and the judge have cost so far, over all sessions: requests, tokens, dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from earnest.replay.errors import ReplayError

if TYPE_CHECKING:
    from earnest.replay.journal import Journal, Kind
    from earnest.replay.settings import PriceConfig, ReplayConfig


@dataclass
class Account:
    """The costs of one model. ``unknown`` counts replies without a token count: they are in no sum."""

    replies: int = 0
    tries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unknown: int = 0
    dollars: float | None = None


@dataclass
class CostLedger:
    """Accounts by speaker; the judge's is called ``judge``."""

    prices: Mapping[str, PriceConfig | None]
    accounts: dict[str, Account] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ReplayConfig, journal: Journal) -> CostLedger:
        made = cls({t.label: t.price for t in config.teachers} | {"judge": config.judge.price})
        for record in journal.records("answer"):
            made.count("answer", record["key"].rsplit("|", 2)[1], record["usage"])
        for record in journal.records("verdict"):
            made.count("verdict", "judge", record["usage"])
        return made

    def count(self, kind: Kind, name: str, usage: Mapping[str, Any] | None) -> None:
        if usage is None:
            return
        price = self.prices.get("judge" if kind == "verdict" else name)
        account = self.accounts.setdefault(name, Account(dollars=None if price is None else 0.0))
        account.replies += 1
        account.tries += usage["tries"]
        if usage["prompt_tokens"] is None or usage["completion_tokens"] is None:
            account.unknown += 1
            return
        account.prompt_tokens += usage["prompt_tokens"]
        account.completion_tokens += usage["completion_tokens"]
        if price is not None and account.dollars is not None:
            account.dollars += (usage["prompt_tokens"] * price.input + usage["completion_tokens"] * price.output) / 1e6

    @property
    def dollars(self) -> float:
        return sum(account.dollars or 0.0 for account in self.accounts.values())

    def demand_budget(self, limit: float | None) -> None:
        """Call before each request. A limit that cannot be checked is an error."""
        if limit is None:
            return
        for name, account in self.accounts.items():
            if account.unknown and account.dollars is not None:
                raise ReplayError(
                    f"max_cost is ${limit:g}, but {account.unknown} of {account.replies} replies of {name} came "
                    "without their token count (usage), so their cost is unknown. Let the endpoint report usage, or "
                    "leave max_cost out; the answers so far are kept."
                )
        if self.dollars >= limit:
            raise ReplayError(
                f"${self.dollars:.4f} are spent and max_cost is ${limit:g}; raise it, and the same command continues."
            )
