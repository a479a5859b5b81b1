"""`herder parity` as a user runs it, on a case stored in the golden layout and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from herder.cli.main import run
from herder.families.registry import families

Parity = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 2 with a window, and what transformers computes with it, as .npy files."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("golden")
    (folder / "config.json").write_text(json.dumps(families()["qwen2"].tiny_config()))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    model.save_pretrained(folder)
    model.generation_config = GenerationConfig()
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[2, :5] = 0
    ids = torch.randint(0, 160, (3, 20)) * mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
        made = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0
        )
    arrays = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "logits": out.logits,
        "greedy": made[:, 20:],
        "hidden_row0": torch.stack([each[0] for each in out.hidden_states]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())
    return folder


@pytest.fixture
def parity(capfd: pytest.CaptureFixture[str]) -> Parity:
    """Runs the command in this process: status, stdout and stderr."""

    def parity(*arguments: object) -> tuple[int, str, str]:
        status = run(["parity", *map(str, arguments)])
        return (status, *capfd.readouterr())

    return parity


def test_a_stored_case_passes_and_is_told_by_position_and_layer(
    parity: Parity, stored: Path
) -> None:
    status, out, err = parity(stored, "--golden", stored)
    assert (status, err) == (0, "")
    assert "passed, tolerance 1.0e-04" in out
    assert "greedy     100.0%  equal" in out
    assert "by position  0: " in out
    assert "by layer  embed 0.0e+00  layers.0" in out


def test_json_is_one_object_on_stdout(parity: Parity, stored: Path) -> None:
    status, out, err = parity(stored, "--golden", stored, "--json")
    report = json.loads(out)
    assert (status, err, report["passed"], report["greedy_equal"]) == (0, "", True, True)
    assert 0 < report["max_abs_difference"] < 1e-4
    assert report["cached_max_abs_difference"] < 1e-4
    assert len(report["by_position"]) == 20
    assert list(report["by_layer"]) == ["embed", "layers.0", "layers.1", "norm"]


def test_one_changed_weight_exits_1_and_names_the_layer(
    parity: Parity, stored: Path, tmp_path: Path
) -> None:
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"] += torch.linspace(-1, 1, 28)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((stored / "config.json").read_text())
    status, out, err = parity(tmp_path, "--golden", stored, "--json")
    report = json.loads(out)
    assert (status, report["passed"]) == (1, False)
    assert report["first_differing_layer"] == "layers.1"
    assert "does not match" in err
    assert "Traceback" not in err


def test_without_a_stored_case_transformers_makes_one_now(parity: Parity, stored: Path) -> None:
    status, out, _ = parity(stored, "--json")
    report = json.loads(out)
    assert (status, report["passed"]) == (0, True)
    assert report["reference"].startswith("transformers 5.")
    again = json.loads(parity(stored, "--json", "--seed", "7")[1])
    assert again["passed"]
    assert again["by_position"] != report["by_position"]


def test_quantized_weights_are_compared_as_they_were_read(
    parity: Parity, stored: Path, tmp_path: Path
) -> None:
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = parity(tmp_path)
    assert status == 0, err
    assert "with the weights as they were read here" in out


def test_a_run_is_compared_through_an_export_and_the_report_says_so(
    parity: Parity, stored: Path, tmp_path: Path
) -> None:
    assert run(["convert", str(stored), str(tmp_path / "run")]) == 0
    status, out, _ = parity(tmp_path / "run", "--json")
    report = json.loads(out)
    assert (status, report["passed"]) == (0, True)
    assert report["reference"].endswith("with the weights as they were read here")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3-0.6b", "has no weights here"),
        ("mixtral-8x7b-v0.1", "mixtral"),
        ("qwen4", "no catalog name, folder"),
    ],
)
def test_a_model_that_cannot_be_compared_exits_2(parity: Parity, model: str, message: str) -> None:
    status, out, err = parity(model)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_folder_that_is_no_golden_case_exits_2(
    parity: Parity, stored: Path, tmp_path: Path
) -> None:
    status, out, err = parity(stored, "--golden", tmp_path)
    assert (status, out) == (2, "")
    assert "input_ids.npy is missing" in err
    assert parity(stored, "--golden", tmp_path / "absent")[0] == 2
