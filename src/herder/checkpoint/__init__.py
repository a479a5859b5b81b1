"""Saving and loading: run checkpoints, Hugging Face folders and GGUF files."""
