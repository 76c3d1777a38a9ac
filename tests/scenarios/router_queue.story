# Room is bounded, and so is the queue: who does not fit in hears at once when to come back.
limits max_queue=2 max_overcommit=1.0
workers w0:200
    dial w0
up w0
arrive a 80+20
    place a on w0
arrive b 80+20
    place b on w0
arrive c 80+20
arrive d 80+20 !-1
arrive e 80+20
    refused: Overloaded: the queue is full (2 requests) (retry after 1 s)
show
    w0: 2 requests, 200 tokens
    waiting: 2

# A place is free: first by priority, then by arrival.
at 1
finish a
    place d on w0
at 2
finish b
    place c on w0
at 3
finish d
arrive f 80+20
    place f on w0
arrive g 80+20
arrive h 80+20
arrive i 80+20
    refused: Overloaded: the queue is full (2 requests) (retry after 2 s)

# A wait is bounded as well.
at 11
tick
at 13
tick
    end g: Overloaded: waited 10 s in the queue (retry after 1 s)
    end h: Overloaded: waited 10 s in the queue (retry after 0.1 s)
counters
    queue_full: 2
    queue_timeout: 2
show
    w0: 2 requests, 200 tokens
    waiting: 0
