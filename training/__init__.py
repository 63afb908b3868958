"""What a training run needs besides the loop: optimizers, schedules, checkpoints, processes, metrics."""
