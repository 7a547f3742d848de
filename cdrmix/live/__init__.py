"""Live views of runs: in a terminal, and as local pages."""
