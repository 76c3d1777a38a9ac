"""gRPC as Diptych uses it: how a server starts, drains and stops, how a peer is dialled, how errors travel.

`server.serve` and `dial.Dialer` are the two doors; `status` is the only place that knows both the domain's
error tree and gRPC's codes; `process.run_service` is how a service's `__main__` runs until it is asked to
leave.
"""
