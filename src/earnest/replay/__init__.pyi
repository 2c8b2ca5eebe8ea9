from earnest.replay.pairs import Pair as Pair
from earnest.replay.pipeline import Replayed as Replayed
from earnest.replay.pipeline import replay as replay
from earnest.replay.settings import ReplayConfig as ReplayConfig
from earnest.replay.traces import Trace as Trace
