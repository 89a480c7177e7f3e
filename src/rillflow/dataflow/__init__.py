"""The dataflow layer: prompts in, tasks out, trajectories in, batches out, every one of them accounted for."""
