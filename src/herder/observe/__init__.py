"""Events, sinks, meters and reports: what happened, told in one vocabulary. Knows no config package."""
