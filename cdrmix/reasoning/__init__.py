"""Stage B: plastic adapters, memory beyond the window, and the policy that uses it."""
