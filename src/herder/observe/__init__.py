"""Events, sinks, meters and reports: what happened, in one vocabulary. Knows no config."""
