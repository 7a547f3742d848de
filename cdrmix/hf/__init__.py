"""Causal models of Hugging Face transformers behind the interface of the training loop."""
