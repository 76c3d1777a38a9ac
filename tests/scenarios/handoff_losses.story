# The job that nobody claims is taken back, and its prompt is prefilled here.
claim no
submit a 40+2
rest
    decode: job of a, 40 tokens, 0 held
pass 9.9
rest
pass 0.2
rest
    decode: job of a withdrawn
    client: a token 0
    client: a token 1, length, local (attempts_failed), begin_timeout 1
claim yes

# The bus does not take the job.
claim no
submit b 41+2
turn
    decode: job of b, 41 tokens, 0 held
unpost b
rest
    client: b token 0
    client: b token 1, length, local (attempts_failed), store_unavailable 1
claim yes

# The prefill worker goes silent after its first chunk: another attempt; what landed is kept.
submit c 600+2
turn 3
    decode: job of c, 600 tokens, 0 held
    decode: attempt 1
    prefill: c#1 chunk 0 is tokens 0 to 256
mute c 1
rest
    decode: c#1 chunk 0 landed
pass 3
rest
    decode: job of c, 600 tokens, 256 held
    decode: c#1 ended, prefill_stalled
    decode: attempt 2
    prefill: c#2 chunk 0 is tokens 256 to 512
    prefill: c#2 chunk 1 is tokens 512 to 600
    prefill: c#2 manifest
    client: c token 0
    decode: c#2 chunk 0 landed
    decode: c#2 chunk 1 landed
    decode: c#2 ended, complete
    client: c token 1, length, disaggregated (long_prompt), prefill_stalled 1
    prefill: c#2 over

# It is lost outright, twice: then here.
mute d 1
mute d 2
submit d 700+2
turn 3
    decode: job of d, 700 tokens, 0 held
    decode: attempt 1
lose d 1
turn 4
    decode: job of d, 700 tokens, 0 held
    decode: d#1 ended, prefill_lost
    decode: attempt 2
lose d 2
rest
    decode: d#2 ended, prefill_lost
    client: d token 0
    client: d token 1, length, local (attempts_failed), prefill_lost 2
