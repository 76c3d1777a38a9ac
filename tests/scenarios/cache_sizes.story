# Chunks of two models lie beside each other. The small one's hole is not worth the large one's while: what is
# evicted is what makes room.
tier 8
offer s1 l1*3 s2 l2*3
    s1 at 0
    l1*3 at 1
    s2 at 4
    l2*3 at 5
lend s2 1 60
    at 4
offer m*3
    evict l1
    m*3 at 1
show
    8 of 8 units, 0 being read
    1 lent under 1 leases
    least recently used first, lent last: s1 l2 m s2

# The smallest hole that fits is taken, so that the large one stays whole.
tier 8
offer l1*3 s1 s2
    l1*3 at 0
    s1 at 3
    s2 at 4
lend s1 1 60
    at 3
offer x*4
    evict s2
    x*4 at 4
offer t*2
    evict l1
    t*2 at 0
show
    7 of 8 units, 0 being read
    1 lent under 1 leases
    least recently used first, lent last: x t s1

# What can never fit is refused, and costs nobody its place.
offer huge*9
    huge*9 refused: too_large
show
    7 of 8 units, 0 being read
    1 lent under 1 leases
    least recently used first, lent last: x t s1

# Another layout under the same name: refused, and a miss.
offer s1/gemma
    s1/gemma refused: foreign
lend s1/gemma 2 10
    miss: foreign
