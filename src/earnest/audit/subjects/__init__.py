"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps."""

from earnest.audit.law import Law
from earnest.audit.subjects import accumulation, advantages, census, persistence, schedule, weights
from earnest.audit.subjects.accumulation import Accumulation as Accumulation
from earnest.audit.subjects.advantages import AdvantageEstimator as AdvantageEstimator
from earnest.audit.subjects.base import Subject as Subject
from earnest.audit.subjects.census import Census as Census
from earnest.audit.subjects.persistence import Resume as Resume
from earnest.audit.subjects.persistence import RoundTrip as RoundTrip
from earnest.audit.subjects.schedule import Schedule as Schedule
from earnest.audit.subjects.weights import Gather as Gather
from earnest.audit.subjects.weights import Merge as Merge
from earnest.audit.subjects.weights import OuterStep as OuterStep
from earnest.audit.subjects.weights import Unbiased as Unbiased
from earnest.audit.subjects.weights import WeightSync as WeightSync

LAWS: tuple[Law, ...] = (
    advantages.LAW, accumulation.LAW, *persistence.LAWS, *weights.LAWS, schedule.LAW, census.LAW,
)  # fmt: skip
