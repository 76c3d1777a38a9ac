# Those who wait for their KV may hold half of the pool, 32 of 64 positions: c waits, and a short one passes.
rig num_blocks=16 prefill_blocks=16 threshold=8
claim no
submit a 14+2
submit b 14+2
submit c 14+2
turn
    decode: job of a, 14 tokens, 0 held
    decode: job of b, 14 tokens, 0 held
show
    blocks: 8 owned, 0 cached of 16
    slots: 0 of 2
submit short 4+1
turn 3
    client: short token 0, length, local (short_prompt)
claim yes
rest
    decode: attempt 1
    decode: attempt 1
    prefill: a#1 chunk 0 is tokens 0 to 14
    prefill: a#1 manifest
    prefill: b#1 chunk 0 is tokens 0 to 14
    prefill: b#1 manifest
    client: a token 0
    decode: job of c, 14 tokens, 0 held
    decode: a#1 chunk 0 landed
    decode: a#1 ended, complete
    client: a token 1, length, disaggregated (long_prompt)
    client: b token 0
    decode: attempt 1
    decode: b#1 chunk 0 landed
    decode: b#1 ended, complete
    client: b token 1, length, disaggregated (long_prompt)
    prefill: a#1 over
    prefill: b#1 over
    prefill: c#1 chunk 0 is tokens 0 to 14
    prefill: c#1 manifest
    client: c token 0
    decode: c#1 chunk 0 landed
    decode: c#1 ended, complete
    client: c token 1, length, disaggregated (long_prompt)
    prefill: c#1 over
show
    blocks: 0 owned, 10 cached of 16
    slots: 0 of 2

# One alone may hold more than that.
submit large 40+2
rest
    decode: job of large, 40 tokens, 0 held
    decode: attempt 1
    prefill: large#1 chunk 0 is tokens 0 to 40
    prefill: large#1 manifest
    client: large token 0
    decode: large#1 chunk 0 landed
    decode: large#1 ended, complete
    client: large token 1, length, disaggregated (long_prompt)
    prefill: large#1 over
