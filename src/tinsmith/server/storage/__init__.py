"""Where weights, and large requests and results, are kept for good: a folder, or object storage."""
