"""Gaussian ramp-up of an unsupervised term. Temporal ensembling (Laine & Aila 2017) weights the consistency term with exp(-5(1-t)^2), scales its top by labelled/all samples and sets the first epoch to exactly 0, though the formula gives exp(-5) there, because no ensemble targets exist yet."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"steps_per_epoch": "10", "ramp_epochs": "80", "top": "weight before scaling, 30.0", "labelled": "labelled samples, 4000", "samples": "all samples, 50000"}
NOTES = "Weight of a loss term, constant inside an epoch. Jump from 0 to about exp(-4.88)*top*labelled/samples at the second epoch is intended. Reaches top*labelled/samples = 2.4 at epoch 80 and stays; top is never reached itself. steps_per_epoch need not divide anything."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 1000)}
def right(step, steps_per_epoch=10, ramp_epochs=80, top=30.0, labelled=4000, samples=50000):
    epoch = step // steps_per_epoch
    if epoch == 0:
        return 0.0
    gap = 1.0 - min(epoch / ramp_epochs, 1.0)
    return top * labelled / samples * math.exp(-5.0 * gap * gap)
if __name__ == "__main__":
    v = [right(s) for s in range(1000)]
    assert set(v[:10]) == {0.0} and v[10] > 0 and abs(v[800] - 2.4) < 1e-12 and v[999] == v[800]
    assert all(a <= b for a, b in zip(v, v[1:])) and len(set(v)) == 81
    assert abs(v[400] - 2.4 * math.exp(-1.25)) < 1e-12
    print("ok", v[9], v[10], v[400], v[799], v[800])
