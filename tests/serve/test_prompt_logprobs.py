"""Log-probs of a prompt in vLLM's form, and the teacher that reads them from a real server."""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.config import from_mapping
from earnest.engines import LocalEngine
from earnest.engines.endpoint_teacher import ServedTeacher
from earnest.engines.model_teacher import ModelTeacher
from earnest.errors import ConfigError, SignalError
from earnest.models import Policy
from earnest.objectives import SDPO, TAID, Distill, EntropyAware, Objective
from earnest.signals import Batch, TopK, with_teacher
from tests.engines.conftest import perturb, tiny_policy
from tests.serve.conftest import Live

IDS = [5, 60, 71, 9, 200]


@pytest.fixture(scope="module")
def nano(live: Live) -> Policy:
    live.state.wait()  # transformers does not load two models at once in two threads
    return en.load("nano")


def reference(policy: Policy, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)  # type: ignore[operator, no-any-return]


def test_every_prompt_token_has_its_top_k_and_itself(live: Live, nano: Policy) -> None:
    body = {"model": "base", "prompt": [IDS, IDS[:1]], "max_tokens": 0, "prompt_logprobs": 3}
    found = live.post("/v1/completions", body)
    first, second = (choice["prompt_logprobs"] for choice in found["choices"])
    assert first[0] is None and second == [None] and [c["text"] for c in found["choices"]] == ["", ""]
    lp = reference(nano, IDS)
    for place, entry in enumerate(first[1:], 1):
        top = lp[place - 1].topk(3).indices.tolist()
        assert set(entry) == {str(t) for t in (*top, IDS[place])}
        for token, given in entry.items():
            assert given["logprob"] == pytest.approx(float(lp[place - 1, int(token)]), abs=1e-4)
            assert given["rank"] == 1 + int((lp[place - 1] > lp[place - 1, int(token)]).sum())


def test_prompt_logprobs_come_with_a_completion_too_and_are_bounded(live: Live) -> None:
    body = {"model": "base", "prompt": IDS, "max_tokens": 2, "n": 2, "prompt_logprobs": 0, "temperature": 0}
    one, two = live.post("/v1/completions", body)["choices"]
    assert (
        one["prompt_logprobs"] == two["prompt_logprobs"] and list(one["prompt_logprobs"][1]) == ["60"] and one["text"]
    )
    live.post("/v1/completions", {**body, "prompt_logprobs": 1025}, 400)
    live.post("/v1/completions", {**body, "stream": True}, 400)
    live.post("/v1/completions", {**body, "prompt": [5, 1_000_000], "max_tokens": 0}, 400)


# --- the teacher ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(nano: Policy) -> LocalEngine:
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=2), seed=0)
    perturb(adapter, size=0.3)
    return LocalEngine(policy, adapter, en.AdamW(lr=1e-3))


ROWS = Batch.from_rows([[3, 4], [5, 60, 7]], [[8, 9, 10], [12, 1]], behaviour=[[-3.0] * 3, [-2.0] * 2])


@pytest.mark.parametrize("term", [Distill, SDPO, TAID, EntropyAware])
def test_an_endpoint_teaches_as_the_same_model_here_does(
    live: Live, engine: LocalEngine, nano: Policy, term: type[Distill]
) -> None:
    """The server's base is nano: its top K, tail and the loss equal those of nano in this process."""
    objective = Objective.of(term(support="teacher", top_k=20))
    teacher = ServedTeacher.connect(engine.policy, objective, live.url, key="NO_SUCH_KEY")
    assert teacher.top_k == 20 and teacher.reads == ("feedback" if term is SDPO else "student")
    remote = with_teacher(engine, ROWS, None, teacher)
    local = with_teacher(engine, ROWS, None, ModelTeacher(nano, "teacher", 20))
    assert remote.teacher is not None and local.teacher is not None
    a, b = remote.teacher.distribution, local.teacher.distribution
    assert isinstance(a, TopK) and isinstance(b, TopK) and torch.equal(a.ids.sort().values, b.ids.sort().values)
    torch.testing.assert_close(a.tail.exp(), b.tail.exp(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(remote.teacher.logprobs, local.teacher.logprobs, rtol=0, atol=1e-4)
    values = []
    for batch in (remote, local):
        state = objective.initial_state()
        objective.check(batch)
        found = objective.evaluate(batch, engine.scalars(batch, objective.needs(batch, state)), state)
        values.append(found.loss.item())
        (metrics,) = (value.metrics for value in found.values.values())
        stated = metrics["covered_mass_source"].value
        assert stated == pytest.approx(float(b.logprobs.double().exp().sum(-1).mean()), abs=1e-5), "the tail is stated"
        assert 0.3 < stated < 1 and metrics["tail_error_bound"].value < 0.05
    assert values[0] == pytest.approx(values[1], rel=1e-4) and values[0] > 1e-3


def test_an_endpoint_is_refused_where_its_top_k_is_not_enough(
    live: Live, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for term in (Distill(), SDPO()):
        with pytest.raises(
            ConfigError, match=rf"{term.kind} compares on support .*; set support: teacher and top_k: 20"
        ):
            ServedTeacher.connect(engine.policy, Objective.of(term), live.url)
    wide = Objective.of(Distill(support="teacher", top_k=2000))
    teacher = ServedTeacher.connect(engine.policy, wide, live.url)
    with pytest.raises(SignalError, match=r"refused with HTTP 400.*top_k 2000: lower it, or start vLLM with"):
        with_teacher(engine, ROWS, None, teacher)
    odd = ServedTeacher(live.url, 5)
    assert odd._served == ("base", True)
    for answer in ({"choices": []}, {"choices": [{}, {}]}, "busy"):
        with monkeypatch.context() as patch:
            patch.setattr(ServedTeacher, "_call", lambda *_, answer=answer: answer)
            with pytest.raises(SignalError, match="answered without a completion"):
                odd.scores(IDS)
    with pytest.raises(ConfigError, match=r"teacher.model: .* has no 'other'; it has base"):
        ServedTeacher(live.url, 5, model="other").scores(IDS)
    gone = ServedTeacher("http://127.0.0.1:9", 5)
    gone._http.backoff = 0.001
    with pytest.raises(SignalError, match=r"failed \d times.*Is it running\?"):
        gone.scores(IDS)


def test_an_endpoint_with_another_tokenizer_is_refused_by_its_first_differing_token(live: Live) -> None:
    live.state.wait()
    with pytest.raises(ConfigError, match=r"has another tokenizer than tiny: token 1 of 'The 12 quick .*same family"):
        ServedTeacher(live.url, 5).check_tokenizer(tiny_policy())


def test_a_recipe_with_an_endpoint_trains(live: Live) -> None:
    live.state.wait()
    from earnest.runs.collect import BatchSource
    from earnest.runs.setup import build

    config = from_mapping(
        {
            "model": "nano",
            "task": "sort",
            "adapter": {"kind": "lora", "rank": 4},
            "objective": [{"kind": "distill", "support": "teacher", "top_k": 8}],
            "teacher": {"kind": "endpoint", "url": live.url},
            "sampling": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 4},
            "steps": 1,
            "threads": 1,
        }
    )
    setup = build(config, lambda _: None)
    batch = BatchSource(setup).next(1).batch
    assert setup.engine.step(batch, setup.objective).loss == pytest.approx(0.0, abs=1e-4), "the student is the teacher"
