"""The cache service: chunks of KV that outlive the worker that made them.

A chunk's life:
  1. A worker calls `Offer`: "I have this chunk, here it can be read, this is its digest" (`server.py`).
  2. The brain gives it room in the arena, and evicts what is least recently used and not pinned (`tiers.py`).
  3. The hands read it, peer to peer, and check the digest of *our* copy (`loop.py`). Wrong bytes: free again.
  4. Its location goes into the chunk directory, where other workers find it.
  5. A worker calls `Lend`: the chunk is pinned under a lease, and is read from our arena, peer to peer.
  6. `GiveBack`, or the end of the lease, unpins it.
  7. Room for another chunk, or `DropCache`, ends it; its location is withdrawn.
  8. A location that is read too late is a miss. A miss is always allowed; wrong bytes never.
  9. Nothing survives a restart: the new process has a new epoch, and nobody believes the old one's locations.
"""
