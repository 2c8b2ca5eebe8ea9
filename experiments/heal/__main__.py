"""``python -m experiments.heal results.json [figure.png]``: the tables, and the figure where one is named."""

import sys
from pathlib import Path

from experiments.heal.figure import draw
from experiments.heal.run import read_results
from experiments.heal.table import tables

found = read_results(Path(sys.argv[1]))
print(tables(found), end="")
if len(sys.argv) > 2:
    draw(found, Path(sys.argv[2]))
