# A short prompt that comes while a long one is prefilled waits for one chunk of it, here on the prefill worker.
rig threshold=0 num_blocks=1024 prefill_blocks=1024
watch
submit long 1100+2
turn 3
    decode: job of long, 1100 tokens, 0 held
    decode: attempt 1
    prefill runs 256 of long
    prefill: long#1 chunk 0 is tokens 0 to 256
submit short 40+2
rest
    prefill runs 256 of long
    decode: job of short, 40 tokens, 0 held
    prefill: long#1 chunk 1 is tokens 256 to 512
    prefill runs 256 of long
    decode: attempt 1
    decode: long#1 chunk 0 landed
    prefill: long#1 chunk 2 is tokens 512 to 768
    prefill runs 256 of long
    decode: long#1 chunk 1 landed
    prefill: long#1 chunk 3 is tokens 768 to 1024
    prefill runs 40 of short, 76 of long
    decode: long#1 chunk 2 landed
    prefill: long#1 chunk 4 is tokens 1024 to 1100
    prefill: short#1 chunk 0 is tokens 0 to 40
    prefill: long#1 manifest
    prefill: short#1 manifest
    decode: long#1 chunk 3 landed
    decode runs 1 of long, 1 of short
    client: long token 0
    client: short token 0
    decode: long#1 chunk 4 landed
    decode: short#1 chunk 0 landed
    decode: long#1 ended, complete
    decode: short#1 ended, complete
    client: long token 1, length, disaggregated (long_prompt)
    client: short token 1, length, disaggregated (long_prompt)
    prefill: long#1 over
    prefill: short#1 over

# The same where everything is done on one worker: beside the tokens of those that run.
rig colocated=1 num_blocks=1024
watch
submit running 8+9
turn
    decode runs 8 of running
    client: running token 0
submit long 700+1
turn
    decode runs 1 of running, 256 of long
    client: running token 1
submit short 40+1
rest
    decode runs 1 of running, 256 of long
    client: running token 2
    decode runs 1 of running, 40 of short, 188 of long
    client: running token 3
    client: short token 0, length, local (colocated)
    client: long token 0, length, local (colocated)
    decode runs 1 of running
    client: running token 4
    decode runs 1 of running
    client: running token 5
    decode runs 1 of running
    client: running token 6
    decode runs 1 of running
    client: running token 7
    decode runs 1 of running
    client: running token 8, length, local (colocated)
