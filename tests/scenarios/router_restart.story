# A worker that was started anew is another one: the old start is lost, whatever its stream says.
workers w0#1
    dial w0
up w0#1
arrive a 10+10
    place a on w0
workers w0#2
    hang up w0
    dial w0#2
up w0#1
lost w0#1 decode_lost
show
    waiting: 1
up w0#2
    place a on w0#2 (decode_replaced)
finish a
counters
    decode_replaced: 1
