"""Several servers and their clients in one process, under a simulated clock, network and disk.

Real are the application with its routes, the service and all its parts, the store on SQLite, the
lease and the fence, a replica that leads or passes on. Simulated are what lies around them: the
processes (`processes`), which stop, die and have wrong clocks; the database's clock, outages and
lost answers (`database`); the network between clients and servers (`network`), at the level of
requests and answers; the disk that loses what was not synced (`disk`). Clients (`client`) go
through programs whose results are known beforehand (`programs`), and what they saw goes through the
same checker as the histories of chaos runs. `life` puts it together and makes the trouble.

A failure names its seed, and `life.live(seed)` repeats it step by step.
"""
