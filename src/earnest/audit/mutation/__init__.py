"""MU: a test fails when the thing that it tests is removed. Which changes of the training code do the tests not see?"""

from earnest.audit.mutation.operators import OPERATORS as OPERATORS
from earnest.audit.mutation.run import LAW as LAW
from earnest.audit.mutation.run import Outcome as Outcome
from earnest.audit.mutation.run import Score as Score
from earnest.audit.mutation.run import score_tests as score_tests
