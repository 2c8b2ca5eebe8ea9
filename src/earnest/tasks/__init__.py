"""Tasks of one turn and environments of several: prompts, graders (some are exploitable on purpose), feedback texts."""

from earnest.tasks.audit import audit_grader
from earnest.tasks.base import Grade, Prompt, Split, Task, TaskError, TaskInfo, UnknownTask
from earnest.tasks.environment import Ending, Environment, Message, Opening, StepResult, is_environment
from earnest.tasks.grading import GraderErrors, grade_all
from earnest.tasks.registry import get_task, list_tasks, register
from earnest.tasks.split import PromptStream

__all__ = [
    "Ending",
    "Environment",
    "Grade",
    "GraderErrors",
    "Message",
    "Opening",
    "Prompt",
    "PromptStream",
    "Split",
    "StepResult",
    "Task",
    "TaskError",
    "TaskInfo",
    "UnknownTask",
    "audit_grader",
    "get_task",
    "grade_all",
    "is_environment",
    "list_tasks",
    "register",
]
