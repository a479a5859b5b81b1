"""What holds for every test: one thread, no network, no real cache written, and no GPU assumed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from herder.data.cache import cache_folder
from herder.data.packages import fetch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PIP_NO_INDEX"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent

_connect = socket.socket.connect


def _connect_to_this_machine_only(self: socket.socket, address: object) -> None:
    if self.family != socket.AF_UNIX and isinstance(address, tuple):
        host = str(address[0])
        if not (host.startswith("127.") or host in ("localhost", "::1")):
            raise AssertionError(f"a test reached for the network: {address!r}")
    _connect(self, address)


@pytest.fixture(scope="session", autouse=True)
def no_network() -> None:
    """No connection leaves this machine: a test that tries one fails and says where it went."""
    socket.socket.connect = _connect_to_this_machine_only


@pytest.fixture(scope="session")
def fresh_cache() -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Gives a test a cache folder that is empty but for the C++ operators, built once for all."""
    kernels = cache_folder() / "kernels"

    def fresh_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels)
        patch.setenv("HERDER_CACHE", str(folder))

    return fresh_cache


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real small model; an error that names the command where it was not fetched."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def wikipedia_leads() -> Path:
    """The demonstration corpus; an error that names the command where it was not fetched."""
    return fetch("wikipedia-leads")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only to answer that."""
    device_tests = [item for item in items if "device" in item.keywords]
    if not device_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in device_tests:
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU"))


@pytest.fixture(scope="session")
def small_tokenizer_json() -> str:
    """A byte-level tokenizer.json with 4 control tokens, trained here on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["The quick brown fox jumps over the lazy dog.", "How is the weather today?"]
    backend.train_from_iterator([*lines, "今天天气如何,今天天气很好。"] * 4, trainer)
    return backend.to_str()


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_json: str) -> Path:
    """A model's folder: random weights, a head wider than the tokenizer, a chat template."""
    import torch

    from herder.checkpoint.huggingface import save_huggingface
    from herder.families.registry import architecture_from_hf, family_named
    from herder.model.build import build_decoder, initialize_weights

    family = family_named("llama")
    config = {**family.tiny_config(), "vocab_size": 416, "max_position_embeddings": 256}
    architecture = architecture_from_hf({**config, "initializer_range": 0.2}, name="tiny")
    decoder = build_decoder(architecture, device="cpu", dtype=torch.float32)
    initialize_weights(decoder, seed=0)
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    save_huggingface(decoder, folder, family=family.name)
    template = (
        "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer.json").write_text(small_tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    return folder
