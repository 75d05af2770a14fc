"""The layer in serving: plugins for engines, expert parallelism, kernels compiled ahead."""
