"""Stage B: its engine, answering, evaluation of reasoning."""
