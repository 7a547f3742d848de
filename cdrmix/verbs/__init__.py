"""Verbs of the `cdrmix` command, by what they are about."""
