"""What a run is judged on while it trains."""

from __future__ import annotations

import numpy as np

from herder.config.run import EvaluateConfig
from herder.data.corpus import DocumentTokens
from herder.train.build import _held_out


def test_a_share_of_the_held_out_rows_has_documents_of_every_length() -> None:
    lengths = [64] * 100 + [4] * 300
    tokens = np.zeros(sum(lengths), np.uint16)
    documents = DocumentTokens(tokens, np.cumsum([0, *lengths]), num_text_bytes=0)
    part = EvaluateConfig(max_tokens=20 * 64)
    batches = _held_out(documents, part, sequence_length=64, batch_size=8)()
    assert [batch.num_tokens // 64 for batch in batches] == [8, 8, 4]
    pieces = {length for batch in batches for length in batch.document_lengths}
    assert {63, 3} <= pieces
