# The least loaded worker for its size takes a request; the load follows the live set and nothing else.
workers w0:1000 w1:1000 w2:2000@far
    dial w0
    dial w1
    dial w2
up w0
up w1
up w2

# All empty: our own cell first, then by name.
arrive a 100+20
    place a on w0
arrive b 100+20
    place b on w1
# One request on a pool twice as large presses half as much.
arrive c 100+20
    place c on w2
arrive d 100+20
    place d on w2
show
    w0: 1 requests, 120 tokens
    w1: 1 requests, 120 tokens
    w2: 2 requests, 240 tokens
    waiting: 0

finish a
finish b
finish c
finish d
show
    w0: 0 requests, 0 tokens
    w1: 0 requests, 0 tokens
    w2: 0 requests, 0 tokens
    waiting: 0

# Equally many requests: fewer tokens decide.
arrive long 300+20
    place long on w0
arrive short 10+20
    place short on w1
arrive on_large 10+20
    place on_large on w2
arrive on_large_2 10+20
    place on_large_2 on w2
arrive next 10+20
    place next on w1
show
    w0: 1 requests, 320 tokens
    w1: 2 requests, 60 tokens
    w2: 2 requests, 60 tokens
    waiting: 0
