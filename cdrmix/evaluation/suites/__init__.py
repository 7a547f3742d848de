"""Suites of evaluations, one file each; `cdrmix.evaluation.suite` lists them."""
