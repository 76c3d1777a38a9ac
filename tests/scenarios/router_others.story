# Another router's requests count, as of the worker's last sign of life; our own are not counted twice.
workers w0 w1
    dial w0
    dial w1
up w0
up w1
arrive a 10+10
    place a on w0
arrive b 10+10
    place b on w1
workers w0+1 w1+4
arrive c 10+10
    place c on w0
arrive d 10+10
    place d on w0
arrive e 10+10
    place e on w0
workers w0+4 w1+1
arrive f 10+10
    place f on w1
show
    w0: 4 requests, 80 tokens
    w1: 2 requests, 40 tokens
    waiting: 0
