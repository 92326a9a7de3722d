"""The endpoints, one module per resource. Each has a list `ROUTES`."""
