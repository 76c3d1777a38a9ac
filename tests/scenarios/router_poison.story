# A request that kills whoever takes it stops after `max_moves`, and hears the first cause.
workers w0 w1 w2 w3
    dial w0
    dial w1
    dial w2
    dial w3
up w0
up w1
up w2
up w3
arrive poison 10+10
    place poison on w0
lost w0 decode_lost
    place poison on w1 (decode_lost)
lost w1 decode_lost
    place poison on w2 (decode_lost)
lost w2 decode_silent
    end poison: PeerLost: given up after 3 decode workers; the first was lost: w0 ended the session
show
    w3: 0 requests, 0 tokens
    waiting: 0
counters
    decode_lost: 2
    decode_silent: 1
    moved_too_often: 1
