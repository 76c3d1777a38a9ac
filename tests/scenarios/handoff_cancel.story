# Waiting for a claim.
claim no
submit a 40+5
turn
    decode: job of a, 40 tokens, 0 held
cancel a
rest
    client: a abort, disaggregated (long_prompt)
    decode: job of a withdrawn
show
    blocks: 0 owned, 0 cached of 256
    slots: 0 of 2
claim yes

# Begun, nothing announced yet.
submit b 600+5
turn 2
    decode: job of b, 600 tokens, 0 held
    decode: attempt 1
cancel b
rest
    client: b abort, disaggregated (long_prompt)
    decode: b#1 ended, cancelled
    prefill: b#1 chunk 0 is tokens 0 to 256
    prefill: b#1 over
show
    blocks: 0 owned, 0 cached of 256
    slots: 0 of 2

# In the middle of a read.
hold 1
submit c 601+5
turn 4
    decode: job of c, 601 tokens, 0 held
    decode: attempt 1
    prefill: c#1 chunk 0 is tokens 0 to 256
    prefill: c#1 chunk 1 is tokens 256 to 512
cancel c
turn
    client: c abort, disaggregated (long_prompt)
    decode: c#1 ended, cancelled
    prefill: c#1 chunk 2 is tokens 512 to 601
    prefill: c#1 manifest
show
    blocks: 0 owned, 0 cached of 256
    slots: 1 of 2
release
rest
    prefill: c#1 over
show
    blocks: 0 owned, 0 cached of 256
    slots: 0 of 2

# Decoding; the other one goes on.
submit d 10+6
submit e 11+6
turn 3
    decode: job of d, 10 tokens, 0 held
    decode: job of e, 11 tokens, 0 held
    decode: attempt 1
    decode: attempt 1
    prefill: d#1 chunk 0 is tokens 0 to 10
    prefill: d#1 manifest
cancel d
rest
    client: d abort, disaggregated (long_prompt)
    decode: d#1 ended, cancelled
    prefill: e#1 chunk 0 is tokens 0 to 11
    prefill: e#1 manifest
    prefill: d#1 over
    client: e token 0
    decode: e#1 chunk 0 landed
    decode: e#1 ended, complete
    client: e token 1
    client: e token 2
    prefill: e#1 over
    client: e token 3
    client: e token 4
    client: e token 5, length, disaggregated (long_prompt)
