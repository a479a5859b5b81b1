from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from herder.config.run import EngineConfig
from herder.engine.request import (
    PromptScored,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from herder.engine.runner import Runner
from herder.errors import RequestError
from herder.model.decoder import Decoder
from herder.model.readout import LossReadout
from tests.engine_runs import run
from tests.reference_attend import ReferenceAttend

PROMPT = [5, 17, 3, 42, 8]
Answers = Callable[..., object]


def full_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """logits_TV of one whole forward with the plain attention: the oracle."""
    attend = ReferenceAttend([len(ids)])
    with torch.no_grad():
        return decoder(torch.tensor(ids), positions_T=torch.arange(len(ids)), attend=attend)


def greedy(decoder: Decoder, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens, each from a forward over everything before it."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(full_logits(decoder, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def test_greedy_tokens_equal_those_of_whole_forwards(answer: Answers, decoder: Decoder) -> None:
    assert answer(PROMPT, max_tokens=24, temperature=0).ids == greedy(decoder, PROMPT, 24)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_the_answer_does_not_depend_on_the_chunk_size(
    chunk: int, answer: Answers, decoder: Decoder
) -> None:
    prompt = [(7 * index) % 64 for index in range(29)]
    expected = answer(prompt, max_tokens=8, seed=1, logprobs=3)
    config = EngineConfig(max_num_batched_tokens=chunk)
    runner = Runner(decoder, window_tokens=64, eos_token_ids=(), config=config)
    (made,) = run(runner, Request(prompt, SamplingParams(max_tokens=8, seed=1, logprobs=3)))
    assert made.ids == expected.ids
    for one, other in zip(made.events[:-1], expected.events[:-1], strict=True):
        assert abs(one.logprobs.chosen.logprob - other.logprobs.chosen.logprob) < 1e-5


def test_an_answer_does_not_depend_on_the_one_before(answer: Answers) -> None:
    first = answer(PROMPT, max_tokens=10, seed=4).ids
    answer([60] * 50, max_tokens=30, seed=9)
    assert answer(PROMPT, max_tokens=10, seed=4).ids == first


def test_the_length_is_the_smaller_of_what_was_asked_and_what_the_window_leaves(
    answer: Answers,
) -> None:
    done = answer(PROMPT, max_tokens=3)
    assert (len(done.ids), done.last.reason, done.last.num_completion_tokens) == (3, "length", 3)
    filled = answer(PROMPT)
    assert (len(filled.ids), filled.last.reason) == (96 - len(PROMPT), "length")


def test_any_of_the_ends_of_text_ends_the_answer(decoder: Decoder, answer: Answers) -> None:
    ids = answer(PROMPT, max_tokens=12, temperature=0).ids
    end = ids[5]
    runner = Runner(decoder, window_tokens=96, eos_token_ids=(end, 64 - 1 - end))

    def events_of(**fields: object) -> list[object]:
        return run(runner, Request(PROMPT, SamplingParams(temperature=0, **fields)))[0].events

    events = events_of(max_tokens=12)
    assert [event.token_id for event in events[:-1]] == ids[: ids.index(end) + 1]
    assert (events[-1].reason, events[-1].stopped_by) == ("stop", end)
    assert events_of(max_tokens=12, ignore_eos=True)[-1].reason == "length"


def test_a_stop_id_ends_the_answer_without_its_text(answer: Answers) -> None:
    ids = answer(PROMPT, max_tokens=12, temperature=0).ids
    stop = ids[4]
    before = ids[: ids.index(stop)]
    done = answer(PROMPT, text=True, max_tokens=12, temperature=0, stop_token_ids=(stop,))
    assert done.ids == [*before, stop]
    assert done.text == "".join(f"{token_id} " for token_id in before)
    assert (done.last.reason, done.last.stopped_by) == ("stop", stop)
    shown = answer(
        PROMPT,
        text=True,
        max_tokens=12,
        temperature=0,
        stop_token_ids=(stop,),
        include_stop_str_in_output=True,
    )
    assert shown.text == done.text + f"{stop} "


def test_a_stop_string_ends_the_answer_and_is_not_shown(answer: Answers) -> None:
    ids = answer(PROMPT, max_tokens=12, temperature=0).ids
    whole = "".join(f"{token_id} " for token_id in ids)
    stop = f"{ids[5]} {ids[6]}"
    done = answer(PROMPT, text=True, max_tokens=12, temperature=0, stop=(stop,))
    assert done.text == whole[: whole.index(stop)]
    assert (done.last.reason, done.last.stopped_by) == ("stop", stop)
    assert done.last.num_completion_tokens == len(done.ids)


def test_a_shortest_answer_hides_every_kind_of_end(answer: Answers) -> None:
    ids = answer(PROMPT, max_tokens=12, temperature=0).ids
    done = answer(
        PROMPT,
        text=True,
        max_tokens=12,
        min_tokens=6,
        temperature=0,
        stop=(" ",),
        stop_token_ids=(ids[0], ids[3]),
    )
    assert done.last.num_completion_tokens == 7
    assert not {ids[0], ids[3]} & set(done.ids[:6])


def test_text_held_to_the_end_is_told_with_the_end(answer: Answers) -> None:
    bias = {63: 100.0}
    done = answer(PROMPT, text=True, max_tokens=3, temperature=0, logit_bias=bias)
    assert [event.text for event in done.events] == ["", "", "", "63 63 63 "]
    stopped = answer(PROMPT, text=True, max_tokens=3, temperature=0, logit_bias=bias, stop=("63 ",))
    assert (stopped.text, stopped.last.reason) == ("", "stop")


def test_logprobs_equal_those_of_the_training_forward(answer: Answers, decoder: Decoder) -> None:
    done = answer(PROMPT, max_tokens=10, seed=3, temperature=1.5, top_k=9, logprobs=2)
    ids = PROMPT + done.ids
    expected = full_logits(decoder, ids).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for event, row in zip(done.events[:-1], expected, strict=True):
        assert event.logprobs.chosen.logprob == pytest.approx(row[event.token_id].item(), abs=1e-5)
        assert [top.token_id for top in event.logprobs.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 90])
def test_a_prompt_is_scored_as_the_training_forward_scores_it(
    length: int, answer: Answers, decoder: Decoder
) -> None:
    prompt = [(11 * index) % 64 for index in range(length)]
    done = answer(prompt, max_tokens=0, prompt_logprobs=1)
    scored = done.events[0]
    assert isinstance(scored, PromptScored)
    assert (done.ids, done.last.reason, len(scored.logprobs)) == ([], "length", length)
    assert scored.logprobs[0] is None
    expected = full_logits(decoder, prompt).log_softmax(-1)
    for position, logprobs in enumerate(scored.logprobs[1:]):
        assert isinstance(logprobs, TokenLogprobs)
        assert logprobs.chosen.token_id == prompt[position + 1]
        row = expected[position]
        assert logprobs.chosen.logprob == pytest.approx(row[prompt[position + 1]].item(), abs=1e-5)
        assert logprobs.top[0].token_id == int(row.argmax())


def test_scoring_a_prompt_does_not_change_the_answer(answer: Answers) -> None:
    plain = answer(PROMPT, max_tokens=6, seed=1)
    assert answer(PROMPT, max_tokens=6, seed=1, prompt_logprobs=0).ids == plain.ids


def test_padded_ids_are_never_made(decoder: Decoder) -> None:
    runner = Runner(decoder, window_tokens=96, eos_token_ids=(), num_named_tokens=20)
    for temperature in (0, 2.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=0)
        assert max(run(runner, Request(PROMPT, params))[0].ids) < 20


def test_a_request_that_does_not_fit_is_refused_at_the_beginning(runner: Runner) -> None:
    with pytest.raises(RequestError, match="97 tokens leave no room"):
        runner.begin(Request([1] * 97, SamplingParams()))


def training_loss(decoder: Decoder, optimizer: torch.optim.Optimizer, length: int) -> float:
    """The loss of one training step."""
    ids = torch.arange(length) * 5 % 64
    loss = decoder(
        ids[:-1],
        positions_T=torch.arange(length - 1),
        attend=ReferenceAttend([length - 1]),
        readout=LossReadout(ids[1:], torch.ones(length - 1)),
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_training_goes_on_after_serving_as_if_there_had_been_none(
    decoder: Decoder, answer: Answers
) -> None:
    twin = Decoder(decoder.config, device="cpu", dtype=torch.float32)
    twin.load_state_dict(decoder.state_dict())

    def losses(model: Decoder, between: Callable[[], object]) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.train()
        told = []
        # Serving reaches positions past those trained so far: rope tables grow in between.
        for length in (6, 12, 40, 80):
            told.append(training_loss(model, optimizer, length))
            between()
        return told

    served = losses(decoder, lambda: answer(PROMPT, max_tokens=80, seed=0))
    assert served == losses(twin, lambda: None)


def test_the_model_is_left_as_it_was_found(decoder: Decoder, runner: Runner) -> None:
    decoder.train()
    decoder.layers["1"].eval()
    state = {name: module.training for name, module in decoder.named_modules()}
    weights = {name: weight.clone() for name, weight in decoder.named_parameters()}

    def fail_while_serving() -> None:
        with runner.serving():
            assert not any(module.training for module in decoder.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_serving()
    run(runner, Request(PROMPT, SamplingParams(max_tokens=4)))
    assert {name: module.training for name, module in decoder.named_modules()} == state
    for name, weight in decoder.named_parameters():
        assert weight.requires_grad
        assert weight.grad is None
        assert torch.equal(weight, weights[name])
    assert torch.is_grad_enabled()
