"""Programs that a model wrote, run where the kernel lets them do nothing else. No torch."""
