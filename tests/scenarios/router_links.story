# A prompt that is handed over goes where its KV comes over a good link; load still counts.
limits max_overcommit=100
workers w0:10000~900x w1:10000~900s,800s w2:10000~600 w3:10000~900s,40
    dial w0
    dial w1
    dial w2
    dial w3
up w0
up w1
up w2
up w3

# All empty: w2 and w3 have a link within its bound, and of them w3 has the nearest prefill worker.
arrive a 600+20
    place a on w3
arrive b 600+20
    place b on w2

# A short one is prefilled where it is decoded: links are nothing to it.
arrive short 20+20
    place short on w0
show
    w0: 1 requests, 40 tokens
    w1: 0 requests, 0 tokens
    w2: 1 requests, 620 tokens
    w3: 1 requests, 620 tokens
    waiting: 0
finish short

# Links past their bound weigh four requests, links that may not be used eight: w1 comes before w0.
arrive c1 600+20
    place c1 on w3
arrive c2 600+20
    place c2 on w2
arrive c3 600+20
    place c3 on w3
arrive c4 600+20
    place c4 on w2
arrive c5 600+20
    place c5 on w3
arrive c6 600+20
    place c6 on w2
arrive c7 600+20
    place c7 on w1
arrive c8 600+20
    place c8 on w3
show
    w0: 0 requests, 0 tokens
    w1: 1 requests, 620 tokens
    w2: 4 requests, 2480 tokens
    w3: 5 requests, 3100 tokens
    waiting: 0

# The bound is lifted: the worker that was cut off is like any other.
workers w0:10000~900 w1:10000~900s,800s w2:10000~600 w3:10000~900s,40
arrive d 600+20
    place d on w0

# Where all are cut off somebody serves it still, and prefills by itself.
workers w0:10000~900x w1:10000~900x w2:10000~900x w3:10000~900x
arrive e 600+20
    place e on w0
