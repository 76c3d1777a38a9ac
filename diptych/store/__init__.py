"""The store: what processes tell each other through Redis. The only room that imports it.

    Registry            who is alive, where, with what load           one call a heartbeat, one a look
    PrefillBus          jobs of a cell, claimed by whoever is free    one call each to post, claim and finish
    RequestProjection   what a request's owner says about it          one call a write
    ChunkDirectory      who holds which chunk of KV                   one call for 500 chunks

Everything in it is soft state. It may be flushed, restarted, stopped or full at any moment: calls then
raise `StoreUnavailable` within their timeout, nothing else breaks, and owners announce their state again by
themselves.

Read `shard.py` first: every command passes there. The Lua functions lie in `functions/`, a library for each
class.
"""
