"""``earnest plan``: predict memory, work and communication of a run before anything is loaded. The model is built
from its config with fake tensors, which have shapes and no values."""

from earnest.plan.advice import MemoryPlan as MemoryPlan
from earnest.plan.advice import Suggestion as Suggestion
from earnest.plan.advice import plan as plan
from earnest.plan.memory import Device as Device
from earnest.plan.memory import Memory as Memory
