"""Runs a plan: one training loop, and the stages that give it batches and losses."""
