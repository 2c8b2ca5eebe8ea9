"""The laws that any training step obeys, and how to check them on code that was never seen before."""

from typing import Any

from earnest.audit.own import prove as prove
from earnest.audit.own import step_of as step_of
from earnest.audit.run import audit as audit
from earnest.audit.step import Raises as Raises
from earnest.audit.step import Step as Step
from earnest.audit.step import StepError as StepError
from earnest.audit.subjects import GAE as GAE
from earnest.audit.subjects import Accumulation as Accumulation
from earnest.audit.subjects import AdvantageEstimator as AdvantageEstimator
from earnest.audit.subjects import Census as Census
from earnest.audit.subjects import Ema as Ema
from earnest.audit.subjects import Gather as Gather
from earnest.audit.subjects import Merge as Merge
from earnest.audit.subjects import MergedLayer as MergedLayer
from earnest.audit.subjects import OuterStep as OuterStep
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
from earnest.audit.watch import Watch as Watch
from earnest.audit.watch import WatchWarning as WatchWarning
from earnest.audit.watch import watch as watch


def __getattr__(name: str) -> Any:
    """``AuditCallback`` needs transformers' trainer, which is slow to import."""
    if name == "AuditCallback":
        from earnest.audit.callback import AuditCallback

        return AuditCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
