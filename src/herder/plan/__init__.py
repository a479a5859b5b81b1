"""Sizes, memory, communication and layouts, from model and cluster. Imports no torch."""
