"""Trained models as folders that others load."""
