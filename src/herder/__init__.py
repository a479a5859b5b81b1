"""herder: plan, train, checkpoint, evaluate and serve language models from one config."""
