# A wrong digest: the chunk is read again.
corrupt 1
submit a 300+2
rest
    decode: job of a, 300 tokens, 0 held
    decode: attempt 1
    prefill: a#1 chunk 0 is tokens 0 to 256
    prefill: a#1 chunk 1 is tokens 256 to 300
    prefill: a#1 manifest
    client: a token 0
    decode: a#1 chunk 0 landed
    decode: a#1 chunk 1 landed
    decode: a#1 ended, complete
    client: a token 1, length, disaggregated (long_prompt)
    prefill: a#1 over

# Wrong twice: another attempt, and then here.
corrupt 0
submit b 301+2
rest
    decode: job of b, 301 tokens, 0 held
    decode: attempt 1
    prefill: b#1 chunk 0 is tokens 0 to 256
    prefill: b#1 chunk 1 is tokens 256 to 301
    prefill: b#1 manifest
    decode: job of b, 301 tokens, 0 held
    decode: b#1 ended, digest_wrong
    decode: attempt 2
    prefill: b#1 over
    prefill: b#2 chunk 0 is tokens 0 to 256
    prefill: b#2 chunk 1 is tokens 256 to 301
    prefill: b#2 manifest
    decode: b#2 ended, digest_wrong
    client: b token 0
    prefill: b#2 over
    client: b token 1, length, local (attempts_failed), digest_wrong 2
release

# A read that fails is tried again too.
rig threshold=8
fail 1
submit c 40+2
rest
    decode: job of c, 40 tokens, 0 held
    decode: attempt 1
    prefill: c#1 chunk 0 is tokens 0 to 40
    prefill: c#1 manifest
    client: c token 0
    decode: c#1 chunk 0 landed
    decode: c#1 ended, complete
    client: c token 1, length, disaggregated (long_prompt)
    prefill: c#1 over

# The attempt ends under a read: the slot stays taken until the read has ended.
rig threshold=8 landing_slots=1
hold 1
submit d 40+2
turn 3
    decode: job of d, 40 tokens, 0 held
    decode: attempt 1
    prefill: d#1 chunk 0 is tokens 0 to 40
    prefill: d#1 manifest
lose d 1
turn
    decode: job of d, 40 tokens, 0 held
    decode: d#1 ended, prefill_lost
show
    blocks: 11 owned, 0 cached of 256
    slots: 0 of 1
release
rest
    decode: attempt 2
    prefill: d#1 over
    prefill: d#2 chunk 0 is tokens 0 to 40
    prefill: d#2 manifest
    client: d token 0
    decode: d#2 chunk 0 landed
    decode: d#2 ended, complete
    client: d token 1, length, disaggregated (long_prompt), prefill_lost 1
    prefill: d#2 over
show
    blocks: 0 owned, 10 cached of 256
    slots: 0 of 1
