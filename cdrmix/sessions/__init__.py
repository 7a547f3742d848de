"""Whole runs: Stage A then Stage B; rehearsals of a plan."""
