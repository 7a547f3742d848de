"""Parameter groups, optimizers, averages and learning rates of Stage A."""
