"""The target's kernels: one file per operation, each with a launcher that takes tensors."""
