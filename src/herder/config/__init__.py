"""Records of what the user asks for: architecture, cluster, run; strict loading. Imports neither torch nor transformers."""
