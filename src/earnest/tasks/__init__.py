"""Tasks of one turn and environments of several: prompts, graders (some are exploitable on purpose), feedback texts."""

from earnest.tasks.audit import audit_grader as audit_grader
from earnest.tasks.base import Grade as Grade
from earnest.tasks.base import Prompt as Prompt
from earnest.tasks.base import Split as Split
from earnest.tasks.base import Task as Task
from earnest.tasks.base import TaskError as TaskError
from earnest.tasks.base import TaskInfo as TaskInfo
from earnest.tasks.base import UnknownTask as UnknownTask
from earnest.tasks.environment import Ending as Ending
from earnest.tasks.environment import Environment as Environment
from earnest.tasks.environment import Message as Message
from earnest.tasks.environment import Opening as Opening
from earnest.tasks.environment import StepResult as StepResult
from earnest.tasks.environment import is_environment as is_environment
from earnest.tasks.grading import GraderErrors as GraderErrors
from earnest.tasks.grading import grade_all as grade_all
from earnest.tasks.registry import get_task as get_task
from earnest.tasks.registry import list_tasks as list_tasks
from earnest.tasks.registry import register as register
from earnest.tasks.split import PromptStream as PromptStream
