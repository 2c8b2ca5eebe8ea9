"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps, data, graders, chat templates, samplers, references and caches."""

from earnest_audit.subjects import (
    adapters,
    advantages,
    averages,
    data,
    gae,
    gradients,
    processes,
    sampling,
    saving,
    schedule,
)  # fmt: skip
from earnest_audit.subjects.base import Subject as Subject

SUBJECTS: tuple[type[Subject], ...] = (
    advantages.AdvantageEstimator, gae.GAE, gradients.Accumulation, gradients.Update, saving.RoundTrip, saving.Resume,
    adapters.Merge, adapters.MergedLayer, processes.WeightSync, averages.OuterStep, averages.Unbiased, processes.Gather,
    averages.Ema, schedule.Schedule, data.Census, data.Collator, processes.Ranks, adapters.AdapterStart,
    saving.FirstCall, data.ChatTemplate, data.Grader, sampling.Sampler,
)  # fmt: skip
LAWS = tuple(subject.law for subject in SUBJECTS)
