# A large request that waits for room is not overtaken on the worker that it waits for; elsewhere others pass.
limits max_overcommit=1.0
workers big:1000 small:100
    dial big
    dial small
up big
up small
arrive a 400+40
    place a on big
arrive b 400+40
    place b on big
arrive large 500+40
arrive little 10+10
    place little on small
arrive middle 80+10
finish a
    place large on big
finish b
    place middle on big
show
    big: 2 requests, 630 tokens
    small: 1 requests, 20 tokens
    waiting: 0
