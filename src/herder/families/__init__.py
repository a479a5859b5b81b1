"""One file a model family: how its published config and weight names map to ours. Holds no forward code."""
