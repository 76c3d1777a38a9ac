# A prompt's chunks are offered head first; the tail goes first all the same, for without its head it is of no use.
tier 4
offer a b<a c<b x
    a at 0
    b<a at 1
    c<b at 2
    x at 3
show
    4 of 4 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: c b a x
offer y
    evict c
    y at 2
show
    4 of 4 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: b a x y
offer z
    evict b
    z at 1

# Using the tail again keeps its head.
tier 3
offer a b<a x
    a at 0
    b<a at 1
    x at 2
lend b 1 10
    at 1
give_back 1
    ended
offer y
    evict x
    y at 2
offer z
    evict b
    z at 1
show
    3 of 3 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: a y z
