"""The processor time that the experiments took.

    python -m experiments.evidence.spent

It is the time of the processes of each job, with loading and evaluations. Jobs whose time was not recorded are counted
with the mean of their table.
"""

from __future__ import annotations

import json
import statistics

from experiments.evidence.jobs import RESULTS, table

TABLES = ("learn", "channels", "route", "onset", "guards", "healing", "replicas")


def main() -> None:
    rows: list[list[object]] = []
    total = 0.0
    for name in TABLES:
        jobs = json.loads((RESULTS / f"{name}.json").read_text())["jobs"]
        known = [job["cpu_seconds"] / 60 for job in jobs if "cpu_seconds" in job]
        hours = statistics.mean(known) * len(jobs) / 60 if known else 0.0
        total += hours
        each = f"{statistics.median(known):.1f} ({min(known):.1f} to {max(known):.1f})" if known else "not recorded"
        rows.append([name, len(jobs), len(known), each, f"{hours:.1f}"])
    rows.append(["all", sum(int(str(row[1])) for row in rows), "", "", f"{total:.1f}"])
    print(table(["table", "jobs", "with a recorded time", "CPU minutes per job, median", "core-hours in all"], rows))


if __name__ == "__main__":
    main()
