# A cancel in each state. A placed request takes room until its worker has confirmed, or for `cancel_wait_s`.
limits max_overcommit=1.0
workers w0:100
    dial w0
up w0
arrive a 20+20
    place a on w0
arrive b 20+20
    place b on w0
arrive waiting 20+20
cancel waiting
    end waiting: Cancelled: cancelled while it waited
arrive c 20+20
cancel a
    abort a on w0
cancel a
show
    w0: 2 requests, 80 tokens
    waiting: 1
finish a
    place c on w0
cancel nobody

# Not confirmed in time.
cancel b
    abort b on w0
at 0.9
tick
at 1
tick
    end b: Cancelled: cancelled; its decode worker did not confirm in time

# The worker is lost while it should confirm: that is the end of it.
cancel c
    abort c on w0
lost w0 decode_lost
    end c: Cancelled: cancelled
show
    waiting: 0
counters
    client_gone: 4
    cancel_unconfirmed: 1
