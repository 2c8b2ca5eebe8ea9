from earnest.config.replay import ReplayConfig as ReplayConfig
from earnest.replay.pairs import Pair as Pair
from earnest.replay.run import Replayed as Replayed
from earnest.replay.run import replay as replay
from earnest.replay.traces import Trace as Trace
