# A send ring of one slot: chunks are announced as they are read, never more than one at a time.
rig send_slots=1 landing_slots=1 threshold=8
submit a 700+2
rest
    decode: job of a, 700 tokens, 0 held
    decode: attempt 1
    prefill: a#1 chunk 0 is tokens 0 to 256
    decode: a#1 chunk 0 landed
    prefill: a#1 chunk 1 is tokens 256 to 512
    decode: a#1 chunk 1 landed
    prefill: a#1 chunk 2 is tokens 512 to 700
    prefill: a#1 manifest
    client: a token 0
    decode: a#1 chunk 2 landed
    decode: a#1 ended, complete
    client: a token 1, length, disaggregated (long_prompt)
    prefill: a#1 over

# A prompt that the prefill worker's pool can't hold fails there; then it is prefilled here.
rig prefill_blocks=8 threshold=8
submit b 100+2
rest
    decode: job of b, 100 tokens, 0 held
    decode: attempt 1
    prefill: b#1 over, TooLarge
    decode: b#1 ended, prefill_too_small
    client: b token 0
    client: b token 1, length, local (attempts_failed), prefill_too_small 1
