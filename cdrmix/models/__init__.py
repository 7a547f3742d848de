"""The RWKX-V backbone and its parts: single-device maths that sees no parallel plan."""
