from earnest.runs.folder import RunFolder as RunFolder
from earnest.runs.run import Finished as Finished
from earnest.runs.run import check as check
from earnest.runs.run import resume as resume
from earnest.runs.run import start as start
from earnest.runs.training import train as train
