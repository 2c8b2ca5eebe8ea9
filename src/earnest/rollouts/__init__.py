"""Rollouts: sampled and graded completions and conversations, and the only way from prompts to a batch."""

from earnest.rollouts.attempts import Attempt as Attempt
from earnest.rollouts.attempts import describe as describe
from earnest.rollouts.attempts import reward_summary as reward_summary
from earnest.rollouts.collecting import Rollouts as Rollouts
from earnest.rollouts.collecting import collect as collect
from earnest.rollouts.collecting import graded as graded
from earnest.rollouts.collecting import teacher_prompts as teacher_prompts
from earnest.rollouts.conversing import TurnSettings as TurnSettings
from earnest.rollouts.rollout import Rollout as Rollout
from earnest.rollouts.rows import Row as Row
from earnest.rollouts.rows import batch_of as batch_of
from earnest.rollouts.rows import demonstrate as demonstrate
from earnest.rollouts.rows import demonstration as demonstration
from earnest.rollouts.trajectory import Segment as Segment
from earnest.rollouts.trajectory import Trajectory as Trajectory
from earnest.rollouts.transcript import rewrites_history as rewrites_history
