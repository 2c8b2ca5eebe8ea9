"""Mutants of every package of earnest, each under the tests that execute the changed line.

python -m scripts.mutants.coverage tests/runs tests/data …     which test executes which line (once per test folder)
python -m scripts.mutants.judge runs data …                    the mutants of these packages; continues where it stopped
python -m scripts.mutants.table                                the scores and the survivors, as markdown
python -m scripts.mutants.redundant TEST…                      which mutants only this (slow) test kills
"""
