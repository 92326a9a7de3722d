"""Where the service keeps what must outlive it: `store.Store`, a module for each kind of row."""
