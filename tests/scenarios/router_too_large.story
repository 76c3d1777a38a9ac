# What can never fit is refused, at once where workers are known, else as soon as one is.
arrive early 500+200
arrive early_but_small 10+10
workers w0:1000
    dial w0
tick
    end early: TooLarge: 700 tokens of prompt and output fit on no decode worker
up w0
    place early_but_small on w0
arrive share 590+10
    place share on w0
arrive past_share 591+10
    refused: TooLarge: 601 tokens of prompt and output fit on no decode worker
workers w0:1000/300
arrive context 280+20
    place context on w0
arrive past_context 281+20
    refused: TooLarge: 301 tokens of prompt and output fit on no decode worker
counters
    too_large: 3
