"""Steps of a data recipe."""
