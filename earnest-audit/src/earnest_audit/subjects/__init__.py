"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps."""

from earnest_audit.law import Law
from earnest_audit.subjects import (
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
from earnest_audit.subjects.accumulation import Accumulation as Accumulation
from earnest_audit.subjects.adapter import AdapterStart as AdapterStart
from earnest_audit.subjects.advantages import AdvantageEstimator as AdvantageEstimator
from earnest_audit.subjects.base import Subject as Subject
from earnest_audit.subjects.census import Census as Census
from earnest_audit.subjects.collator import Collator as Collator
from earnest_audit.subjects.ema import Ema as Ema
from earnest_audit.subjects.gae import GAE as GAE
from earnest_audit.subjects.gather import Gather as Gather
from earnest_audit.subjects.merge import Merge as Merge
from earnest_audit.subjects.merged_layer import MergedLayer as MergedLayer
from earnest_audit.subjects.outer import OuterStep as OuterStep
from earnest_audit.subjects.ranks import Ranks as Ranks
from earnest_audit.subjects.resume import Resume as Resume
from earnest_audit.subjects.round_trip import RoundTrip as RoundTrip
from earnest_audit.subjects.schedule import Schedule as Schedule
from earnest_audit.subjects.sync import WeightSync as WeightSync
from earnest_audit.subjects.thinning import Unbiased as Unbiased
from earnest_audit.subjects.update import Update as Update

LAWS: tuple[Law, ...] = tuple(
    module.LAW
    for module in (
        advantages, gae, accumulation, update, round_trip, resume, merge, merged_layer, sync, outer, thinning, gather,
        ema, schedule, census, collator, ranks, adapter,
    )
)  # fmt: skip
