"""Requests to tokens: key-value cache, sampling and the decode loop. No HTTP."""
