"""Exact sizes, memory, communication and layouts computed from model and cluster. Imports no torch."""
