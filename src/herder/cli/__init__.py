"""One file a verb: composition of the packages below, nothing else."""
