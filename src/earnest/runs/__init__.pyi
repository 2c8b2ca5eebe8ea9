from earnest.runs.folder import RunFolder as RunFolder
from earnest.runs.lifecycle import Finished as Finished
from earnest.runs.lifecycle import check as check
from earnest.runs.lifecycle import replay as replay
from earnest.runs.lifecycle import resume as resume
from earnest.runs.lifecycle import start as start
from earnest.runs.training import train as train
