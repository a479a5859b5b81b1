"""Tokenizers, sources, packing, and the batch at step t as a pure function of seed and t."""
