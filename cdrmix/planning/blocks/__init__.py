"""Block types as planning sees them: one file for each, which imports no torch."""
