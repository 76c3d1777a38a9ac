"""The KV channel: opaque bytes from a peer's registered memory into ours. Only readers move bytes; nobody
writes
into another process.

A read's life, whatever the channel:

    read() ──▶ QUEUED ──begin──▶ RUNNING ──finish──▶ DONE: error set, then on_done
                 └── cancel, deadline, close ──────▲   (RUNNING is interrupted, and its own thread ends it)

`open_channel` makes one by name. `reads` holds what all channels share; `memory` and `grpc` move the bytes;
`faults` wraps any of them with the failures that tests want.
"""
