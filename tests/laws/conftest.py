"""Tiny models of every family, made by transformers when a test runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging

MakeModel = Callable[[Mapping[str, Any]], Path]


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    """Its warnings about odd configs and its progress bars say nothing that a law needs."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture
def transformers_folder(tmp_path: Path) -> MakeModel:
    """Makes a folder as transformers saves it, with random weights, biases, norms and sinks.

    The config.json in it is the one given, in whatever spelling, and not transformers' own.
    """

    def make(config: Mapping[str, Any]) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.2)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, 0.0, 0.2)
            elif name.endswith("sinks"):
                nn.init.normal_(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                nn.init.normal_(buffer, 0.0, 0.2)
        model.save_pretrained(folder)
        path.write_text(json.dumps(config))
        return folder

    return make
