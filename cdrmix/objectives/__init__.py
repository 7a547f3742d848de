"""Losses: tensors in, loss and metrics out; no I/O, no ranks."""
