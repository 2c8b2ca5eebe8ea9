"""What starts `earnest worker RUN_URL`: processes here, and clusters and clouds elsewhere."""

from earnest.diloco.executors.base import EXECUTORS, Executor, ExecutorError, Exit, Job, get_executor, supervise

__all__ = ["EXECUTORS", "Executor", "ExecutorError", "Exit", "Job", "get_executor", "supervise"]
