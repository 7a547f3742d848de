"""Suites of evaluations, one file each."""
