"""Several servers of one Postgres database and one data folder: one works, the others pass on."""
