# A prompt of four chunks fills the cache; the next prompt takes the place of its oldest chunks.
tier 4
offer a1 a2 a3 a4
    a1 at 0
    a2 at 1
    a3 at 2
    a4 at 3
offer b1 b2
    evict a1
    b1 at 0
    evict a2
    b2 at 1
show
    4 of 4 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: a3 a4 b1 b2

# A chunk that is used again stays.
offer a3
    a3 refused: held
offer b3 b4
    evict a4
    b3 at 3
    evict b1
    b4 at 0
show
    4 of 4 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: b2 a3 b3 b4

# What is lent stays, however old it is, and when everything is lent there is no room.
lend a3 1 10
    at 2
offer c1 c2 c3
    evict b2
    c1 at 1
    evict b3
    c2 at 3
    evict b4
    c3 at 0
lend c1 2 10
    at 1
lend c2 3 10
    at 3
lend c3 4 10
    at 0
offer d1
    d1 refused: no_room
lend c3 5 10
    miss: leases
show
    4 of 4 units, 0 being read
    4 lent under 4 leases
    least recently used first, lent last: a3 c1 c2 c3

# One lease less, and there is.
give_back 2
    ended
offer d1
    evict c1
    d1 at 1
show
    4 of 4 units, 0 being read
    3 lent under 3 leases
    least recently used first, lent last: d1 a3 c2 c3
