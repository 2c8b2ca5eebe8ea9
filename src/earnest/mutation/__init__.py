"""Mutation testing of training code: which changes of the code do its tests not detect? (``earnest audit --tests``)"""

from earnest.mutation.operators import OPERATORS as OPERATORS
from earnest.mutation.score import Outcome as Outcome
from earnest.mutation.score import Score as Score
from earnest.mutation.score import score_tests as score_tests
