"""What the user asks for, as records: architecture, cluster, run. Imports no torch."""
