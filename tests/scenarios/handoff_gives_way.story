# The pool is full of one that runs and one whose KV nobody has begun: the older one takes the blocks of the younger.
rig num_blocks=12 threshold=10
claim no
submit old 8+30
turn 2
    client: old token 0
    client: old token 1
submit young 22+2
turn
    decode: job of young, 22 tokens, 0 held
    client: old token 2
show
    blocks: 9 owned, 0 cached of 12
    slots: 0 of 2
turn 25
    client: old token 3
    client: old token 4
    client: old token 5
    client: old token 6
    client: old token 7
    client: old token 8
    client: old token 9
    client: old token 10
    client: old token 11
    client: old token 12
    client: old token 13
    client: old token 14
    client: old token 15
    client: old token 16
    decode: job of young withdrawn
    client: old token 17
    client: old token 18
    client: old token 19
    client: old token 20
    client: old token 21
    client: old token 22
    client: old token 23
    client: old token 24
    client: old token 25
    client: old token 26
    client: old token 27
claim yes
rest
    client: old token 28
    client: old token 29, length, local (short_prompt)
    decode: job of young, 22 tokens, 0 held
    decode: attempt 1
    prefill: young#1 chunk 0 is tokens 0 to 22
    prefill: young#1 manifest
    client: young token 0
    decode: young#1 chunk 0 landed
    decode: young#1 ended, complete
    client: young token 1, length, disaggregated (long_prompt), preempted 1
    prefill: young#1 over
show
    blocks: 0 owned, 11 cached of 12
    slots: 0 of 2
