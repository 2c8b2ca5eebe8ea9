"""What is not a loss and still has laws: advantages, accumulation, save and resume, merge, sync, schedules, outer
steps, data, graders, chat templates, references and caches."""

from importlib import import_module

from earnest_audit.law import Law
from earnest_audit.subjects.base import Subject as Subject

MODULES = (
    "advantages gae accumulation update round_trip resume merge merged_layer sync outer thinning gather ema schedule "
    "census collator ranks adapter first_call chat_template grader"
)
LAWS: tuple[Law, ...] = tuple(import_module(f"{__name__}.{name}").LAW for name in MODULES.split())
