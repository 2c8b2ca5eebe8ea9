"""Padding of the distributed sampler is counted in the metric. roboflow/rf-detr#1507, https://github.com/roboflow/rf-detr/issues/1507, 2026.
The evaluation sampler repeats the first images so that every rank gets the same number. The merge of the ranks' metric state concatenated all of it without dropping
the repeats, so up to world size - 1 images were counted twice and the reported mAP depended on the number of GPUs. The older evaluator kept the first report of an image only."""
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one list per rank of images as evaluated there: dicts with image_id, found (scored detections: (score, is it right)) and objects (number of true objects)"}
SETTINGS = {}
NOTES = "Average precision over all images of the split, each image once: detections of all images sorted by score, area under precision and recall. The single-process twin is `single` on the split without padding."


def make(seed, images=7, world=3):
    r = random.Random(seed)
    split = [{"image_id": i, "found": [(r.random(), r.random() < 0.5) for _ in range(r.randrange(1, 5))], "objects": r.randrange(2, 5)} for i in range(images)]
    order = split + split[:-len(split) % world]
    return {"per_rank": [order[k::world] for k in range(world)]}


def average_precision(images):
    found = sorted((x for im in images for x in im["found"]), reverse=True)
    total, hits, area = sum(im["objects"] for im in images), 0, 0.0
    for k, (_, ok) in enumerate(found, 1):
        if ok:
            hits += 1
            area += hits / k / total
    return area


def broken(per_rank):
    return average_precision([im for rank in per_rank for im in rank])


def right(per_rank):
    first = {}
    for rank in per_rank:
        for im in rank:
            first.setdefault(im["image_id"], im)
    return average_precision(list(first.values()))


def single(per_rank):
    split = {im["image_id"]: im for rank in per_rank for im in rank}
    return average_precision([split[i] for i in sorted(split)])


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-12 and abs(broken(**d) - single(**d)) > 1e-4
