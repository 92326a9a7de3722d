"""Where HTTP ends: connections, bodies, limits, credentials, and the application of all routes."""
