"""Sizes of an exchange reach the host while the device goes on."""

import pytest
import torch

from herder.parallel.expert import _Sizes

pytestmark = pytest.mark.device


def test_sizes_reach_the_host_before_what_was_queued_after_them_has_run() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    sizes = _Sizes(torch.tensor([[1, 2], [3, 4]], device="cuda"))
    for _ in range(64):
        x = (x @ x).clamp(-1, 1)
    after = torch.cuda.Event()
    after.record()
    assert sizes.on_host() == [[1, 2], [3, 4]]
    assert not after.query()
