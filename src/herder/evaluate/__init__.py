"""Perplexity, tasks and parity of a model."""
