"""Checkpoints that any layout can read: `store` saves, finds and keeps them, `reader` reads them,
`engine_state` and `random_state` say what of a running process goes in and comes back."""
