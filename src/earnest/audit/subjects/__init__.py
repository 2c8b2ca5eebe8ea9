"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps."""

from earnest.audit.law import Law
from earnest.audit.subjects import (
    accumulation,
    advantages,
    census,
    ema,
    gae,
    merge,
    persistence,
    schedule,
    update,
    weights,
)
from earnest.audit.subjects.accumulation import Accumulation as Accumulation
from earnest.audit.subjects.advantages import AdvantageEstimator as AdvantageEstimator
from earnest.audit.subjects.base import Subject as Subject
from earnest.audit.subjects.census import Census as Census
from earnest.audit.subjects.ema import Ema as Ema
from earnest.audit.subjects.gae import GAE as GAE
from earnest.audit.subjects.merge import Merge as Merge
from earnest.audit.subjects.merge import MergedLayer as MergedLayer
from earnest.audit.subjects.outer import OuterStep as OuterStep
from earnest.audit.subjects.persistence import Resume as Resume
from earnest.audit.subjects.persistence import RoundTrip as RoundTrip
from earnest.audit.subjects.schedule import Schedule as Schedule
from earnest.audit.subjects.update import Update as Update
from earnest.audit.subjects.weights import Gather as Gather
from earnest.audit.subjects.weights import Unbiased as Unbiased
from earnest.audit.subjects.weights import WeightSync as WeightSync

LAWS: tuple[Law, ...] = (
    advantages.LAW, gae.LAW, accumulation.LAW, update.LAW, *persistence.LAWS, *merge.LAWS, *weights.LAWS, ema.LAW,
    schedule.LAW, census.LAW,
)  # fmt: skip
