"""What the outside sees of a process: its log and its metrics.

Telemetry listens. Brains yield events and keep counts as plain values; a service's hands give them to
`Recorder`. Nothing here changes a result, an order or an exit: a collector that is down costs nothing but its
own figures.
"""
