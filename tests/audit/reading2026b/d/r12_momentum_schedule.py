"""The scheduled number is Muon's momentum: it rises, stays, and falls again at the end.
0.85 to 0.95 over the first 30 steps, constant, and back to 0.85 over the last 20. It never goes to 0, the
highest value is in the middle, and after the end it stays at 0.85. Read as a learning rate it would be
far too large."""

FAMILY = 'schedules'
KIND = 'schedule'
INPUTS = {
    'step': 'optimizer step, counted from 0',
}
SETTINGS = {
    'low': '0.85',
    'high': '0.95',
    'rise': 'steps of the rise, 30',
    'fall': 'steps of the fall, 20',
    'total': 'steps of the run, 200',
}
NOTES = (
    'Momentum of the optimizer at `step`, linear between low and high: high is reached at step 30, '
    'left after step 180, low again at step 200 and later. '
)


def make(seed):
    return {"step": [0, 15, 30, 100, 180, 190, 200, 250][seed % 8]}


def right(step, low=0.85, high=0.95, rise=30, fall=20, total=200):
    up = min(1.0, step / rise)
    down = min(1.0, max(0.0, (total - step) / fall))
    return low + (high - low) * min(up, down)


if __name__ == "__main__":
    points = {0: 0.85, 15: 0.90, 30: 0.95, 100: 0.95, 180: 0.95, 190: 0.90, 200: 0.85, 250: 0.85}
    for s, v in points.items():
        print(s, right(s))
        assert abs(right(s) - v) < 1e-9
    assert all(abs(right(s + 1) - right(s)) < 0.0051 for s in range(300))
