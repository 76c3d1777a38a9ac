#!lua name=diptych_bus__VERSION__
-- The prefill queue of a cell. KEYS: 1 its stream.
--
-- An entry holds job, deadline (unix ms, 0: none) and deliveries. Workers read it as consumers of one group; the read
-- itself blocks and therefore can't be a function. An entry goes to another worker by being written anew (with one
-- delivery more) and deleted: a group has no way to make a pending entry free again.

local GROUP = 'prefill'
local SWEEPER = '.sweeper'
local IDLE_CONSUMER_MS = 600000

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function clear_foreign(key)
  local found = redis.call('TYPE', key).ok
  if found ~= 'stream' and found ~= 'none' then redis.call('DEL', key) end
end

local function remove(key, ids)
  redis.pcall('XACK', key, GROUP, unpack(ids))
  return redis.call('XDEL', key, unpack(ids))
end

-- ARGV: ttl in ms. Makes stream and group where they are missing.
local function open(keys, argv)
  clear_foreign(keys[1])
  redis.pcall('XGROUP', 'CREATE', keys[1], GROUP, '0', 'MKSTREAM')
  return redis.call('PEXPIRE', keys[1], argv[1])
end

-- ARGV: ttl in ms, most entries, job, deadline. Returns the entry's id, or nil when the stream is full.
local function post(keys, argv)
  clear_foreign(keys[1])
  if redis.call('XLEN', keys[1]) >= tonumber(argv[2]) then return nil end
  local id = redis.call('XADD', keys[1], '*', 'job', argv[3], 'deadline', argv[4], 'deliveries', '1')
  redis.call('PEXPIRE', keys[1], argv[1])
  return id
end

-- ARGV: ids. Returns how many were still there.
local function done(keys, argv)
  return remove(keys[1], argv)
end

local function redeliver(key, id, fields, max_deliveries, now)
  local entry = {}
  for i = 1, #fields, 2 do entry[fields[i]] = fields[i + 1] end
  local deliveries, deadline = tonumber(entry.deliveries), tonumber(entry.deadline)
  local fate = 'redelivered'
  if not (entry.job and deliveries and deadline) then fate = 'malformed'
  elseif deadline > 0 and deadline <= now then fate = 'expired'
  elseif deliveries >= max_deliveries then fate = 'exhausted'
  else
    redis.call('XADD', key, '*', 'job', entry.job, 'deadline', entry.deadline,
      'deliveries', string.format('%d', deliveries + 1))
  end
  remove(key, {id})
  return fate
end

local function forget_idle_consumers(key)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', key, GROUP)
  if consumers.err then return end
  for _, flat in ipairs(consumers) do
    local consumer = {}
    for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
    if consumer.pending == 0 and consumer.idle > IDLE_CONSUMER_MS then
      redis.call('XGROUP', 'DELCONSUMER', key, GROUP, consumer.name)
    end
  end
end

-- ARGV: least idle time in ms, most deliveries, most entries to look at. Returns the fate of each.
local function sweep(keys, argv)
  local key, fates = keys[1], {}
  local claimed = redis.pcall('XAUTOCLAIM', key, GROUP, SWEEPER, argv[1], '0-0', 'COUNT', argv[3])
  if claimed.err then return fates end
  local now = now_ms()
  for _, entry in ipairs(claimed[2]) do
    fates[#fates + 1] = redeliver(key, entry[1], entry[2], tonumber(argv[2]), now)
  end
  forget_idle_consumers(key)
  return fates
end

-- ARGV: consumer, most deliveries, ids that it knows. Gives back what it was given and never saw.
local function give_back(keys, argv)
  local key, fates, known = keys[1], {}, {}
  for i = 3, #argv do known[argv[i]] = true end
  local pending = redis.pcall('XPENDING', key, GROUP, '-', '+', 1000, argv[1])
  if pending.err then return fates end
  local now = now_ms()
  for _, item in ipairs(pending) do
    local id = item[1]
    if not known[id] then
      local entry = redis.call('XRANGE', key, id, id)[1]
      if entry then
        fates[#fates + 1] = redeliver(key, id, entry[2], tonumber(argv[2]), now)
      else
        redis.call('XACK', key, GROUP, id)
      end
    end
  end
  return fates
end

-- Entries that nobody has claimed.
local function depth(keys)
  local length = redis.pcall('XLEN', keys[1])
  if type(length) ~= 'number' then return 0 end
  local pending = redis.pcall('XPENDING', keys[1], GROUP)
  if pending.err then return length end
  return math.max(0, length - pending[1])
end

-- ARGV: most entries of each kind. Returns how many entries there are, how many are claimed, the oldest entries, and
-- the oldest claims (id, consumer, idle ms, deliveries by the group).
local function look(keys, argv)
  local entries = redis.pcall('XRANGE', keys[1], '-', '+', 'COUNT', argv[1])
  if entries.err then return {0, 0, {}, {}} end
  local length = redis.call('XLEN', keys[1])
  local claims = redis.pcall('XPENDING', keys[1], GROUP, '-', '+', argv[1])
  if claims.err then return {length, 0, entries, {}} end
  return {length, redis.call('XPENDING', keys[1], GROUP)[1], entries, claims}
end

-- ARGV: ids. For each: for how many ms it has been claimed; -1 if nobody has claimed it, -2 if it is gone.
local function claims(keys, argv)
  local key, ages = keys[1], {}
  for i, id in ipairs(argv) do
    local pending = redis.pcall('XPENDING', key, GROUP, id, id, 1)
    local found = redis.pcall('XRANGE', key, id, id)
    if found.err or not found[1] then ages[i] = -2
    elseif pending.err or not pending[1] then ages[i] = -1
    else ages[i] = pending[1][3] end
  end
  return ages
end

-- Deletes the stream unless a job is left; returns 1 if it is gone.
local function retire(keys)
  clear_foreign(keys[1])
  if redis.call('XLEN', keys[1]) > 0 then return 0 end
  redis.call('DEL', keys[1])
  return 1
end

redis.register_function('diptych_bus_post__VERSION__', post)
redis.register_function{function_name='diptych_bus_open__VERSION__', callback=open, flags={'allow-oom'}}
redis.register_function{function_name='diptych_bus_done__VERSION__', callback=done, flags={'allow-oom'}}
redis.register_function{function_name='diptych_bus_sweep__VERSION__', callback=sweep, flags={'allow-oom'}}
redis.register_function{function_name='diptych_bus_give_back__VERSION__', callback=give_back, flags={'allow-oom'}}
redis.register_function{function_name='diptych_bus_depth__VERSION__', callback=depth, flags={'no-writes'}}
redis.register_function{function_name='diptych_bus_look__VERSION__', callback=look, flags={'no-writes'}}
redis.register_function{function_name='diptych_bus_claims__VERSION__', callback=claims, flags={'no-writes'}}
redis.register_function{function_name='diptych_bus_retire__VERSION__', callback=retire, flags={'allow-oom'}}
