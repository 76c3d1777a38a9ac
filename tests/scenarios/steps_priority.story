# One at a time: the lower number first, then as they came.
rig colocated=1 max_batch=1 num_blocks=64
watch
submit first 8+2
turn
    decode runs 8 of first
    client: first token 0
submit patient 8+1 5
submit second 8+1
submit urgent 8+1 -1
rest
    decode runs 1 of first
    client: first token 1, length, local (colocated)
    decode runs 8 of urgent
    client: urgent token 0, length, local (colocated)
    decode runs 8 of second
    client: second token 0, length, local (colocated)
    decode runs 8 of patient
    client: patient token 0, length, local (colocated)

# Ten seconds of waiting are worth one step of priority: nobody waits for ever.
submit first2 8+2
turn
    decode runs 4 of first2
    client: first2 token 0
submit patient2 8+1 2
pass 19
submit soon 8+1 0
pass 2
submit late 8+1 0
rest
    decode runs 1 of first2
    client: first2 token 1, length, local (colocated)
    decode runs 8 of soon
    client: soon token 0, length, local (colocated)
    decode runs 8 of late
    client: late token 0, length, local (colocated)
    decode runs 4 of patient2
    client: patient2 token 0, length, local (colocated)
