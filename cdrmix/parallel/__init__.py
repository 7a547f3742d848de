"""Carries a plan out: what crosses ranks on behalf of model and objective."""
