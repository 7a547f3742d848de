"""Profiles of single steps: traces, tables of kernels and collectives, snapshots of memory."""
