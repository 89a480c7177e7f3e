"""Token trees: matching calls to paths, rendering messages into ids, and the samples of a session."""
