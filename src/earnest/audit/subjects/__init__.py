"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps."""

from earnest.audit.law import Law
from earnest.audit.subjects import (
    accumulation,
    adapter,
    advantages,
    census,
    collator,
    ema,
    gae,
    gather,
    merge,
    merged_layer,
    outer,
    ranks,
    resume,
    round_trip,
    schedule,
    sync,
    thinning,
    update,
)
from earnest.audit.subjects.accumulation import Accumulation as Accumulation
from earnest.audit.subjects.adapter import AdapterStart as AdapterStart
from earnest.audit.subjects.advantages import AdvantageEstimator as AdvantageEstimator
from earnest.audit.subjects.base import Subject as Subject
from earnest.audit.subjects.census import Census as Census
from earnest.audit.subjects.collator import Collator as Collator
from earnest.audit.subjects.ema import Ema as Ema
from earnest.audit.subjects.gae import GAE as GAE
from earnest.audit.subjects.gather import Gather as Gather
from earnest.audit.subjects.merge import Merge as Merge
from earnest.audit.subjects.merged_layer import MergedLayer as MergedLayer
from earnest.audit.subjects.outer import OuterStep as OuterStep
from earnest.audit.subjects.ranks import Ranks as Ranks
from earnest.audit.subjects.resume import Resume as Resume
from earnest.audit.subjects.round_trip import RoundTrip as RoundTrip
from earnest.audit.subjects.schedule import Schedule as Schedule
from earnest.audit.subjects.sync import WeightSync as WeightSync
from earnest.audit.subjects.thinning import Unbiased as Unbiased
from earnest.audit.subjects.update import Update as Update

LAWS: tuple[Law, ...] = tuple(
    module.LAW
    for module in (
        advantages, gae, accumulation, update, round_trip, resume, merge, merged_layer, sync, outer, thinning, gather,
        ema, schedule, census, collator, ranks, adapter,
    )
)  # fmt: skip
