"""Builds of token shards from raw text: recipes, steps and engines."""
