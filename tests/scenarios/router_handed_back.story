# A worker that drains hands a request back: another takes it, and it is not asked again for a while.
workers w0 w1
    dial w0
    dial w1
up w0
arrive a 10+10
    place a on w0
hand_back a
up w1
    place a on w1 (decode_handed_back)
hand_back a
    place a on w0 (decode_handed_back)
at 2
tick
counters
    decode_handed_back: 2
