"""What clients saw of a service, written down while it was broken, and whether it can be true."""
