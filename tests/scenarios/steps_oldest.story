# The oldest keeps its blocks, whatever its priority; of the others, the one that matters least gives way.
rig colocated=1 num_blocks=16
submit old 8+36 9
turn 2
    client: old token 0
    client: old token 1
submit unimportant 8+20 1
submit important 8+20 0
rest
    client: old token 2
    client: important token 0
    client: unimportant token 0
    client: old token 3
    client: important token 1
    client: unimportant token 1
    client: old token 4
    client: important token 2
    client: unimportant token 2
    client: old token 5
    client: important token 3
    client: unimportant token 3
    client: old token 6
    client: important token 4
    client: unimportant token 4
    client: old token 7
    client: important token 5
    client: unimportant token 5
    client: old token 8
    client: important token 6
    client: unimportant token 6
    client: old token 9
    client: important token 7
    client: unimportant token 7
    client: old token 10
    client: important token 8
    client: unimportant token 8
    client: old token 11
    client: important token 9
    client: unimportant token 9
    client: old token 12
    client: important token 10
    client: unimportant token 10
    client: old token 13
    client: important token 11
    client: unimportant token 11
    client: old token 14
    client: important token 12
    client: unimportant token 12
    client: old token 15
    client: important token 13
    client: old token 16
    client: important token 14
    client: old token 17
    client: important token 15
    client: old token 18
    client: important token 16
    client: old token 19
    client: important token 17
    client: old token 20
    client: important token 18
    client: old token 21
    client: important token 19, length, local (colocated)
    client: old token 22
    client: unimportant token 13
    client: old token 23
    client: unimportant token 14
    client: old token 24
    client: unimportant token 15
    client: old token 25
    client: unimportant token 16
    client: old token 26
    client: unimportant token 17
    client: old token 27
    client: unimportant token 18
    client: old token 28
    client: unimportant token 19, length, local (colocated), preempted 1
    client: old token 29
    client: old token 30
    client: old token 31
    client: old token 32
    client: old token 33
    client: old token 34
    client: old token 35, length, local (colocated)
show
    blocks: 0 owned, 15 cached of 16
    slots: 0 of 2
