"""A load test of a real server: what it counts is what the server counted."""

import asyncio
import json
import os
import xml.etree.ElementTree as ET

import pytest

from herder.cli.main import run
from herder.errors import ResourceError
from herder.serve.load_client import Asked, LoadClient, Sample, as_they_arrive, connected
from herder.serve.load_report import load_plot
from herder.serve.loadtest import Load, LoadTest, result_of

ASKED = Asked(
    prompt_tokens=(20, 60),
    shared_prefix_tokens=10,
    output_tokens=5,
    seed=3,
    as_chat=False,
)


def prompts_of(api, seed):
    async def made():
        async with connected(api.url, None) as http:
            asked = Asked((20, 60), 10, 5, seed, as_chat=False)
            client = LoadClient(http, "tiny-chat", asked)
            await client.calibrate()
            return [client.prompt(str(index)) for index in range(12)]

    return asyncio.run(made())


def test_prompts_have_their_lengths_share_their_beginning_and_are_the_same_again(api) -> None:
    prompts = prompts_of(api, 3)
    assert prompts == prompts_of(api, 3)
    assert prompts != prompts_of(api, 4)
    assert len(set(prompts)) == len(prompts)
    lengths = {
        api.http.post("/tokenize", json={"prompt": prompt}).json()["count"] for prompt in prompts
    }
    assert all(min(abs(length - 20), abs(length - 60)) <= 12 for length in lengths)
    assert max(lengths) - min(lengths) > 20
    assert len({prompt.split()[0] for prompt in prompts}) == 1


@pytest.mark.parametrize("as_chat", [False, True])
def test_what_is_counted_is_what_the_server_counted(api, as_chat) -> None:
    asked = Asked((30,), 0, 5, 1, as_chat=as_chat)
    test = LoadTest(api.url, asked, [Load(1, None), Load(3, None)], 4, server_pid=os.getpid())
    before = api.metric("generation_tokens_total"), api.metric("request_success_total")
    told = []
    card, results = test.run(told.append)
    made = api.metric("generation_tokens_total") - before[0]
    # Two more requests of one token found out how long words are.
    assert api.metric("request_success_total") - before[1] == 2 + 8
    assert made == 2 + sum(each.completion_tokens_mean * each.num_requests for each in results)
    assert told == list(range(1, 9))
    assert card["id"] == "tiny-chat"
    for each in results:
        assert each.errors == {}
        assert 0 < each.first_token_seconds_p50 <= each.first_token_seconds_p99 <= each.seconds
        assert each.server_peak_bytes > 2**20
        assert each.output_tokens_per_second == pytest.approx(
            each.completion_tokens_mean * 4 / each.seconds
        )


def test_errors_are_counted_by_what_they_were(api) -> None:
    asked = Asked((30,), 0, 100_000, 1, as_chat=False)
    _, [result] = LoadTest(api.url, asked, [Load(2, None)], 3).run(lambda _: None)
    assert result.errors == {"status 400": 3}
    assert result.first_token_seconds_p50 is None


def test_requests_arrive_at_their_rate_whether_or_not_earlier_ones_are_done() -> None:
    under_way, most = 0, 0

    async def slow() -> Sample:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.5)
        under_way -= 1
        return Sample(0.1, 0.5, None, 1, 1)

    samples = asyncio.run(as_they_arrive([slow] * 40, 200.0, seed=1))
    assert len(samples) == 40
    assert most > 20


def test_percentiles_are_of_those_that_succeeded() -> None:
    good = [Sample(float(n), 1.0, 0.1 * n, 7, 5) for n in range(1, 101)]
    result = result_of(Load(2, None), [*good, Sample(9e9, 1, None, 0, 0, "status 500")], 10.0, None)
    assert (result.num_requests, result.errors) == (101, {"status 500": 1})
    assert result.first_token_seconds_p50 == pytest.approx(50.5)
    assert result.first_token_seconds_p99 == pytest.approx(99.01)
    assert result.output_tokens_per_second == 50


def test_the_command_prints_a_table_or_an_object_and_draws(api, tmp_path, capsys) -> None:
    picture = tmp_path / "load.svg"
    few = ["--requests", "2", "--output-tokens", "3", "--prompt-tokens", "20"]
    assert run(["loadtest", api.url, *few, "--concurrency", "1,2", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "2 at once" in text
    assert "plan: none" in text
    labels = [each.text for each in ET.parse(picture).iter() if each.tag.endswith("text")]
    assert {"tiny-chat", "tokens a second", "requests at once"} <= set(labels)
    assert run(["loadtest", api.url, *few, "--rate", "50", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loads"][0]["offered_per_second"] == 50
    assert told["plan_max_concurrent_sequences"] is None


def test_a_load_without_one_success_is_a_failed_check(api, capsys) -> None:
    many = ["--requests", "2", "--output-tokens", "9999", "--concurrency", "1"]
    assert run(["loadtest", api.url, *many]) == 1
    assert "2 status 400" in capsys.readouterr().out


def test_a_picture_of_nothing_but_errors_is_drawn_too() -> None:
    failed = [Sample(None, 1.0, None, 0, 0, "status 500")]
    ET.fromstring(load_plot([result_of(Load(2, None), failed, 1.0, None)], model="<a & b>"))


def test_no_server_no_model_and_no_process_are_told(api) -> None:
    def run_on(url, **fields):
        LoadTest(url, ASKED, [Load(1, None)], 1, **fields).run(lambda _: None)

    with pytest.raises(ResourceError, match="no list of models"):
        run_on("http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="serves tiny-chat, not gpt-5"):
        run_on(api.url, model="gpt-5")
    with pytest.raises(ResourceError, match="no such process"):
        run_on(api.url, server_pid=2**22 + 1)
