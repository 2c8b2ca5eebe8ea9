from earnest.models.catalog import ModelInfo as ModelInfo
from earnest.models.catalog import list_models as list_models
from earnest.models.loading import load as load
from earnest.models.policy import HeadSpec as HeadSpec
from earnest.models.policy import Policy as Policy
from earnest.models.sampling import Completion as Completion
from earnest.models.sampling import SampleSpec as SampleSpec
from earnest.models.slots import sample as sample
