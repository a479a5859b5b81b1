import pytest

from herder.errors import ConfigError
from herder.serve.app import create_app
from herder.serve.server import Host


def test_models_tell_the_window(api) -> None:
    listed = api.openai.models.list().data
    assert [model.id for model in listed] == ["tiny-chat"]
    assert listed[0].max_model_len == 256
    assert api.openai.models.retrieve("tiny-chat").id == "tiny-chat"
    assert api.http.get("/v1/models/other").status_code == 404


def test_tokens_and_text_are_inverses(api) -> None:
    text = "今天天气很好。 🙂 The quick"
    tokens = api.http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 256
    back = api.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"].removeprefix("<s>") == text


def test_padding_ids_have_no_text(api) -> None:
    assert api.http.post("/detokenize", json={"tokens": [415]}).json() == {"prompt": ""}


def test_probes_and_version(api) -> None:
    assert api.http.get("/health").json() == {"alive": True}
    assert api.http.get("/ready").json() == {"model": "tiny-chat"}
    assert api.http.get("/version").json()["version"]


def test_metrics_have_vllms_names_with_our_prefix(api) -> None:
    api.openai.completions.create(model="tiny-chat", prompt="The", max_tokens=3)
    response = api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_success_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
    ):
        assert f"herder:{name}{{" in response.text
    assert 'finished_reason="abort"' in response.text


def test_metrics_can_be_read_back_by_a_prometheus_parser(api) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(api.http.get("/metrics").text))
    assert {"herder:num_requests_running", "herder:prompt_tokens"} <= {f.name for f in families}


def test_the_openapi_document_describes_the_bodies(api) -> None:
    paths = api.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/metrics"} <= paths.keys()


def test_an_application_needs_no_model_to_be_made() -> None:
    def never() -> None:
        raise AssertionError("loading is not asked for")

    assert create_app(Host(never)).title == "herder"


def test_all_but_probes_and_the_page_ask_for_the_key(serve) -> None:
    api = serve(api_key="se cret")
    for path in ("/", "/health", "/ready", "/metrics"):
        assert api.http.get(path).status_code == 200
    for path in ("/v1/models", "/version", "/openapi.json", "/nothing"):
        for given in ({}, {"authorization": "Bearer other"}, {"authorization": "se cret"}):
            refused = api.http.get(path, headers=given)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "se cret" not in refused.text
        known = api.http.get(path, headers={"authorization": "Bearer se cret"})
        assert known.status_code == (404 if path == "/nothing" else 200)
    # Nothing of a body is read before the key is known.
    assert api.http.post("/v1/completions", content=b"{:").status_code == 401


@pytest.mark.parametrize("key", ["", "clé", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(key) -> None:
    with pytest.raises(ConfigError, match="--api-key: must be printable ASCII"):
        create_app(Host(lambda: None), api_key=key)
