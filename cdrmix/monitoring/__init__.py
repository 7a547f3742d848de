"""What a run says about itself: metric names, files, progress and the report."""
