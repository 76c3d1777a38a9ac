# A conversation goes on where its prefix is, as long as that worker has little more to do than the best.
workers w0 w1
    dial w0
    dial w1
up w0
up w1
arrive turn1 10+10 a
    place turn1 on w0
arrive other 10+10 x
    place other on w1
finish turn1
finish other
arrive turn2 10+10 a/b
    place turn2 on w0
arrive turn3 10+10 a/b/c
    place turn3 on w0
arrive turn4 10+10 a/b/c/d
    place turn4 on w0
show
    w0: 3 requests, 60 tokens
    w1: 0 requests, 0 tokens
    waiting: 0
# Not at any price.
arrive turn5 10+10 a/b/c
    place turn5 on w1
arrive turn6 10+10 a
    place turn6 on w1
show
    w0: 3 requests, 60 tokens
    w1: 2 requests, 40 tokens
    waiting: 0

# What moved on is looked for where it went; a start anew holds nothing.
finish turn2
finish turn3
finish turn4
finish turn5
finish turn6
arrive x2 10+10 x
    place x2 on w1
finish x2
workers w0#2 w1
    hang up w0
    dial w0#2
up w0#2
arrive turn7 10+10 a/b/c/d
    place turn7 on w1
arrive turn8 10+10 a/b/c
    place turn8 on w1
show
    w1: 2 requests, 40 tokens
    w0#2: 0 requests, 0 tokens
    waiting: 0
