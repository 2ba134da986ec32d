"""Two runs, two tensors, two checkpoints: what differs, and where first."""
