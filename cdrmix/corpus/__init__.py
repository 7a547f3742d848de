"""From raw text to token shards: recipes, steps, engines."""
