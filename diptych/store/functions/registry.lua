#!lua name=diptych_registry__VERSION__
-- The workers that are alive. KEYS: 1 the worker's hash, 2 the index.
--
-- The hash has a TTL and holds epoch, since, record. The index is a sorted set of worker ids by the moment (ms) at
-- which they expire, so that nobody scans. `since` is the server's time (us) at which an epoch first announced itself:
-- epochs are random, `since` gives them an order that outlives the loss of the hash.
--
-- Membership may write when memory is full (allow-oom): it is one hash a worker, and without it nothing is served.

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function clear_foreign(key, type)
  local found = redis.call('TYPE', key).ok
  if found ~= type and found ~= 'none' then redis.call('DEL', key) end
end

-- ARGV: worker id, epoch, since (0: not known yet), ttl in ms, record.
-- Returns {1, since, whether nothing was there} or, for an epoch that was replaced, {0, the newer epoch}.
local function announce(keys, argv)
  local worker, index = keys[1], keys[2]
  local id, epoch, since, ttl_ms, record = argv[1], argv[2], tonumber(argv[3]), tonumber(argv[4]), argv[5]
  clear_foreign(worker, 'hash')
  clear_foreign(index, 'zset')
  local held = redis.call('HMGET', worker, 'epoch', 'since')
  local held_epoch, held_since = held[1], tonumber(held[2] or 0) or 0
  local now = now_us()
  if since == 0 then
    since = held_epoch == epoch and held_since or math.max(now, held_since + 1)
  elseif held_epoch and held_epoch ~= epoch and held_since > since then
    return {0, held_epoch}
  end
  local since_text = string.format('%.0f', since)
  redis.call('HSET', worker, 'epoch', epoch, 'since', since_text, 'record', record)
  redis.call('PEXPIRE', worker, ttl_ms)
  local now_ms = math.floor(now / 1000)
  redis.call('ZREMRANGEBYSCORE', index, '-inf', string.format('%.0f', now_ms))
  redis.call('ZADD', index, string.format('%.0f', now_ms + ttl_ms), id)
  if redis.call('PTTL', index) < ttl_ms then redis.call('PEXPIRE', index, ttl_ms) end
  return {1, since_text, held_epoch and 0 or 1}
end

-- ARGV: worker id, epoch. Removes that epoch only; returns 1 if it was there.
local function leave(keys, argv)
  clear_foreign(keys[1], 'hash')
  clear_foreign(keys[2], 'zset')
  local held_epoch = redis.call('HGET', keys[1], 'epoch')
  if held_epoch and held_epoch ~= argv[2] then return 0 end
  redis.call('ZREM', keys[2], argv[1])
  redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', string.format('%.0f', math.floor(now_us() / 1000)))
  return redis.call('DEL', keys[1])
end

-- KEYS: 1 the index. ARGV: prefix of the workers' keys. Returns the records, a line each: one answer of a thousand
-- lines is read 6 times faster than an answer of a thousand parts.
local function alive(keys, argv)
  local now_ms = string.format('%.0f', math.floor(now_us() / 1000))
  local records = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', keys[1], now_ms, '+inf')) do
    local record = redis.pcall('HGET', argv[1] .. id, 'record')
    if type(record) == 'string' then records[#records + 1] = record end
  end
  return table.concat(records, '\n')
end

redis.register_function{
  function_name='diptych_registry_announce__VERSION__', callback=announce, flags={'allow-oom'}}
redis.register_function{
  function_name='diptych_registry_leave__VERSION__', callback=leave, flags={'allow-oom'}}
redis.register_function{
  function_name='diptych_registry_alive__VERSION__', callback=alive, flags={'no-writes'}}
