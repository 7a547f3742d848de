"""Verbs of the `cdrmix` command, by subject."""
