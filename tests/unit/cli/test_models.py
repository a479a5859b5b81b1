from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from herder.cli.models import resolve, tokenizer_folder
from herder.data.tokenizer import load_tokenizer
from herder.errors import ModelError


def test_a_packaged_model_without_weights_is_its_catalog_entry() -> None:
    source = resolve("SmolLM2-135M-Instruct", needs_weights=False)
    assert (source.name, source.weights) == ("smollm2-135m-instruct", None)
    assert source.architecture.num_layers == 30


def test_other_names_are_resolved_as_they_are(tiny_chat_model: Path) -> None:
    assert resolve("qwen3-8b").name == "qwen3-8b"
    assert resolve(str(tiny_chat_model)).weights == "safetensors"


def test_a_folders_tokenizer_is_the_folder(tiny_chat_model: Path) -> None:
    assert tokenizer_folder(resolve(str(tiny_chat_model))) == tiny_chat_model


def test_a_model_without_a_tokenizer_is_told(tiny_chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_chat_model / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        tokenizer_folder(resolve(str(tmp_path)))
    with pytest.raises(ModelError, match=r"llama-2-7b has no tokenizer\.json"):
        tokenizer_folder(resolve("llama-2-7b"))


def test_resolving_for_a_plan_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from herder.cli.models import resolve; "
        "resolve('smollm2-135m-instruct', needs_weights=False); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.package_data
def test_a_gguf_files_tokenizer_is_written_to_the_cache_once(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(str(smollm2_gguf))
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path))
    folder = tokenizer_folder(source)
    assert folder.is_relative_to(tmp_path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|im_start|>system\n")
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(source) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
