"""The tables of docs/evidence: one module and one command each.

    python -m experiments.evidence.replicas                 what is missing is trained; then JSON, tables and figure
    python -m experiments.evidence.replicas --only seed0    only the jobs whose name contains this text
    python -m experiments.evidence.replicas --table         the tables of the stored results; nothing is trained

A table is made of jobs. Each finished job is one JSON file under ``--out`` (runs/evidence/NAME), and a second call
keeps it. ``experiments/results/NAME.json`` has all finished jobs and the names of the missing ones.
"""
