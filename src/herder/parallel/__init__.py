"""Everything that is wrapped around the model to split or shard it, and the launch of its ranks."""
