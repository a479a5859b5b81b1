"""Pure torch modules of the one decoder. Knows nothing of processes, devices or families."""
