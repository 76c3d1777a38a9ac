# A step that decodes takes 8 ms, a prompt token 1 ms: 4 tokens (a portion) are paid for by two steps' slack of 2 ms.
rig threshold=100 step_ms=8 token_us=1000
watch
submit a 6+20
turn 3
    decode runs 6 of a
    client: a token 0
    decode runs 1 of a
    client: a token 1
    decode runs 1 of a
    client: a token 2
submit b 16+2
rest
    decode runs 1 of a, 4 of b
    client: a token 3
    decode runs 1 of a
    client: a token 4
    decode runs 1 of a
    client: a token 5
    decode runs 1 of a, 4 of b
    client: a token 6
    decode runs 1 of a
    client: a token 7
    decode runs 1 of a, 4 of b
    client: a token 8
    decode runs 1 of a
    client: a token 9
    decode runs 1 of a, 4 of b
    client: a token 10
    client: b token 0
    decode runs 1 of a, 1 of b
    client: a token 11
    client: b token 1, length, local (short_prompt)
    decode runs 1 of a
    client: a token 12
    decode runs 1 of a
    client: a token 13
    decode runs 1 of a
    client: a token 14
    decode runs 1 of a
    client: a token 15
    decode runs 1 of a
    client: a token 16
    decode runs 1 of a
    client: a token 17
    decode runs 1 of a
    client: a token 18
    decode runs 1 of a
    client: a token 19, length, local (short_prompt)

# Cheap tokens: as many as the slack pays for, in each step.
rig threshold=100 step_ms=8 token_us=100
watch
submit a 6+9
turn 3
    decode runs 6 of a
    client: a token 0
    decode runs 1 of a
    client: a token 1
    decode runs 1 of a
    client: a token 2
submit b 70+1
rest
    decode runs 1 of a, 4 of b
    client: a token 3
    decode runs 1 of a, 20 of b
    client: a token 4
    decode runs 1 of a, 20 of b
    client: a token 5
    decode runs 1 of a, 20 of b
    client: a token 6
    decode runs 1 of a, 6 of b
    client: a token 7
    client: b token 0, length, local (short_prompt)
    decode runs 1 of a
    client: a token 8, length, local (short_prompt)

# Nobody decodes: there is nothing to keep.
rig threshold=1000 step_ms=8 token_us=1000
watch
submit a 300+1
rest
    decode runs 256 of a
    decode runs 44 of a
    client: a token 0, length, local (short_prompt)
