"""A schedule over three training stages that jumps up at each border. Each stage warms up again from the LR the stage
before ended with, to a lower peak, and decays linearly to a floor that is the start of the next stage. The LR rises three
times, is above zero at step 0, and stays at the last floor after the end. Meant so for continued pre-training."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step over all stages, from 0"}
SETTINGS = {"peaks": "peak LR of the stages, (1e-3, 4e-4, 1e-4)", "floors": "LR before the first stage and at the end of each, (1e-5, 1e-4, 4e-5, 1e-5)",
            "lengths": "steps of the stages, (100, 60, 40)", "warmup": "warmup steps of each stage, 10 (less than each length)"}
NOTES = "Piecewise linear and continuous; not monotone by design. After the last stage the LR stays at the last floor."


def make(seed):
    return {"step": [105, 0, 169, 230][seed % 4]}


def right(step, peaks=(1e-3, 4e-4, 1e-4), floors=(1e-5, 1e-4, 4e-5, 1e-5), lengths=(100, 60, 40), warmup=10):
    for k, length in enumerate(lengths):
        if step < length:
            if step < warmup:
                return floors[k] + (peaks[k] - floors[k]) * step / warmup
            return peaks[k] + (floors[k + 1] - peaks[k]) * (step - warmup) / (length - warmup)
        step -= length
    return floors[-1]


if __name__ == "__main__":
    curve = [right(s) for s in range(230)]
    print([f"{curve[s]:.2e}" for s in (0, 10, 99, 100, 110, 159, 160, 170, 199, 200, 229)])
    assert abs(curve[10] - 1e-3) < 1e-12 and abs(curve[110] - 4e-4) < 1e-12 and abs(curve[170] - 1e-4) < 1e-12
    assert max(abs(a - b) for a, b in zip(curve, curve[1:])) < 1.1e-4 and curve[-1] == 1e-5
    assert right(**make(0)) == curve[105]
