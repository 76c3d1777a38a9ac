# A worker leaves the registry: no new requests for it, but what it has it finishes; then the session ends.
workers w0 w1
    dial w0
    dial w1
up w0
up w1
arrive a 10+10
    place a on w0
workers w1
arrive b 10+10
    place b on w1
arrive c 10+10
    place c on w1
tick
finish a
tick
    hang up w0
# The store lost its memory for a moment: nobody moves.
workers
tick
show
    waiting: 0
arrive d 10+10
workers w1
    place d on w1
show
    w1: 3 requests, 60 tokens
    waiting: 0
