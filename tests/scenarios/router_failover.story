# A worker is lost: its requests move on, at a rate, and new ones go on being served meanwhile.
workers w0 w1
    dial w0
    dial w1
up w0
up w1
arrive a 10+10
    place a on w0
arrive b 10+10
    place b on w1
arrive c 10+10
    place c on w0
arrive d 10+10
    place d on w1
arrive e 10+10
    place e on w0
arrive f 10+10
    place f on w1
show
    w0: 3 requests, 60 tokens
    w1: 3 requests, 60 tokens
    waiting: 0
at 1
lost w0 decode_silent
    place a on w1 (decode_silent)
    place c on w1 (decode_silent)
show
    w1: 5 requests, 100 tokens
    waiting: 1
arrive new 10+10
    place new on w1
at 1.4
tick
    dial w0
at 1.5
tick
    place e on w1 (decode_silent)
show
    w1: 7 requests, 140 tokens
    waiting: 0
# It is still listed: it is dialled again, with a back-off.
up w0
arrive g 10+10
    place g on w0
lost w0 decode_lost
at 1.55
tick
at 1.6
tick
    dial w0
counters
    decode_lost: 1
    decode_silent: 3
