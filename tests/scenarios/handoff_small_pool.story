# Two requests that each fit, and do not fit together: the younger gives way, and starts over from its tokens.
rig num_blocks=8 threshold=100
submit a 10+14
submit b 10+14
rest
    client: a token 0
    client: b token 0
    client: a token 1
    client: b token 1
    client: a token 2
    client: b token 2
    client: a token 3
    client: b token 3
    client: a token 4
    client: b token 4
    client: a token 5
    client: b token 5
    client: a token 6
    client: b token 6
    client: a token 7
    client: a token 8
    client: a token 9
    client: a token 10
    client: a token 11
    client: a token 12
    client: a token 13, length, local (short_prompt)
    client: b token 7
    client: b token 8
    client: b token 9
    client: b token 10
    client: b token 11
    client: b token 12
    client: b token 13, length, local (short_prompt), preempted 1
show
    blocks: 0 owned, 7 cached of 8
    slots: 0 of 2

# One that can never fit is refused at once.
submit c 30+4
rest
    client: c error: TooLarge
