# A borrower that dies pins its chunk until its lease ends, and no longer.
tier 1
offer a
    a at 0
lend a 1 10
    at 0
at 9.9
offer b
    b refused: no_room
at 10
offer b
    evict a
    b at 0
give_back 1
    unknown

# Nobody gets a longer lease than allowed.
tier 1 2 4 5
at 20
offer a
    a at 0
lend a 1 1000
    at 0
at 24.9
offer b
    b refused: no_room
at 25
offer b
    evict a
    b at 0

# Two borrowers of one chunk: the last one counts.
tier 1
at 30
offer a
    a at 0
lend a 1 10
    at 0
lend a 2 20
    at 0
give_back 1
    ended
offer b
    b refused: no_room
at 50
offer b
    evict a
    b at 0

# Ids of an earlier process, and ids given back twice, are unknown and change nothing.
give_back 99
    unknown
give_back 2
    unknown
show
    1 of 1 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: b
