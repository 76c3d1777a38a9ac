# A long prompt: a job, an attempt, chunks read while the next is computed, a manifest, tokens.
submit a 600+3
rest
    decode: job of a, 600 tokens, 0 held
    decode: attempt 1
    prefill: a#1 chunk 0 is tokens 0 to 256
    prefill: a#1 chunk 1 is tokens 256 to 512
    decode: a#1 chunk 0 landed
    prefill: a#1 chunk 2 is tokens 512 to 600
    prefill: a#1 manifest
    decode: a#1 chunk 1 landed
    client: a token 0
    decode: a#1 chunk 2 landed
    decode: a#1 ended, complete
    client: a token 1
    client: a token 2, length, disaggregated (long_prompt)
    prefill: a#1 over
show
    blocks: 0 owned, 150 cached of 256
    slots: 0 of 2

# The same prompt again: all but its last block is here, so nothing crosses.
submit b 20+2
rest
    decode: job of b, 20 tokens, 0 held
    decode: attempt 1
    prefill: b#1 chunk 0 is tokens 0 to 20
    prefill: b#1 manifest
    client: b token 0
    decode: b#1 chunk 0 landed
    decode: b#1 ended, complete
    client: b token 1, length, disaggregated (long_prompt)
    prefill: b#1 over
submit a2 600+2
rest
    client: a2 token 0
    client: a2 token 1, length, local (short_prompt)

# Nobody to prefill: here, and counted.
alone
submit c 300+2
rest
    client: c token 0
    client: c token 1, length, local (no_prefill_worker), no_prefill_worker 1
