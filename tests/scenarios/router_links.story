# A prompt that is handed over goes where its KV comes over a good link; load still counts.
limits max_overcommit=100
workers w0:10000~900x w1:10000~900s,800s w2:10000~900s,40 w3:10000~600
    dial w0
    dial w1
    dial w2
    dial w3
up w0
up w1
up w2
up w3

# All empty: w2 and w3 have a link within its bound, and the nearest prefill worker decides.
arrive a 600+20
    place a on w2
arrive b 600+20
    place b on w3

# A short one is prefilled where it is decoded: links are nothing to it.
arrive short 20+20
    place short on w0
show
    w0: 1 requests, 40 tokens
    w1: 0 requests, 0 tokens
    w2: 1 requests, 620 tokens
    w3: 1 requests, 620 tokens
    waiting: 0

# Links past their bound weigh four requests, links that may not be used eight.
arrive c1 600+20
    place c1 on w2
arrive c2 600+20
    place c2 on w3
arrive c3 600+20
    place c3 on w2
arrive c4 600+20
    place c4 on w3
arrive c5 600+20
    place c5 on w2
arrive c6 600+20
    place c6 on w3
arrive c7 600+20
    place c7 on w1
arrive c8 600+20
    place c8 on w2
show
    w0: 1 requests, 40 tokens
    w1: 1 requests, 620 tokens
    w2: 5 requests, 3100 tokens
    w3: 4 requests, 2480 tokens
    waiting: 0

# The bound is lifted: the worker that was cut off is like any other.
workers w0:10000~900 w1:10000~900s,800s w2:10000~900s,40 w3:10000~600
arrive d 600+20
    place d on w0

# Where all are cut off somebody serves it still, and prefills by itself.
workers w0:10000~900x w1:10000~900x w2:10000~900x w3:10000~900x
arrive e 600+20
    place e on w1
