"""What happens around an answer: queues, clients that leave, failures, draining, the port."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from herder.engine.request import Request, SamplingParams
from herder.errors import ResourceError, UnavailableError
from herder.serve.server import Host, bind, url_of

LONG = {"prompt": "The", "max_tokens": 250, "ignore_eos": True, "temperature": 1, "seed": 1}
SHORT = {"prompt": "The", "max_tokens": 4, "ignore_eos": True, "temperature": 1, "seed": 1}


class Pace:
    """A text decoder that holds its request at a token until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def add(self, token_id: int) -> str:
        """Waits at each token."""
        self.reached.set()
        assert self.let_go.wait(60)
        return "x"

    def finish(self) -> str:
        """Nothing is held."""
        return ""


@pytest.fixture
def pace() -> Pace:
    """Lets go at the end, whatever happens."""
    pace = Pace()
    yield pace
    pace.let_go.set()


def occupy(running, pace) -> None:
    """Keep the engine busy until pace lets go."""
    request = Request([1, 2], SamplingParams(max_tokens=1), pace)
    running.service.engine.submit([(request, lambda _: None)])
    assert pace.reached.wait(60)


def wait_until(condition, seconds=10.0) -> None:
    """Poll for what another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def test_clients_at_once_get_what_each_gets_alone(api) -> None:
    bodies = [{**SHORT, "prompt": f"The {index}", "seed": index} for index in range(8)]

    def ask(body):
        return api.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, bodies)) == alone


def test_a_full_queue_says_when_to_come_back(load, serve, pace) -> None:
    running = serve(load(max_queued_requests=2))
    occupy(running, pace)
    too_many = running.http.post("/v1/completions", json={**SHORT, "n": 3})
    assert too_many.status_code == 400
    assert "at most 2" in too_many.json()["error"]["message"]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(running.http.post, "/v1/completions", json=SHORT) for _ in "ab"]
        wait_until(lambda: running.service.engine.num_waiting == 2)
        assert running.metric("num_requests_waiting") == 2
        for stream in (False, True):
            refused = running.http.post("/v1/completions", json={**SHORT, "stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert running.http.get("/health").status_code == 200
        pace.let_go.set()
        assert [each.result().status_code for each in waiting] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_client_leaves(api, stream) -> None:
    aborted = api.metric("request_success_total", finished_reason="abort")
    address = httpx.URL(api.url)
    body = json.dumps({**LONG, "stream": stream, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: api.service.engine.num_running == 4)
        if stream:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
    start = time.monotonic()
    api.wait_idle()
    # Four answers of 250 tokens take far longer than being ended within a step.
    assert time.monotonic() - start < 2
    wait_until(lambda: api.metric("request_success_total", finished_reason="abort") - aborted >= 3)


def test_a_client_that_leaves_the_queue_frees_its_place(load, serve, pace) -> None:
    running = serve(load(max_queued_requests=1))
    occupy(running, pace)
    with pytest.raises(httpx.ReadTimeout):
        running.http.post("/v1/completions", json=SHORT, timeout=0.2)
    wait_until(lambda: running.service.engine.num_waiting == 0)


def failing(service, tokens_before):
    """Makes the model fail at its forward number `tokens_before`."""
    decoder = service.engine._runner.decoder
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > tokens_before:
            raise FloatingPointError("the model broke")

    return decoder.register_forward_pre_hook(fail)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_true_status(api, stream) -> None:
    hook = failing(api.service, 0)
    response = api.http.post("/v1/completions", json={**LONG, "stream": stream})
    hook.remove()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_server_error"
    assert "broke" not in response.text
    assert api.http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_failure_after_the_first_token_is_an_event_before_the_end(api) -> None:
    failed = api.metric("request_success_total", finished_reason="error")
    hook = failing(api.service, 5)
    response = api.http.post("/v1/completions", json={**LONG, "stream": True})
    hook.remove()
    assert response.status_code == 200
    *_, error, done = [line for line in response.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "internal_server_error"
    assert api.metric("request_success_total", finished_reason="error") == failed + 1


def test_a_silent_stream_is_kept_alive_by_comments(serve, pace, monkeypatch) -> None:
    monkeypatch.setattr("herder.serve.reply.KEEP_ALIVE_SECONDS", 0.3)
    running = serve()
    occupy(running, pace)
    with running.http.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as stream:
        assert stream.status_code == 200
        chunks = stream.iter_text()
        assert next(chunks) == ": keep-alive\n\n"
        pace.let_go.set()
        rest = "".join(chunks)
    assert rest.endswith("data: [DONE]\n\n")
    plain = running.http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
    events = [part for part in rest.split("\n\n") if part.startswith("data: {")]
    texts = [json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in events]
    assert "".join(texts) == plain


def test_probes_answer_while_the_engine_is_busy(serve, pace) -> None:
    running = serve()
    occupy(running, pace)
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert running.http.get(path, timeout=2).status_code == 200
    assert running.metric("num_requests_running") == 1


def test_an_engine_that_stopped_moving_is_not_alive(serve, pace, monkeypatch) -> None:
    running = serve()
    monkeypatch.setattr("herder.serve.server.MAX_STALLED_SECONDS", 0.05)
    occupy(running, pace)
    wait_until(lambda: running.http.get("/health").status_code == 503)
    pace.let_go.set()
    running.wait_idle()
    assert running.http.get("/health").status_code == 200


def test_draining_refuses_new_requests_and_finishes_those_accepted(serve, pace) -> None:
    running = serve()
    occupy(running, pace)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(running.http.post, "/v1/completions", json=SHORT)
        wait_until(lambda: running.service.engine.num_waiting == 1)
        running.server.stop()
        wait_until(lambda: running.http.get("/ready").status_code == 503)
        refused = running.http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert running.http.get("/health").status_code == 200
        pace.let_go.set()
        assert accepted.result().status_code == 200
    wait_until(lambda: not running.server.started or running.server.should_exit)


def test_what_is_not_done_when_the_drain_ends_gets_a_real_error(serve, pace) -> None:
    running = serve(drain_seconds=0.1)
    occupy(running, pace)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.http.post, "/v1/completions", json=SHORT)
        wait_until(lambda: running.service.engine.num_waiting == 1)
        running.server.stop()
        response = waiting.result()
    assert response.status_code == 503
    assert "shut down before the answer" in response.json()["error"]["message"]


def test_probes_are_answered_while_a_model_loads() -> None:
    host = Host(lambda: None)
    assert host.is_alive
    with pytest.raises(UnavailableError, match="still loading"):
        host.service()


def test_a_model_that_cannot_be_loaded_is_told_and_not_alive() -> None:
    def fail() -> None:
        raise ResourceError("no memory")

    host = Host(fail)
    loaded = threading.Event()
    host.start(on_loaded=loaded.set)
    assert loaded.wait(5)
    assert str(host.failure) == "no memory"
    assert not host.is_alive
    with pytest.raises(UnavailableError, match="could not be loaded"):
        host.service()


def test_a_port_in_use_is_told_with_another_to_choose() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"port {port} on 127.0.0.1 is in use.*--port 0"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_told(host) -> None:
    with pytest.raises(ResourceError, match=f"cannot serve at {host}, port 8000"):
        bind(host, 8000)


def test_no_address_is_not_taken_for_all_of_them() -> None:
    with pytest.raises(ResourceError, match="the host is empty"):
        bind("", 0)


def test_the_url_is_one_that_can_be_opened_here() -> None:
    with bind("0.0.0.0", 0) as bound:
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
