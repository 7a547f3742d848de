"""How good a model is on held-out tokens, and what counting alone would reach there."""
