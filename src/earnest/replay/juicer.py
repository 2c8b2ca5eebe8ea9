"""data-juicer's operators as a backend, kept from installing anything.

Problems of py-data-juicer 1.6.1 that this file avoids: missing imports are installed at run time, torch included; an
operator that raises drops its whole batch where ``skip_op_error`` is on; the MinHash operator treats all texts shorter
than its window as duplicates of each other, and its default bands import scipy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from earnest.errors import MissingExtra
from earnest.replay.errors import CleaningError
from earnest.replay.filters import DUPLICATES, FilterResult, Op

OPERATORS = {
    "text_length": ("text_length_filter", "text_len", "len"),
    "words": ("words_num_filter", "num_words", "num"),
    "special_characters": ("special_characters_filter", "special_char_ratio", "ratio"),
    "character_repetition": ("character_repetition_filter", "char_rep_ratio", "ratio"),
    "word_repetition": ("word_repetition_filter", "word_rep_ratio", "ratio"),
}
"""Ours → its module, the key of its statistic, and the name of its bounds after min_ and max_."""
PERMUTATIONS = 256


def installed() -> bool:
    from importlib.util import find_spec

    return find_spec("data_juicer") is not None


class Juicer:
    """The operators one at a time, without data-juicer's executor."""

    name = "data-juicer"

    def __init__(self) -> None:
        forbid_installs()

    def judge(self, op: Op, texts: Sequence[str]) -> list[FilterResult]:
        return (self._repeats if op.op in DUPLICATES else self._measure)(op, list(texts))

    def _measure(self, op: Op, texts: list[str]) -> list[FilterResult]:
        module, key, unit = OPERATORS[op.op]
        limits = {f"{end}_{unit}": value for end, value in (("min", op.low), ("max", op.high)) if math.isfinite(value)}
        values = {name: value if unit == "ratio" else int(value) for name, value in limits.items()}
        if op.op.endswith("_repetition"):
            values["rep_len"] = op.n
        operator = _operator("filter", module, values)
        batch = operator.compute_stats_batched({"text": texts, "__dj__stats__": [{} for _ in texts]})
        kept = list(operator.process_batched(batch))
        stats = batch["__dj__stats__"]
        if len(kept) != len(texts) or any(key not in stat for stat in stats):
            raise CleaningError(
                f"{op.op}: data-juicer answered {len(kept)} times on {len(texts)} texts; nothing was kept."
            )
        return [FilterResult(bool(keep), float(stat[key])) for keep, stat in zip(kept, stats, strict=True)]

    def _repeats(self, op: Op, texts: list[str]) -> list[FilterResult]:
        datasets: Any = import_module("datasets")
        datasets.disable_caching()
        datasets.disable_progress_bars()
        if op.op == "exact_duplicates":
            operator = _operator("deduplicator", "document_deduplicator", {})
            mine = list(range(len(texts)))
        else:
            bands, rows = lsh_bands(op.threshold, PERMUTATIONS)
            wanted = {"tokenization": "character", "window_size": op.n, "jaccard_threshold": op.threshold}
            wanted |= {"num_permutations": PERMUTATIONS, "num_bands": bands, "num_rows_per_band": rows}
            operator = _operator("deduplicator", "document_minhash_deduplicator", wanted)
            # shorter ones would all count as duplicates
            mine = [i for i, text in enumerate(texts) if len(text) >= op.n]
        rows_in = [operator.compute_hash({"text": texts[i]}) | {"place": i} for i in mine]
        if not rows_in:
            return [FilterResult(True) for _ in texts]
        survivors, _ = operator.process(datasets.Dataset.from_list(rows_in))
        kept = set(survivors["place"])
        judged = set(mine)
        return [FilterResult(i not in judged or i in kept) for i in range(len(texts))]


def _operator(family: str, module: str, settings: dict[str, Any]) -> Any:
    found = getattr(import_module(f"data_juicer.ops.{family}.{module}"), module.title().replace("_", ""))
    return found(**settings, skip_op_error=False)


def lsh_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows): the split whose steepest point (1/b)^(1/r) is nearest to the threshold."""
    splits = [(permutations // rows, rows) for rows in range(1, permutations + 1)]
    return min(splits, key=lambda split: abs((1 / split[0]) ** (1 / split[1]) - threshold))


def forbid_installs() -> None:
    """Make a package that data-juicer misses an error instead of a download."""
    os.environ.update(UV_OFFLINE="1", PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    try:
        from data_juicer.utils.lazy_loader import LazyLoader
    except ImportError as error:
        if installed():
            raise CleaningError(f"data-juicer is installed but does not import: {error}.") from None
        raise MissingExtra("py-data-juicer", "juicer", "cleaning with data-juicer") from None

    def refuse(_: type, package: Any = None, *_more: Any, **_options: Any) -> None:
        raise CleaningError(
            f"data-juicer tries to install {package!r} while it runs, which earnest does not allow; install it "
            "yourself, or clean with cleaner=built-in."
        )

    for name in ("_install_package", "check_packages"):
        if not hasattr(LazyLoader, name):
            raise CleaningError(
                f"this data-juicer has no LazyLoader.{name}, so its installs cannot be stopped; use 1.6."
            )
        setattr(LazyLoader, name, classmethod(refuse))
