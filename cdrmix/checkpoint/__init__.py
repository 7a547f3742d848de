"""Checkpoints that any layout can read.

`saver` writes them during training, `store` finds them, `checkpoint_file` reads one, `engine_state`
and `random_state` convert the state of a running process.
"""
