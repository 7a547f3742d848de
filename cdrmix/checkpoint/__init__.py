"""Checkpoints that any layout can read: `store` finds them, `saver` writes them while training goes
on, `reader` reads them, `engine_state` and `random_state` say what of a running process goes in and
comes back."""
