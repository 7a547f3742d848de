"""Token shards from raw text: recipes, steps, engines."""
