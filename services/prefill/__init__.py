"""The prefill service: prompt in, first token and KV out.

    bus ─▶ worker (I/O process) ─▶ messages ─▶ loop (engine process) ─▶ scheduler (brain)

1. `worker` claims a job when the engine has room, and asks its decode worker for the tokens (`Begin`).
2. `lending` borrows leading chunks that a cache service holds.
3. `scheduler` takes the blocks and runs the rest chunk by chunk.
4. Each computed chunk is packed into the send ring (`sources`) and announced on the `handoff` stream.
5. The last chunk draws the first token; the manifest closes the attempt.
6. The decode worker has read everything: slots are free, and nothing is left.
"""
