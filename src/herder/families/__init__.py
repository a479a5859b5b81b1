"""One file a model family: its published config and weight names, and ours. No forward code."""
