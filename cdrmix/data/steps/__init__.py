"""What happens to documents before they become tokens: one file per kind of step."""
