import dataclasses

import pytest

from herder.checkpoint.source import resolve_model
from herder.errors import RequestError
from herder.serve import load


def test_the_precision_is_what_was_asked_for_or_bf16_unless_a_gpu_lacks_it(monkeypatch) -> None:
    assert [load.precision_of(name) for name in load.DTYPES] == list(load.DTYPES)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load.precision_of("auto") == "bf16"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: False)
    assert load.precision_of("auto") == "fp32"


def test_recommended_sampling_is_taken_unless_it_says_not_to_sample(tiny_chat_model) -> None:
    source = resolve_model(str(tiny_chat_model))

    def defaults(**generation: object) -> dict[str, object]:
        return load.sampling_defaults(dataclasses.replace(source, generation=generation))

    assert defaults(temperature=0.6, max_new_tokens=9) == {"temperature": 0.6}
    assert defaults(do_sample=True, top_k=5) == {"top_k": 5}
    assert defaults(do_sample=False, temperature=0.6) == {}
    with pytest.raises(RequestError, match="top_p"):
        defaults(top_p=7)
