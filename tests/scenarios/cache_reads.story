# While a chunk is read it is there for nobody: not lent, not read twice, not evicted.
tier 2
begin a
    a at 0
lend a 1 10
    miss: filling
begin a
    a refused: held
offer b
    b at 1
offer c
    evict b
    c at 1
show
    2 of 2 units, 1 being read
    0 lent under 0 leases
    least recently used first, lent last: c
land a
lend a 1 10
    at 0

# A read that fails leaves nothing behind, and the chunk may be offered again.
begin d
    evict c
    d at 1
fail d
lend d 2 10
    miss: absent
offer d
    d at 1

# As many reads at a time as allowed.
tier 4
begin e
    e at 0
begin f
    f at 1
begin g
    g refused: busy
fail e
begin g
    g at 0
land f
land g
show
    2 of 4 units, 0 being read
    0 lent under 0 leases
    least recently used first, lent last: f g

# Dropping spares what is lent or being read.
lend f 3 10
    at 1
begin h
    h at 2
drop
    dropped g
show
    2 of 4 units, 1 being read
    1 lent under 1 leases
    least recently used first, lent last: f
land h
give_back 3
    ended
drop
    dropped h f
