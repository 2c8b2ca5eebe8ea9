"""The laws that every correct training step obeys, and how to check them on code that was never seen before.

Imports torch and numpy and no other package of earnest. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.audit.callback import AuditCallback as AuditCallback
    from earnest.audit.executor import audit as audit
    from earnest.audit.facts import Metric as Metric
    from earnest.audit.facts import Setting as Setting
    from earnest.audit.step import Active as Active
    from earnest.audit.step import Raises as Raises
    from earnest.audit.step import Step as Step
    from earnest.audit.step import StepError as StepError
    from earnest.audit.subjects import GAE as GAE
    from earnest.audit.subjects import Accumulation as Accumulation
    from earnest.audit.subjects import AdapterStart as AdapterStart
    from earnest.audit.subjects import AdvantageEstimator as AdvantageEstimator
    from earnest.audit.subjects import Census as Census
    from earnest.audit.subjects import Collator as Collator
    from earnest.audit.subjects import Ema as Ema
    from earnest.audit.subjects import Gather as Gather
    from earnest.audit.subjects import Merge as Merge
    from earnest.audit.subjects import MergedLayer as MergedLayer
    from earnest.audit.subjects import OuterStep as OuterStep
    from earnest.audit.subjects import Ranks as Ranks
    from earnest.audit.subjects import Resume as Resume
    from earnest.audit.subjects import RoundTrip as RoundTrip
    from earnest.audit.subjects import Schedule as Schedule
    from earnest.audit.subjects import Subject as Subject
    from earnest.audit.subjects import Unbiased as Unbiased
    from earnest.audit.subjects import Update as Update
    from earnest.audit.subjects import WeightSync as WeightSync
    from earnest.audit.together import Together as Together
    from earnest.audit.verdict import Finding as Finding
    from earnest.audit.verdict import LawBroken as LawBroken
    from earnest.audit.verdict import Verdict as Verdict
    from earnest.audit.watcher import Watch as Watch
    from earnest.audit.watcher import WatchWarning as WatchWarning
    from earnest.audit.watcher import watch as watch

_HOME = {
    "callback": ("AuditCallback",),
    "executor": ("audit",),
    "facts": ("Metric", "Setting"),
    "step": ("Active", "Raises", "Step", "StepError"),
    "subjects": ("GAE", "Accumulation", "AdapterStart", "AdvantageEstimator", "Census", "Collator", "Ema", "Gather",
                 "Merge", "MergedLayer", "OuterStep", "Ranks", "Resume", "RoundTrip", "Schedule", "Subject", "Unbiased",
                 "Update", "WeightSync"),
    "together": ("Together",),
    "verdict": ("Finding", "LawBroken", "Verdict"),
    "watcher": ("Watch", "WatchWarning", "watch"),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)  # noqa: PLE0605  (the names resolve lazily)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
    globals()[name] = value
    return value
