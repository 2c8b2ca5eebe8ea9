"""A schedule that ends with a frozen teacher. BYOL and DINO average the teacher with a momentum that rises along a cosine
from 0.99 to exactly 1.0: at the last step the teacher does not move any more. It grows while learning rates fall, and it
has no warmup."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "training step, 0 ... total"}
SETTINGS = {"base": "momentum at step 0, 0.99", "total": "training steps, 500"}
NOTES = ("Momentum m of the teacher: teacher = m * teacher + (1 - m) * student. m = 1 - (1 - base) * (cos(pi * step / total) "
         "+ 1) / 2, non-decreasing, base at 0, exactly 1 at total and after it.")


def make(seed):
    return {"step": seed % 500}


def right(step, base=0.99, total=500):
    return 1 - (1 - base) * (math.cos(math.pi * min(step, total) / total) + 1) / 2


if __name__ == "__main__":
    ms = [right(t) for t in range(501)]
    print(ms[0], ms[125], ms[250], ms[375], ms[500])
    assert abs(ms[0] - 0.99) < 1e-12 and ms[500] == 1.0 and abs(ms[250] - 0.995) < 1e-12
    assert all(a <= b for a, b in zip(ms, ms[1:]))
    teacher, student = 0.0, 1.0
    for m in ms:
        teacher = m * teacher + (1 - m) * student
    print("teacher after 501 steps with a constant student", teacher)
    assert 0.9 < teacher < 1
